"""A stand-in for cupy, made of NumPy, with which tests check copies between host and device.

Work on the fake device is *not done when the call returns*: as on a GPU, the work stays in the
queue of the stream until the program synchronises. Code that forgets to wait reads old values, and
the test fails. The list `calls` has all calls of the fake device, in order.
"""

import sys
from contextlib import contextmanager
from types import ModuleType

import numpy as np

calls: list[str] = []


class Stream:
    def __init__(self):
        self.queue = []

    def synchronize(self):
        calls.append("synchronize")
        self.run()

    def run(self):
        for work in self.queue:
            work()
        self.queue.clear()


_stream = Stream()


class PinnedMemory(bytearray):
    """Host memory the device can reach; its allocator rounds up, as cupy's does."""


def alloc_pinned_memory(nbytes):
    calls.append("alloc_pinned")
    return PinnedMemory(-(-nbytes // 512) * 512)


class Device:
    def __init__(self, number=0):
        self.id = number

    def use(self):
        calls.append(f"use device {self.id}")

    def __enter__(self):
        calls.append("device")
        return self

    def __exit__(self, *exc):
        pass


class ndarray:
    """A device array; `memory` is what the device holds, and tests may look at it."""

    __array_priority__ = 100

    def __init__(self, memory):
        self.memory = memory
        self.device = Device()

    dtype = property(lambda self: self.memory.dtype)
    shape = property(lambda self: self.memory.shape)
    size = property(lambda self: self.memory.size)
    ndim = property(lambda self: self.memory.ndim)
    nbytes = property(lambda self: self.memory.nbytes)
    flags = property(lambda self: self.memory.flags)
    T = property(lambda self: ndarray(self.memory.T))

    @property
    def __cuda_array_interface__(self):
        return {**self.memory.__array_interface__, "version": 3}

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __len__(self):
        return len(self.memory)

    def __getitem__(self, index):
        return ndarray(self.memory[index])

    def __setitem__(self, index, value):
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("host array assigned to device memory")
        target = self.memory[index]
        self._queue(lambda: np.copyto(target, _memory(value), casting="unsafe"))

    def __iadd__(self, other):
        self._queue(lambda: np.add(self.memory, _memory(other), out=self.memory))
        return self

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        if method != "__call__" or out is None or not isinstance(out[0], ndarray) or kwargs:
            return NotImplemented
        if any(isinstance(x, np.ndarray) and x.ndim for x in inputs):
            raise TypeError("host array among the operands of device work")
        target = out[0]
        self._queue(lambda: ufunc(*map(_memory, inputs), out=target.memory))
        return target

    def copy(self):
        return self._kernel(self.shape, self.dtype, lambda: self.memory)

    def view(self, dtype):
        return ndarray(self.memory.view(dtype))

    def _queue(self, work):
        calls.append("kernel")
        _stream.queue.append(work)

    def _kernel(self, shape, dtype, compute):
        result = np.full(shape, 99).astype(dtype)  # what uninitialised device memory may hold
        self._queue(lambda: np.copyto(result, compute(), casting="unsafe"))
        return ndarray(result)

    def reshape(self, *shape):
        view = self.memory.reshape(*shape)
        if np.shares_memory(view, self.memory) or not view.size:
            return ndarray(view)
        return self._kernel(view.shape, self.dtype, lambda: self.memory.reshape(*shape))

    def ravel(self):
        return self.reshape(-1)

    def astype(self, dtype):
        return self._kernel(self.shape, np.dtype(dtype), lambda: self.memory)

    def item(self):
        return self.get().item()

    def get(self, out=None):
        calls.append("get")
        _stream.run()
        if out is None:
            return self.memory.copy()
        if not out.flags.c_contiguous or (out.shape, out.dtype) != (self.shape, self.dtype):
            raise ValueError("get: out must be contiguous, of this shape and dtype")
        np.copyto(out, self.memory)
        return out

    def set(self, source):
        calls.append("set")
        if (source.shape, source.dtype) != (self.shape, self.dtype):
            raise ValueError("set: shape or dtype differs")
        if not self.flags.c_contiguous:
            raise RuntimeError("set to non-contiguous array is not supported")
        _stream.queue.append(lambda: np.copyto(self.memory, source))


def _memory(value):
    return value.memory if isinstance(value, ndarray) else value


def asarray(x, dtype=None):
    """Put host values on the device, at once (tests prepare their input with it)."""
    return ndarray(np.array(_memory(x), dtype=dtype, order="K"))


def empty(shape, dtype=float):
    return ndarray(np.full(shape, 99).astype(dtype))


def asnumpy(x):
    return x.get()


def concatenate(arrays):
    if any(isinstance(x, np.ndarray) for x in arrays):
        raise TypeError("host array among the operands of device work")
    joined = np.concatenate([x.memory for x in arrays])
    return arrays[0]._kernel(
        joined.shape, joined.dtype, lambda: np.concatenate([x.memory for x in arrays])
    )


def from_dlpack(x):
    calls.append("from_dlpack")
    return ndarray(x.memory)


@contextmanager
def installed():
    """Make ``import cupy`` find this module, and leave no trace afterwards."""
    module = ModuleType("cupy")
    for value in (ndarray, asarray, concatenate, empty, asnumpy, from_dlpack):
        setattr(module, value.__name__, value)
    module.__version__ = "0.fake"
    module.cuda = ModuleType("cupy.cuda")
    module.cuda.Stream, module.cuda.Device = Stream, Device
    module.cuda.get_current_stream = lambda: _stream
    module.cuda.alloc_pinned_memory = alloc_pinned_memory
    module.cuda.runtime = ModuleType("cupy.cuda.runtime")
    module.cuda.runtime.driverGetVersion = lambda: 13000
    module.cuda.runtime.getDeviceCount = lambda: 1
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = module
    calls.clear()
    _stream.queue.clear()
    try:
        yield module
    finally:
        del sys.modules["cupy"]
        if before is not None:
            sys.modules["cupy"] = before
