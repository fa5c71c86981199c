"""The layers of a `Network`; each layer has functions for its outputs and for its gradients.

    y, saved = layer.forward(parameters, x)
    dx = layer.backward(parameters, saved, dy, gradients, ready, first=False)

A layer looks up its parameters by name at every call, so training code may replace them by views of
another buffer. `forward` never changes x, so a saved x stays valid. `backward` may overwrite dy,
the gradient with respect to y. `shapes` returns the names and shapes of the parameters. `backward`
calls ``ready(name)`` as soon as the gradient of a parameter is final, in the reverse of the order
in `shapes`.

Several batches may be in progress: `forward` of a second batch may be called before `backward` of
the first batch, and the backward passes may run in any order. A backward pass takes all values from
its arguments, so the bits of the gradients do not depend on the order of the passes. The code that
made x must not change x before the backward pass of this batch, because `saved` may contain x.

A layer may also offer the two halves of `backward`, which the schedule of a pipeline (the order of
a rank's passes) can call at different times:

    dx = layer.backward_input(parameters, saved, dy)
    layer.backward_weights(parameters, saved, dy, gradients, ready)

If `backward_input` and `backward_weights` are both called, in any order, the results have the same
bits as those of `backward`. In a layer with parameters, neither method changes dy, and dx shares no
memory with dy, because the other method may be called later with the same dy. A layer without
parameters may overwrite dy, or return a view of it.

The axes of y and dx may be in any order in memory; for example, `Features` returns a transposed
view. The last bits of the next matrix product depend on the order of the axes in memory. An array
that is copied to another process must therefore keep its strides; see
`mpidist/pipeline/activation_wire.py`.

A piece is a batch that gets gradients of its own. The first axis of x, y and every gradient has one
entry per piece. All pieces have equal size; an ordinary batch is a single piece. NumPy's `matmul`
makes a separate product for each piece, with the same shape and memory layout as for a single
piece, and no sum runs over the axis of pieces. The results of a piece (a batch) do not depend on
the number or the values of the other pieces, because no operation combines pieces.

Images have the shape (pieces, channels, height, width, samples). Samples are the last axis, so a
window of all images consists of a few long runs of memory. The convolution of a piece is one matrix
product:

    weights (out, c k k)  @  columns (c k k, rows cols samples)  ->  (out, rows cols samples)

On one core, for LeNet with batches of 64 samples, one matrix product per piece takes half the time
of one product per sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..arrays import array_module


def _nothing(name: str) -> None:
    pass


class _Fixed:
    """The base class of layers without parameters: their `backward` only calls `backward_input`."""

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
    """Dense layer: ``y = x @ weight + bias`` for x of shape (pieces, samples, inputs).

    A piece is a batch of which the gradients are computed separately.
    """

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

    The stride is 1. A convolution copies every window of the image into a column of a matrix. All
    calls use one scratch array for this matrix, because a new allocation would cause page faults,
    which take half the time of a step. `backward` copies the windows again if another call has
    overwritten the matrix of windows. If several batches wait for their backward pass, copying
    again is faster than keeping one matrix for each batch. For a 5 x 5 kernel the matrix is 25
    times as large as the images, so the matrices of several batches would not stay in the cache,
    but the one scratch array does.
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
        """Return the scratch array with this shape; it still has the values of its last use."""
        count = math.prod(shape)
        scratch = self._scratch
        if type(scratch) is not type(x) or scratch.size < count or scratch.dtype != x.dtype:
            scratch = self._scratch = array_module(x).empty(count, x.dtype)
        return scratch[:count].reshape(shape)

    def _add_up(self, columns, x):
        """Return the gradient of x: for each element, the sum of `columns` over its windows.

        As a linear map, this function is the transpose of `_pad` followed by `_columns`. Gradients
        of the padding are left out.
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


class MaxPool(_Fixed):
    """Return the largest value of each 2 x 2 square; an odd last row or column is left out.

    `forward` compares pairs of rows first, because rows are long runs of memory. The even and odd
    columns of a row are copied into two arrays, so that all arithmetic is on contiguous arrays.
    """

    def forward(self, parameters, x):
        """Return (y, (x, (left, right))): the output, and the values that `backward` needs.

        The arrays left and right have the maxima of each pair of rows: left at even columns, right
        at odd columns.
        """
        xp, (height, width) = array_module(x), self._even(x)
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
    """Turn x of shape (pieces, samples, channels, height, width) into images, with samples last.

    A piece is a batch of which the gradients are computed separately.
    """

    def forward(self, parameters, x):
        """Return (y, None): `backward` needs nothing."""
        return array_module(x).ascontiguousarray(x.transpose(0, 2, 3, 4, 1)), None

    def backward_input(self, parameters, saved, dy):
        """Return the gradient of x, a view of `dy`."""
        return dy.transpose(0, 4, 1, 2, 3)


class Features(_Fixed):
    """Turn images into one row of features per sample, in the order channel, height, width."""

    def forward(self, parameters, x):
        """Return (y, shape of x); y is a view of x, with the samples as its second axis."""
        return x.reshape(len(x), math.prod(x.shape[1:4]), x.shape[4]).swapaxes(1, 2), x.shape

    def backward_input(self, parameters, shape, dy):
        """Return the gradient of x, a copy of `dy` with the samples as the last axis."""
        return array_module(dy).ascontiguousarray(dy.swapaxes(1, 2)).reshape(shape)


class Rows(_Fixed):
    """Flatten x of shape (pieces, samples, ...) to one row of features per sample, as a view.

    A piece is a batch of which the gradients are computed separately.
    """

    def forward(self, parameters, x):
        """Return (y, shape of x): the output, and the values that `backward` needs."""
        return x.reshape(*x.shape[:2], math.prod(x.shape[2:])), x.shape

    def backward_input(self, parameters, shape, dy):
        """Return the gradient of x, a view of `dy`."""
        return dy.reshape(shape)


def softmax_cross_entropy(scores, labels):
    """Return (mean loss of each piece (batch), gradient of the losses with respect to `scores`).

    `scores` have the shape (pieces, samples, classes). `labels` are integers from 0, with the shape
    (pieces, samples).

    The largest score of a sample is first subtracted from all its scores, so no exponential
    overflows. The loss is the logarithm of the sum of exponentials, minus the score of the label.
    The loss is therefore never the logarithm of a probability that was rounded to zero.
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
