"""Batch normalisation over the batches of all ranks together, as if one rank had all samples.

    mean = sum x / n,  variance = sum (x - mean)^2 / n       over all elements of all ranks
    y = (x - mean) / sqrt(variance + eps)
    dx = (dy - mean(dy) - y mean(dy y)) / sqrt(variance + eps)

The forward and the backward pass make one allreduce each. The batches of the ranks may have
different sizes, and may be empty. Gain and shift are ordinary parameters, with which the model
itself computes ``gain * y + shift``.

References: Ioffe and Szegedy, Batch Normalization, ICML 2015, arXiv:1502.03167; Chan, Golub and
LeVeque, Updating formulae, 1979.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays import array_module, work_dtype
from ..errors import ConfigError, shown


class Saved(NamedTuple):
    """The values of a forward pass that `sync_batch_norm` keeps for `sync_batch_norm_backward`."""

    y: Any
    scale: Any
    axis: int | tuple[int, ...]


def sync_moments(comm, x, axis):
    """Return (mean, variance) of `x` along `axis` over all ranks. Collective over `comm`.

    Parameters
    ----------
    x : array
        This rank's batch, NumPy or CuPy; may be empty along `axis`.
    axis : int or tuple of int
        The axes that are summed over: 0 for (samples, features), (0, 2, 3) for (samples, channels,
        height, width), (0, 2, 3, 4) for the images of `mpidist.models.layers`.

    Returns
    -------
    mean, variance : arrays
        Both have the axes of `x` that are not summed over, and the dtype of `x` (float32 if `x` has
        half precision). All ranks get the same bits. The variance is the sum of the squared
        distances from the mean divided by n, not by n - 1.

    Raises
    ------
    ConfigError
        When `x` does not have the given axis, or when no rank has an element of `x`.
    MismatchError
        Raised on the other ranks when one rank raises an error, and on all ranks when the numbers
        of channels differ between the ranks.
    """
    xp = array_module(x)
    with call_guard(comm, "sync_moments"):
        count = _count(x, axis)
        wide = xp.float64
        mean = x.sum(axis, dtype=wide) / max(count, 1)
        apart = x - xp.expand_dims(mean, axis).astype(work_dtype(x.dtype))
        # `mean` was rounded to the working dtype. Because of the rounding, each square is too large
        # by off^2.
        off = apart.sum(axis, dtype=wide) / max(count, 1)
        squares = xp.square(apart).sum(axis, dtype=wide) - count * off**2
        total, sums, squares = _over_ranks(comm, count, count * mean, squares + count * mean**2)
    # This error is raised after the `with` block, because every rank raises it, so no rank has to
    # be notified.
    if total == 0:
        raise ConfigError(f"sync_moments: no rank has an element along axis {axis} to take a mean")
    mean = sums / total
    variance = xp.maximum(squares / total - mean**2, 0)
    return mean.astype(work_dtype(x.dtype)), variance.astype(work_dtype(x.dtype))


def sync_batch_norm(comm, x, axis, eps: float = 1e-5):
    """Return (y, mean, variance, saved); y is `x` normalised by the mean and variance of all ranks.

    Collective over `comm`. Use `mean` and `variance` to update running statistics. Pass `saved` to
    `sync_batch_norm_backward`. `x` is this rank's batch, which may be empty, and `axis` has the
    axes that are summed over, such as (0, 2, 3) for (samples, channels, height, width).
    """
    xp = array_module(x)
    with call_guard(comm, "sync_batch_norm"):  # a bad `eps` of one rank is an error on all ranks
        eps = work_dtype(x.dtype).type(eps)
    mean, variance = sync_moments(comm, x, axis)
    scale = xp.expand_dims(1 / xp.sqrt(variance + eps), axis)
    y = ((x - xp.expand_dims(mean, axis)) * scale).astype(x.dtype)
    return y, mean, variance, Saved(y, scale, axis)


def sync_batch_norm_backward(comm, dy, saved: Saved):
    """Return the gradient with respect to x, the input of `sync_batch_norm`.

    Collective over `comm`. `dy` is the gradient of this rank's *mean* loss with respect to y, the
    output of `sync_batch_norm`. Compute the gradients of this rank's parameters from the returned
    gradient. Their mean over all ranks, weighted by the batch sizes, is the gradient of the mean
    loss over all samples.
    """
    xp = array_module(dy)
    with call_guard(comm, "sync_batch_norm_backward"):
        y, scale, axis = saved
        count = _count(dy, axis)
        wide = xp.float64
        # A mean loss over n of N elements has the weight n / N in the loss over all ranks.
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


def call_guard(comm, name: str):
    """Return a context manager for the call `name`: if one rank raises an error, all ranks do.

    Collective over `comm`.
    """
    # Not imported at the top: models can be imported, and used by one process, without MPI.
    from ..runtime.context import of

    return of(comm).call(name)


def _count(x, axis) -> int:
    """Return how many elements of this rank's `x` go into each mean: the product along `axis`."""
    try:
        return math.prod(x.shape[a] for a in (axis if isinstance(axis, tuple) else (axis,)))
    except (IndexError, TypeError):
        raise ConfigError(
            f"axis is {shown(axis)}, expected an axis, or a tuple of axes, of an array of shape "
            f"{x.shape}"
        ) from None


def _over_ranks(comm, count: int, first, second):
    """Return the sums over all ranks of `count` and of two arrays, made by one allreduce."""
    from ..collectives.allreduce import allreduce  # not at the top, as in `call_guard`

    xp = array_module(first)
    packed = xp.concatenate([xp.full(1, count, np.float64), first.reshape(-1), second.reshape(-1)])
    allreduce(comm, packed)
    first, second = packed[1:].reshape(2, *first.shape)
    return float(packed[0]), first, second
