"""Helpers for blocks of rows: a block is the part of an array that one rank sends or receives."""

from __future__ import annotations

import numpy as np

from ..arrays import array_module, as_array, copy_into, mpi_direct, mpi_empty, synchronize
from ..errors import ConfigError


def rows_of(x) -> tuple[int, int]:
    """Return the length of the first axis of `x`, and the number of elements per row."""
    if x.ndim == 0:
        raise ConfigError("a 0-d array has no first axis to cut blocks from; use x.reshape(1)")
    return x.shape[0], int(np.prod(x.shape[1:], dtype=np.int64))


def deliver(block, like, out, shape):
    """Copy a received `block` into `out` and return `out`; without `out`, return an array.

    The array is a NumPy array or a device array, as `like` is, and has the dtype of `like`.
    """
    if out is None:
        if isinstance(like, np.ndarray):
            return block if block.dtype == like.dtype else block.astype(like.dtype)
        out = array_module(like).empty(shape, like.dtype)
    out = as_array(out)
    copy_into(out, block)
    return out


def packed(x):
    """Return `x` as a 1-D vector in C order that MPI can send: a view if possible, else a copy."""
    if x.flags.c_contiguous and mpi_direct(x):
        synchronize(x)
        return x.reshape(-1)
    work = mpi_empty(x.size, x.dtype, like=x)
    copy_into(work.reshape(x.shape), x)
    return work


class BlockVector:
    """The part of a long vector that this rank stores, indexed by positions in the long vector."""

    def __init__(self, start: int, block: np.ndarray):
        self.start, self.block = start, block

    def __getitem__(self, span: slice):
        return self.block[span.start - self.start : span.stop - self.start]
