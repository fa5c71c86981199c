"""How an activation (output of a layer) is sent between stages: as bytes, shape and strides.

    buffer, shape, strides = to_wire(y)      # send buffer, which is one-dimensional, without a copy
    y = from_wire(buffer, shape, strides)    # what arrived, without a copy

BLAS may add in another order if a factor of a matrix product is transposed. Then the results of a
pipeline could differ in the last bits from the results of one rank. So a received activation must
have its axes in the same order in memory as the sent one. The layer `Features`, for example,
returns a transposed view. If this view were sent as a C-contiguous array, LeNet's gradients would
change by 1e-7 with OpenBLAS's kernels for AVX-512 (with the kernels for AVX2 they would not
change). The order of the axes alone is not enough: by the stride of an axis of length 1, NumPy may
choose another routine for a product. Therefore the strides are sent, too. Gradients that go back
through the stages are sent in the same way.

All microbatches with the same number of samples have the same shape and strides, so the shape and
the strides are sent only once for each number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..arrays import array_module
from ..errors import ConfigError


def c_ordered(array):
    """Return `array` if its strides are those of a new C-ordered array; otherwise a C-ordered copy.

    The strides of axes of length 1 are compared, too, because NumPy may choose the routine of a
    product by them.

    Stages pass the inputs of the model through this function. A layer may return its input
    unchanged; with this call, the memory layout of a stage's output still depends only on the
    number of samples.
    """
    strides = [array.itemsize * math.prod(array.shape[k + 1 :]) for k in range(array.ndim)]
    return array if array.strides == tuple(strides) else array.copy(order="C")


def to_wire(array) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Return (buffer, shape, strides) of `array`, for `from_wire`; `buffer` is one-dimensional.

    The buffer shares the memory of `array` if the elements of `array` have no gaps between them in
    memory. If there are gaps, as in a slice of a larger array, the buffer is a copy without gaps.
    The axes of the copy have the same order in memory as those of `array`.
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
