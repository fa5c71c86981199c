"""Layers: each turns an array into the next one, and a gradient into the one before it.

    y, saved = layer.forward(parameters, x)
    dx = layer.backward(parameters, saved, dy, gradients, ready, first)

Parameters are looked up by name in the dict at every call, so that training code may replace
them by views of another buffer. `forward` never writes in x, so whoever saved it may rely on it;
`backward` may write in dy. Parameters are named in the order of `shapes` and their gradients are
ready in the reverse of it.

The first axis of x, y and of every gradient is that of the pieces: equal batches, each with
gradients of its own; an ordinary batch is one piece. A stacked `matmul` makes one product per
piece, of the shape and memory layout it has for a piece alone, and sums run over other axes.
So the bits of a piece do not depend on which or how many others there are.

Images are kept as (pieces, channels, height, width, samples). The samples lie innermost, so a
window of the image is a few long runs of memory, and a whole piece is one matrix product:

    weights (out, c k k)  @  columns (c k k, rows cols samples)  ->  (out, rows cols samples)

Measured on one core with LeNet at batch 64, this takes half the time of a product per sample.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..arrays import array_module


def _nothing(name: str) -> None:
    pass


class Dense(NamedTuple):
    """``y = x @ weight + bias`` on (pieces, samples, inputs)."""

    name: str
    inputs: int
    outputs: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters, in order."""
        return {
            f"{self.name}.weight": (self.inputs, self.outputs),
            f"{self.name}.bias": (self.outputs,),
        }

    def forward(self, parameters, x):
        """Return (y, x)."""
        y = x @ parameters[f"{self.name}.weight"]
        y += parameters[f"{self.name}.bias"]
        return y, x

    def backward(self, parameters, x, dy, gradients, ready=_nothing, first=False):
        """Write both gradients, return that of x (None where the layer is the first)."""
        xp = array_module(dy)
        # ready() after each: what is final may travel while the rest is still computed.
        xp.sum(dy, axis=1, out=gradients[f"{self.name}.bias"])
        ready(f"{self.name}.bias")
        xp.matmul(x.swapaxes(1, 2), dy, out=gradients[f"{self.name}.weight"])
        ready(f"{self.name}.weight")
        return None if first else dy @ parameters[f"{self.name}.weight"].T


class Convolution:
    """Square kernels over (pieces, channels, height, width, samples), `pad` zeros around.

    The stride is 1. The columns lie in one scratch array that serves every call: fresh memory of
    that size would cost its page faults, half the time of a step. `backward` makes them anew
    where another call, or another batch, has been there since `forward`.
    """

    def __init__(self, name: str, inputs: int, outputs: int, kernel: int, pad: int = 0):
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self.kernel, self.pad = kernel, pad
        self._scratch = self._held = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters, in order."""
        k = self.kernel
        return {
            f"{self.name}.weight": (self.outputs, self.inputs, k, k),
            f"{self.name}.bias": (self.outputs,),
        }

    def forward(self, parameters, x):
        """Return (y, padded x)."""
        x = self._pad(x)
        rows, cols = self._size(x)
        columns = self._columns(x)
        self._held = x, columns
        y = self._matrix(parameters) @ columns
        y += parameters[f"{self.name}.bias"][:, None]
        return y.reshape(len(x), self.outputs, rows, cols, x.shape[4]), x

    def backward(self, parameters, x, dy, gradients, ready=_nothing, first=False):
        """Write both gradients, return that of x (None where the layer is the first)."""
        xp = array_module(dy)
        flat = dy.reshape(len(dy), self.outputs, -1)
        xp.sum(flat, axis=2, out=gradients[f"{self.name}.bias"])
        ready(f"{self.name}.bias")
        held, self._held = self._held, None
        columns = held[1] if held is not None and held[0] is x else self._columns(x)
        weight = gradients[f"{self.name}.weight"]
        # As a product with the long matrix first: OpenBLAS takes half the time for this side.
        product = (columns @ flat.swapaxes(1, 2)).swapaxes(1, 2)
        weight[...] = product.reshape(weight.shape)
        ready(f"{self.name}.weight")
        if first:
            return None
        # The columns have done their work; their memory takes their gradient.
        return self._add_up(xp.matmul(self._matrix(parameters).T, flat, out=columns), x)

    def _matrix(self, parameters):
        return parameters[f"{self.name}.weight"].reshape(self.outputs, -1)

    def _size(self, x) -> tuple[int, int]:
        return x.shape[2] - self.kernel + 1, x.shape[3] - self.kernel + 1

    def _pad(self, x):
        if not self.pad:
            return x
        xp, pad, (k, channels, height, width, samples) = array_module(x), self.pad, x.shape
        padded = xp.zeros((k, channels, height + 2 * pad, width + 2 * pad, samples), x.dtype)
        padded[:, :, pad:-pad, pad:-pad] = x
        return padded

    def _columns(self, x):
        """Copy every window of x into a column; the windows themselves are only a view."""
        xp, k, (rows, cols) = array_module(x), self.kernel, self._size(x)
        (pieces, channels, _, _, samples), (p, c, h, w, s) = x.shape, x.strides
        shape = (pieces, channels, k, k, rows, cols, samples)
        windows = xp.lib.stride_tricks.as_strided(x, shape, (p, c, h, w, h, w, s))
        count = math.prod(shape)
        scratch = self._scratch
        if type(scratch) is not type(x) or scratch.size < count or scratch.dtype != x.dtype:
            scratch = self._scratch = xp.empty(count, x.dtype)
        columns = scratch[:count].reshape(shape)
        columns[...] = windows
        return columns.reshape(pieces, channels * k * k, -1)

    def _add_up(self, columns, x):
        """The transpose of `_columns` and `_pad`: windows overlap, so their gradients add up.

        What falls on the padding is nobody's gradient and is not added.
        """
        k, pad, (rows, cols) = self.kernel, self.pad, self._size(x)
        columns = columns.reshape(*x.shape[:2], k, k, rows, cols, x.shape[4])
        height, width = x.shape[2] - 2 * pad, x.shape[3] - 2 * pad
        dx = array_module(x).zeros((*x.shape[:2], height, width, x.shape[4]), x.dtype)
        for i in range(k):
            top, bottom = max(0, pad - i), min(rows, height + pad - i)
            for j in range(k):
                left, right = max(0, pad - j), min(cols, width + pad - j)
                part = dx[:, :, top + i - pad : bottom + i - pad, left + j - pad : right + j - pad]
                part += columns[:, :, i, j, top:bottom, left:right]
        return dx


class MaxPool(NamedTuple):
    """The largest of each 2 x 2 square; an odd last row or column is left out.

    Rows first, since they are long runs of memory. Neighbours within a row are not: they are
    copied apart, and later together again, so that all arithmetic is on whole arrays.
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """No parameters."""
        return {}

    def forward(self, parameters, x):
        """Return (y, (x, the larger of each two rows: (left columns, right columns)))."""
        xp, (height, width) = array_module(x), self._even(x)
        pairs = xp.maximum(x[:, :, :height:2, :width], x[:, :, 1:height:2, :width])
        pairs = pairs.reshape(*pairs.shape[:3], width // 2, 2, x.shape[4])
        left, right = xp.ascontiguousarray(pairs.transpose(4, 0, 1, 2, 3, 5))
        return xp.maximum(left, right), (x, (left, right))

    def backward(self, parameters, saved, dy, gradients, ready=_nothing, first=False):
        """Give each gradient to one that is the largest: the left ones, and of them the upper."""
        x, (left, right) = saved
        xp, (height, width) = array_module(dy), self._even(x)
        to_left = dy * (left >= right)
        pairs = xp.stack((to_left, dy - to_left), axis=4)
        pairs = pairs.reshape(*dy.shape[:3], width, dy.shape[4])
        dx = xp.zeros_like(x) if x.shape[2:4] != (height, width) else xp.empty_like(x)
        upper, lower = dx[:, :, :height:2, :width], dx[:, :, 1:height:2, :width]
        up = x[:, :, :height:2, :width] >= x[:, :, 1:height:2, :width]
        xp.multiply(pairs, up, out=upper)
        xp.subtract(pairs, upper, out=lower)
        return dx

    def _even(self, x) -> tuple[int, int]:
        return x.shape[2] // 2 * 2, x.shape[3] // 2 * 2


class Relu(NamedTuple):
    """``max(x, 0)``."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """No parameters."""
        return {}

    def forward(self, parameters, x):
        """Return (y, y)."""
        y = array_module(x).maximum(x, 0)
        return y, y

    def backward(self, parameters, y, dy, gradients, ready=_nothing, first=False):
        """Let the gradient through where y is positive."""
        dy *= y > 0
        return dy


class Images(NamedTuple):
    """(pieces, samples, channels, height, width) to images with the samples innermost."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """No parameters."""
        return {}

    def forward(self, parameters, x):
        """Return (y, None)."""
        return array_module(x).ascontiguousarray(x.transpose(0, 2, 3, 4, 1)), None

    def backward(self, parameters, saved, dy, gradients, ready=_nothing, first=False):
        """The way back; a view."""
        return dy.transpose(0, 4, 1, 2, 3)


class Features(NamedTuple):
    """Images to rows of samples, the features in the order channel, height, width."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """No parameters."""
        return {}

    def forward(self, parameters, x):
        """Return (y, shape of x); y is a transposed view, which a matrix product takes as it is."""
        return x.reshape(len(x), math.prod(x.shape[1:4]), x.shape[4]).swapaxes(1, 2), x.shape

    def backward(self, parameters, shape, dy, gradients, ready=_nothing, first=False):
        """The way back; a copy, for the samples must lie innermost again."""
        return array_module(dy).ascontiguousarray(dy.swapaxes(1, 2)).reshape(shape)


class Rows(NamedTuple):
    """(pieces, samples, ...) to rows of samples; a view."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """No parameters."""
        return {}

    def forward(self, parameters, x):
        """Return (y, shape of x)."""
        return x.reshape(*x.shape[:2], math.prod(x.shape[2:])), x.shape

    def backward(self, parameters, shape, dy, gradients, ready=_nothing, first=False):
        """The way back; a view."""
        return dy.reshape(shape)


def softmax_cross_entropy(scores, labels):
    """Return (mean loss of each piece, its gradient by `scores`).

    `scores` are (pieces, samples, classes), `labels` (pieces, samples) integers from 0.

    The largest score of a row is taken off first, so no exponential overflows, and the loss comes
    from the logarithm of the sum, so none of the logarithms is of a rounded zero.
    """
    xp = array_module(scores)
    samples, classes = scores.shape[1:]
    shifted = scores - scores.max(axis=2, keepdims=True)
    gradient = xp.exp(shifted)
    total = gradient.sum(axis=2, keepdims=True)
    right = xp.arange(0, scores.size, classes) + labels.reshape(-1)
    losses = xp.log(total[..., 0]) - shifted.reshape(-1)[right].reshape(labels.shape)
    gradient /= total
    gradient.reshape(-1)[right] -= 1
    gradient /= samples
    return losses.mean(axis=1), gradient
