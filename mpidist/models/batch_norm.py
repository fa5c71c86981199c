"""Batch normalisation over the batches of all ranks: the same result as over the whole batch.

    mean = sum x / n,  variance = sum (x - mean)^2 / n       over all elements of all ranks
    y = (x - mean) / sqrt(variance + eps)
    dx = (dy - mean(dy) - y mean(dy y)) / sqrt(variance + eps)

Each direction costs one allreduce of two numbers per channel and one more. The ranks'
batches may be uneven or empty. Gain and shift, if you want them, are parameters of the
model: ``gain * y + shift``.

References: Ioffe and Szegedy, Batch Normalization, ICML 2015, arXiv:1502.03167. Sums of squares
are put together as in Chan, Golub and LeVeque, Updating formulae, 1979.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays import array_module, work_dtype
from ..errors import ConfigError


class Saved(NamedTuple):
    """What `sync_batch_norm` keeps for the way back."""

    y: Any
    scale: Any
    axis: int | tuple[int, ...]


def sync_moments(comm, x, axis):
    """Return (mean, variance) of `x` along `axis` over all ranks.

    Collective over `comm`. One allreduce in float64.

    Parameters
    ----------
    x : array
        This rank's batch, NumPy or CuPy; may be empty along `axis`.
    axis : int or tuple of int
        What is summed over: 0 for (samples, features), (0, 2, 3) for (samples, channels, height,
        width), (0, 2, 3, 4) for the layers' (pieces, channels, height, width, samples).

    Returns
    -------
    mean, variance : arrays
        Of the axes that are left, in the dtype of `x` (float32 for half precision), the same bits
        on every rank. The variance is the biased one, which normalisation uses.

    Raises
    ------
    ConfigError
        On all ranks, when no rank has an element.
    """
    xp = array_module(x)
    count = _count(x, axis)
    wide = xp.float64
    mean = x.sum(axis, dtype=wide) / max(count, 1)
    apart = x - xp.expand_dims(mean, axis).astype(work_dtype(x.dtype))
    # The mean was rounded on its way down, so the squares are too large by the square of that.
    off = apart.sum(axis, dtype=wide) / max(count, 1)
    squares = xp.square(apart).sum(axis, dtype=wide) - count * off**2
    total, sums, squares = _over_ranks(comm, count, count * mean, squares + count * mean**2)
    if total == 0:
        raise ConfigError(f"sync_moments: no rank has an element along axis {axis} to take a mean")
    mean = sums / total
    variance = xp.maximum(squares / total - mean**2, 0)
    return mean.astype(work_dtype(x.dtype)), variance.astype(work_dtype(x.dtype))


def sync_batch_norm(comm, x, axis, eps: float = 1e-5):
    """Return (y, mean, variance, saved), `x` normalised by the moments over all ranks.

    Collective over `comm`. `mean` and `variance` are for running statistics; `saved` is what
    `sync_batch_norm_backward` needs. Parameters as for `sync_moments`.
    """
    xp = array_module(x)
    mean, variance = sync_moments(comm, x, axis)
    scale = xp.expand_dims(1 / xp.sqrt(variance + variance.dtype.type(eps)), axis)
    y = ((x - xp.expand_dims(mean, axis)) * scale).astype(x.dtype)
    return y, mean, variance, Saved(y, scale, axis)


def sync_batch_norm_backward(comm, dy, saved: Saved):
    """Return the gradient by x, given that by y.

    Collective over `comm`. Both are gradients of this rank's *mean* loss, as models give them;
    what is averaged later with the weights of the ranks' batches is then the gradient of the mean
    loss over all samples, through the common moments too.
    """
    xp = array_module(dy)
    y, scale, axis = saved
    count = _count(dy, axis)
    wide = xp.float64
    # A mean loss over n of N elements counts n / N in the whole.
    total, first, second = _over_ranks(
        comm, count, count * dy.sum(axis, dtype=wide), count * (dy * y).sum(axis, dtype=wide)
    )
    if not count:
        return xp.zeros_like(dy)
    narrow = work_dtype(dy.dtype)
    first, second = (
        xp.expand_dims(part / (total * count), axis).astype(narrow) for part in (first, second)
    )
    return ((dy - first - y * second) * scale).astype(dy.dtype)


def _count(x, axis) -> int:
    """Elements that go into each mean."""
    return math.prod(x.shape[a] for a in (axis if isinstance(axis, tuple) else (axis,)))


def _over_ranks(comm, count: int, first, second):
    """Return the sums over all ranks of a number and two arrays of one shape, in one message."""
    # Here and not above: models can be imported, and used by one process, without MPI.
    from ..collectives.allreduce import allreduce

    xp = array_module(first)
    packed = xp.concatenate([xp.full(1, count, np.float64), first.reshape(-1), second.reshape(-1)])
    allreduce(comm, packed)
    half = first.size
    return (
        float(packed[0]),
        packed[1 : 1 + half].reshape(first.shape),
        packed[1 + half :].reshape(first.shape),
    )
