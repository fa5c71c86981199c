"""The layers of a `Network`; each layer has functions for its outputs and for its gradients.

    y, saved = layer.forward(parameters, x)
    dx = layer.backward(parameters, saved, dy, gradients, ready, first=False)

`parameters` maps names to arrays, and `saved` is what `backward` needs of the forward pass.
`backward` writes the gradients of the parameters, calls ``ready(name)`` as soon as one of them is
final, and returns dx, the gradient of x, unless `first` is true. `forward` never changes x;
`backward` may overwrite dy, the gradient of y. The caller must not change x before the backward
pass, because `saved` may contain x. The forward passes of several batches may come before their
backward passes, which may come in any order.

A pipeline can call the two halves of `backward` at different times, in any order:

    dx = layer.backward_input(parameters, saved, dy)
    layer.backward_weights(parameters, saved, dy, gradients, ready)

A piece is a batch with gradients of its own. The first axis of each array is the number of the
piece. All pieces have equal size, and the results of a piece do not depend on the other pieces.
Images have the shape (pieces, channels, height, width, samples). The convolution of a piece with c
channels and kernels of k x k pixels is one matrix product:

    weights (out, c*k*k)  @  columns (c*k*k, rows*cols*samples)  ->  (out, rows*cols*samples)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..arrays import array_module


def _nothing(name: str) -> None:
    pass


class _Fixed:
    """The base class of layers without parameters."""

    backward_input: Callable[..., Any]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return an empty dict, because the layer has no parameters."""
        return {}

    def backward(self, parameters, saved, dy, gradients, ready=_nothing, first=False):
        """Return the gradient of x."""
        return self.backward_input(parameters, saved, dy)

    def backward_weights(self, parameters, saved, dy, gradients, ready=_nothing) -> None:
        """Do nothing, because the layer has no parameters."""


class Dense(NamedTuple):
    """Dense layer: ``y = x @ weight + bias`` for x of shape (batches, samples, inputs)."""

    name: str
    inputs: int
    outputs: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the parameters, in order."""
        return {
            f"{self.name}.weight": (self.inputs, self.outputs),
            f"{self.name}.bias": (self.outputs,),
        }

    def forward(self, parameters, x):
        """Return (y, x): the output, and the values that `backward` needs."""
        y = x @ parameters[f"{self.name}.weight"]
        y += parameters[f"{self.name}.bias"]
        return y, x

    def backward(self, parameters, x, dy, gradients, ready=_nothing, first=False):
        """Write the gradients of weight and bias; return dx, or None for the first layer."""
        self.backward_weights(parameters, x, dy, gradients, ready)
        return None if first else self.backward_input(parameters, x, dy)

    def backward_input(self, parameters, x, dy):
        """Return the gradient of x."""
        return dy @ parameters[f"{self.name}.weight"].T

    def backward_weights(self, parameters, x, dy, gradients, ready=_nothing) -> None:
        """Write the gradients of weight and bias."""
        xp = array_module(dy)
        # ready() is called after each gradient, so a final gradient can be sent while the next one
        # is computed.
        xp.sum(dy, axis=1, out=gradients[f"{self.name}.bias"])
        ready(f"{self.name}.bias")
        xp.matmul(x.swapaxes(1, 2), dy, out=gradients[f"{self.name}.weight"])
        ready(f"{self.name}.weight")


class Convolution:
    """Convolution of images with square kernels, after `pad` zeros are added at each border.

    The stride is 1.
    """

    def __init__(self, name: str, inputs: int, outputs: int, kernel: int, pad: int = 0):
        self.name, self.inputs, self.outputs = name, inputs, outputs
        self.kernel, self.pad = kernel, pad
        self._scratch = self._held = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the parameters, in order."""
        k = self.kernel
        return {
            f"{self.name}.weight": (self.outputs, self.inputs, k, k),
            f"{self.name}.bias": (self.outputs,),
        }

    def forward(self, parameters, x):
        """Return (y, padded x): the output, and the values that `backward` needs."""
        x = self._pad(x)
        rows, cols = self._size(x)
        columns = self._columns(x)
        self._held = x, columns
        y = self._matrix(parameters) @ columns
        y += parameters[f"{self.name}.bias"][:, None]
        return y.reshape(len(x), self.outputs, rows, cols, x.shape[4]), x

    def backward(self, parameters, x, dy, gradients, ready=_nothing, first=False):
        """Write the gradients of weight and bias; return dx, or None for the first layer."""
        self.backward_weights(parameters, x, dy, gradients, ready)
        return None if first else self.backward_input(parameters, x, dy)

    def backward_input(self, parameters, x, dy):
        """Return the gradient of x."""
        # The gradient of the matrix of windows overwrites the matrix, whichever batch its windows
        # are from.
        self._held = None
        k, (rows, cols) = self.kernel, self._size(x)
        columns = self._room(x, (len(x), self.inputs * k * k, rows * cols * x.shape[4]))
        flat = self._flat(dy)
        array_module(dy).matmul(self._matrix(parameters).T, flat, out=columns)
        return self._add_up(columns, x)

    def backward_weights(self, parameters, x, dy, gradients, ready=_nothing) -> None:
        """Write the gradients of weight and bias."""
        flat = self._flat(dy)
        array_module(dy).sum(flat, axis=2, out=gradients[f"{self.name}.bias"])
        ready(f"{self.name}.bias")
        held, self._held = self._held, None
        columns = held[1] if held is not None and held[0] is x else self._columns(x)
        weight = gradients[f"{self.name}.weight"]
        # The long matrix is the first factor, because OpenBLAS then takes half the time.
        product = (columns @ flat.swapaxes(1, 2)).swapaxes(1, 2)
        weight[...] = product.reshape(weight.shape)
        ready(f"{self.name}.weight")

    def _flat(self, dy):
        return dy.reshape(len(dy), self.outputs, -1)

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
        """Copy every window of x into a column of the scratch array."""
        xp, k, (rows, cols) = array_module(x), self.kernel, self._size(x)
        (pieces, channels, _, _, samples), (p, c, h, w, s) = x.shape, x.strides
        shape = (pieces, channels, k, k, rows, cols, samples)
        windows = xp.lib.stride_tricks.as_strided(x, shape, (p, c, h, w, h, w, s))
        columns = self._room(x, shape)
        columns[...] = windows
        return columns.reshape(pieces, channels * k * k, rows * cols * samples)

    def _room(self, x, shape):
        """Return the scratch array with this shape; its values are undefined."""
        count = math.prod(shape)
        # All calls use one array: a new array would have page faults, and several would not stay in
        # the cache.
        scratch = self._scratch
        if type(scratch) is not type(x) or scratch.size < count or scratch.dtype != x.dtype:
            scratch = self._scratch = array_module(x).empty(count, x.dtype)
        return scratch[:count].reshape(shape)

    def _add_up(self, columns, x):
        """Return the gradient of x: for each element, the sum of `columns` over its windows."""
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


class MaxPool(_Fixed):
    """Return the largest value of each 2 x 2 square; an odd last row or column is left out."""

    def forward(self, parameters, x):
        """Return (y, (x, (left, right))): the output, and the values that `backward` needs."""
        xp, (height, width) = array_module(x), self._even(x)
        # Rows are compared first, because they are long runs of memory.
        pairs = xp.maximum(x[:, :, :height:2, :width], x[:, :, 1:height:2, :width])
        pairs = pairs.reshape(*pairs.shape[:3], width // 2, 2, x.shape[4])
        left, right = xp.ascontiguousarray(pairs.transpose(4, 0, 1, 2, 3, 5))
        return xp.maximum(left, right), (x, (left, right))

    def backward_input(self, parameters, saved, dy):
        """Return the gradient of x: `dy` at one largest value of each square, zero elsewhere."""
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


class Relu(_Fixed):
    """Replace negative values by zero, which is ``max(x, 0)``."""

    def forward(self, parameters, x):
        """Return (y, y): the output, which is also what `backward` needs."""
        y = array_module(x).maximum(x, 0)
        return y, y

    def backward_input(self, parameters, y, dy):
        """Return `dy` where y is positive, and zero elsewhere."""
        dy *= y > 0
        return dy


class Images(_Fixed):
    """A layer that moves axis 1 of x, (pieces, samples, channels, height, width), to the end."""

    def forward(self, parameters, x):
        """Return (y, None): `backward` needs nothing."""
        return array_module(x).ascontiguousarray(x.transpose(0, 2, 3, 4, 1)), None

    def backward_input(self, parameters, saved, dy):
        """Return the gradient of x, a view of `dy`."""
        return dy.transpose(0, 4, 1, 2, 3)


class Features(_Fixed):
    """Turn images into one row of features per sample, in the order channel, height, width."""

    def forward(self, parameters, x):
        """Return (y, shape of x); y is a view of x with the shape (batches, samples, features)."""
        return x.reshape(len(x), math.prod(x.shape[1:4]), x.shape[4]).swapaxes(1, 2), x.shape

    def backward_input(self, parameters, shape, dy):
        """Return the gradient of x, a copy of `dy` with the samples as the last axis."""
        return array_module(dy).ascontiguousarray(dy.swapaxes(1, 2)).reshape(shape)


class Rows(_Fixed):
    """Flatten x of shape (batches, samples, ...) to one row of features per sample, as a view."""

    def forward(self, parameters, x):
        """Return (y, shape of x): the output, and the values that `backward` needs."""
        return x.reshape(*x.shape[:2], math.prod(x.shape[2:])), x.shape

    def backward_input(self, parameters, shape, dy):
        """Return the gradient of x, a view of `dy`."""
        return dy.reshape(shape)


def softmax_cross_entropy(scores, labels):
    """Return the mean loss of each of several batches (pieces), and its gradient for `scores`.

    `scores` have the shape (pieces, samples, classes). `labels` are integers from 0, with the shape
    (pieces, samples).
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
