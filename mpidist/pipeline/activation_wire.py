"""How an activation (output of a layer) is sent between stages: as bytes, shape and strides.

    buffer, shape, strides = to_wire(y)      # send buffer, which is one-dimensional, without a copy
    y = from_wire(buffer, shape, strides)    # what arrived, without a copy

The received array has the same strides as the sent one. With other strides, BLAS may add in another
order, and the results of a pipeline could differ in the last bits from the results of one rank.
Gradients are sent in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..arrays import array_module
from ..errors import ConfigError


def c_ordered(array):
    """Return `array`, or a C-ordered copy if its strides are not those of a new C-ordered array."""
    # Strides of axes of length 1 count, too: NumPy may choose the routine of a product by them.
    strides = [array.itemsize * math.prod(array.shape[k + 1 :]) for k in range(array.ndim)]
    return array if array.strides == tuple(strides) else array.copy(order="C")


def to_wire(array) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Return (buffer, shape, strides) of `array`, for `from_wire`; `buffer` is one-dimensional.

    The buffer shares the memory of `array`, or is a copy if the elements of `array` have gaps
    between them, as in a slice of a larger array.
    """
    outer_first = sorted(
        range(array.ndim), key=lambda axis: (-array.strides[axis], array.shape[axis] == 1)
    )
    dense = array.transpose(outer_first)
    if not dense.flags.c_contiguous:
        dense = array_module(array).ascontiguousarray(dense)
        array = dense.transpose([outer_first.index(axis) for axis in range(array.ndim)])
    return dense.reshape(-1), tuple(array.shape), tuple(array.strides)


def from_wire(buffer, shape: Sequence[int], strides: Sequence[int]):
    """Return a view of `buffer` with the `shape` and the `strides` that `to_wire` has returned.

    Raises ConfigError if the array would not fit into the buffer exactly.
    """
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if buffer.size != math.prod(shape) or min(strides, default=0) < 0 or (
        buffer.size and last >= buffer.nbytes
    ):  # fmt: skip
        raise ConfigError(
            f"activation of shape {tuple(shape)} and strides {tuple(strides)} does not fit the "
            f"{buffer.nbytes} bytes that arrived; both stages must have the same plan and model"
        )
    return array_module(buffer).lib.stride_tricks.as_strided(buffer, shape, strides)
