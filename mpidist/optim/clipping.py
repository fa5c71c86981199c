"""Clipping by the global norm: gradients keep their direction and lose what is too long.

    norm = sqrt(sum of the squares of all elements of all gradients)
    g *= max_norm / norm      where norm > max_norm

On replicas this is exact without a message: after the allreduce every rank holds the gradients of
the whole batch, and the same bits give the same norm. The sum is one that does not depend on the
processor (float64, NumPy's own order, no BLAS), or hosts of two generations would drift apart.

Reference: Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks,
ICML 2013, arXiv:1211.5063.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..arrays import array_module
from ..errors import ConfigError
from .optimizer import PIECE, Optimizer


def clip_by_global_norm(gradients: Mapping, max_norm: float) -> float:
    """Shorten `gradients` in place to a global norm of `max_norm`, if it is more.

    Returns the norm they had. After an allreduce, or before a push to servers, where it is the
    worker's own gradient that is clipped. One with a norm that is no number stays as it is: the
    loss is what tells.
    """
    max_norm = _check(max_norm)
    norm = global_norm(gradients)
    if norm > max_norm and math.isfinite(norm):
        for gradient in gradients.values():
            np.multiply(gradient, gradient.dtype.type(max_norm / norm), out=gradient)
    return norm


def clipped(optimizer: Optimizer, max_norm: float) -> Optimizer:
    """Return `optimizer` with its gradients clipped to a global norm of `max_norm`.

    For `md.train` with AllReduce, and for loops of your own; ``clip_norm = 1.0`` in a job file's
    optimizer table. Not elementwise, since a norm is a sum over all tensors: servers, each of
    which has some of them, refuse it. There, clip before the push with `clip_by_global_norm`.
    """
    max_norm = _check(max_norm)

    def update(gradients: Mapping, state: dict, parameters: Mapping, weight: float = 1.0) -> None:
        norm = global_norm({name: gradients[name] for name in parameters if name in gradients})
        if norm > max_norm and math.isfinite(norm):
            # An update leaves the gradients alone, so the shorter ones are new arrays.
            gradients = {n: g * g.dtype.type(max_norm / norm) for n, g in gradients.items()}
        optimizer.update(gradients, state, parameters, weight)

    settings = {**optimizer.settings, "clip_norm": max_norm}
    return replace(optimizer, update=update, elementwise=False, settings=settings)


def global_norm(gradients: Mapping) -> float:
    """Return the root of the sum of squares over all `gradients`, in float64."""
    return math.sqrt(math.fsum(_squares(gradient) for gradient in gradients.values()))


def _squares(gradient) -> float:
    xp = array_module(gradient)
    if xp is not np:
        return float(xp.sum(xp.square(gradient, dtype=np.float64)))
    flat = gradient.reshape(-1)
    pieces = (flat[start : start + PIECE] for start in range(0, flat.size, PIECE))
    return float(sum(np.square(piece, dtype=np.float64).sum() for piece in pieces))


def _check(max_norm: float) -> float:
    number = isinstance(max_norm, int | float | np.number) and not isinstance(max_norm, bool)
    if not number or not max_norm > 0:
        raise ConfigError(f"clipping: max_norm is {max_norm!r}, expected a number > 0")
    return float(max_norm)
