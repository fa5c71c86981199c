"""A stage of torch.distributed.pipelining that computes with mpidist's own NumPy layers.

`benchmarks.torch_pipeline` uses it, to compare two pipelines with equal layers. autograd sees one
function for all layers of the stage. All tensors are views of NumPy arrays and the other way round,
and nothing is copied. The layers write the gradients of the first microbatch into the `grad` of the
parameters; later ones are added to it, which is what autograd would do.
"""

import torch
from torch import nn

from mpidist.models.layers import softmax_cross_entropy


class _Run(torch.autograd.Function):
    """All layers of a stage; a parameter is among the arguments, so that there is a backward."""

    @staticmethod
    def forward(ctx, stage, x, parameter):
        ctx.stage = stage
        y, ctx.tape = stage.forward_layers(x.detach().numpy()[None])
        return torch.from_numpy(y[0])

    @staticmethod
    def backward(ctx, dy):
        dx = ctx.stage.backward_layers(ctx.tape, dy.numpy()[None])
        return None, None if dx is None else torch.from_numpy(dx[0]), None


class _Loss(torch.autograd.Function):
    """The mean loss of a microbatch, as `mpidist.models.Network.loss` computes it."""

    @staticmethod
    def forward(ctx, scores, labels):
        losses, ctx.gradient = softmax_cross_entropy(
            scores.detach().numpy()[None], labels.numpy()[None]
        )
        return torch.tensor(losses[0])

    @staticmethod
    def backward(ctx, dy):
        ctx.gradient *= float(dy)
        return torch.from_numpy(ctx.gradient[0]), None


class NumpyStage(nn.Module):
    """Some layers of an mpidist model as a module.

    Parameters
    ----------
    layers : sequence
        As in `mpidist.models.layers`.
    arrays : dict of str to ndarray
        Their parameters, which the module uses in place.
    first : bool
        Whether the first layer is the first one of the model, so nobody needs its input's gradient.
    """

    loss = staticmethod(_Loss.apply)

    def __init__(self, layers, arrays: dict, first: bool):
        super().__init__()
        self.layers, self.arrays, self.first = list(layers), arrays, first
        self.tensors = nn.ParameterList(torch.from_numpy(one) for one in arrays.values())
        self._total, self._next, self._sums = {}, {}, []
        for name, tensor in zip(arrays, self.tensors, strict=True):
            tensor.grad, one = torch.zeros_like(tensor), torch.zeros_like(tensor)
            self._total[name], self._next[name] = tensor.grad.numpy()[None], one.numpy()[None]
            self._sums.append((tensor.grad, one))
        self.begin()

    def begin(self) -> None:
        """Begin a step: the gradients of the next microbatch are not added to earlier ones."""
        self._empty = True

    def forward(self, x):
        return _Run.apply(self, x, self.tensors[0])

    def forward_layers(self, x):
        tape = []
        for layer in self.layers:
            x, saved = layer.forward(self.arrays, x)
            tape.append(saved)
        return x, tape

    def backward_layers(self, tape, dy):
        written = self._total if self._empty else self._next
        for k in range(len(self.layers) - 1, -1, -1):
            first = self.first and k == 0
            dy = self.layers[k].backward(self.arrays, tape.pop(), dy, written, first=first)
        if not self._empty:
            for total, one in self._sums:
                total.add_(one)
        self._empty = False
        return dy
