"""The parts of PyTorch that `md.attach` uses, made of NumPy, for tests without torch.

There is no automatic differentiation: the test passes the gradients to `backward`. As torch's
AccumulateGrad does, `backward` calls the hooks of a tensor, adds the gradient, and then calls the
hooks that run after the addition.
"""

import sys
from types import ModuleType

import ml_dtypes
import numpy as np

strided, sparse_coo = "torch.strided", "torch.sparse_coo"


class DType:
    def __init__(self, name):
        self.name, self.numpy = name, np.dtype(getattr(ml_dtypes, name, name))

    def __repr__(self):
        return f"torch.{self.name}"


_NAMES = ("float32", "float64", "bfloat16", "int16", "int64", "uint8")
DTYPES = {name: DType(name) for name in _NAMES}


class Handle:
    def __init__(self, hooks, hook):
        self.hooks, self.hook = hooks, hook
        hooks.append(hook)

    def remove(self):
        self.hooks.remove(self.hook)


class Tensor:
    is_cpu, device, layout = True, "cpu", strided

    def __init__(self, array, requires_grad=False):
        self.array, self.requires_grad = array, requires_grad
        self.grad, self._version = None, 0
        self.before, self.behind = [], []

    dtype = property(lambda self: DTYPES[self.array.dtype.name])
    shape = property(lambda self: self.array.shape)

    def detach(self):
        found = Tensor(self.array)
        found.layout = self.layout
        return found

    def numpy(self):
        return self.array

    def clone(self):
        return Tensor(self.array.copy())

    def view(self, dtype):
        return Tensor(self.array.view(dtype.numpy))

    def to(self, dtype):
        return Tensor(self.array.astype(dtype.numpy))

    def element_size(self):
        return self.array.itemsize

    def data_ptr(self):
        return self.array.ctypes.data

    def copy_(self, other):
        self.array[...] = other.array
        self._version += 1

    def zero_(self):
        self.array[...] = 0
        self._version += 1

    def mul_(self, factor):
        self.array *= self.array.dtype.type(factor)
        self._version += 1

    def register_hook(self, hook):
        return Handle(self.before, hook)

    def register_post_accumulate_grad_hook(self, hook):
        return Handle(self.behind, hook)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **settings):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self.array.__dlpack__(**settings)


class Parameter(Tensor):
    def __init__(self, data):
        super().__init__(data.array, True)


class Module:
    def __init__(self):
        self.mine, self.buffers = {}, {}

    def register_parameter(self, name, parameter):
        self.mine[name] = parameter

    def register_buffer(self, name, tensor):
        self.buffers[name] = tensor

    def to(self, dtype):
        """As torch does it: the same parameters and gradients over other memory."""
        for _, parameter in self.named_parameters():
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    tensor.array = tensor.array.astype(dtype.numpy)

    def named_parameters(self):
        seen = set()
        for name, parameter in self.mine.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def named_buffers(self):
        yield from self.buffers.items()

    def parameters(self):
        return (parameter for _, parameter in self.named_parameters())


class SGD:
    def __init__(self, parameters, lr):
        self.param_groups, self.lr = [{"params": list(parameters)}], lr

    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def step(self):
        for hook in tuple(_optimizer.before):
            hook(self, (), {})
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.array -= parameter.array.dtype.type(self.lr) * parameter.grad.array
        for hook in tuple(_optimizer.behind):
            hook(self, (), {})


def from_numpy(array):
    return Tensor(array)


def from_dlpack(array):
    return Tensor(np.asarray(array))


def backward(gradients):
    """Add the gradient of each parameter in {parameter: array} to it."""
    for parameter, gradient in gradients.items():
        for hook in tuple(parameter.before):
            hook(Tensor(gradient))
        if parameter.grad is None:
            parameter.grad = Tensor(np.array(gradient, parameter.array.dtype))
        else:
            parameter.grad.array += gradient.astype(parameter.array.dtype)
            parameter.grad._version += 1
        for hook in tuple(parameter.behind):
            hook(parameter)


_optimizer = ModuleType("torch.optim.optimizer")
_optimizer.before, _optimizer.behind = [], []
_optimizer.register_optimizer_step_pre_hook = lambda hook: Handle(_optimizer.before, hook)
_optimizer.register_optimizer_step_post_hook = lambda hook: Handle(_optimizer.behind, hook)
optim, nn = ModuleType("torch.optim"), ModuleType("torch.nn")
optim.optimizer, optim.SGD = _optimizer, SGD
nn.Module, nn.Parameter = Module, Parameter
globals().update(DTYPES)


def install(monkeypatch):
    """Let ``import torch`` find this one until the test ends; return it."""
    here = sys.modules[__name__]
    for module in (optim, _optimizer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "torch", here)
    return here
