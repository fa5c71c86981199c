"""Clip gradients by their global norm, which limits their length and keeps their direction.

    norm = sqrt(sum of the squares of all elements of all gradients)
    g *= max_norm / norm      where norm > max_norm

Clipping needs no messages: after an allreduce every rank has the same gradients. The norm has the
same bits on every kind of processor.

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
    """Scale `gradients` in place to a global norm of `max_norm` if their norm is larger.

    The global norm is the square root of the sum of squares over all gradients. Returns the norm
    before scaling. With allreduce, call this function after the allreduce. With parameter servers,
    call this function before the gradients are sent; each worker then clips its own gradients.
    Gradients whose norm is not finite are not changed.
    """
    max_norm = _check(max_norm)
    norm = global_norm(gradients)
    if norm > max_norm and math.isfinite(norm):
        for gradient in gradients.values():
            np.multiply(gradient, gradient.dtype.type(max_norm / norm), out=gradient)
    return norm


def clipped(optimizer: Optimizer, max_norm: float) -> Optimizer:
    """Return an optimizer that clips the gradients to a global norm of `max_norm` before updates.

    Use the returned optimizer with `md.train` and AllReduce, or in your own loop. In a job file,
    set ``clip_norm = 1.0`` in the table of the optimizer. Parameter servers update arrays part by
    part, which the returned optimizer cannot do. Give them the optimizer without clipping, and
    `max_norm` as their argument ``clip_norm``.
    """
    max_norm = _check(max_norm)

    def update(gradients: Mapping, state: dict, parameters: Mapping, weight: float = 1.0) -> None:
        if some := [name for name, gradient in gradients.items() if isinstance(gradient, tuple)]:
            raise ConfigError(
                f"clipping: the gradient of {some[0]!r} has only some rows; use "
                "clip_by_global_norm for its values"
            )
        norm = global_norm({name: gradients[name] for name in parameters if name in gradients})
        if norm > max_norm and math.isfinite(norm):
            # An update must not change its gradients, so the scaled ones are new arrays.
            gradients = {n: g * g.dtype.type(max_norm / norm) for n, g in gradients.items()}
        optimizer.update(gradients, state, parameters, weight)

    settings = {**optimizer.settings, "clip_norm": max_norm}
    return replace(
        optimizer,
        update=update,
        elementwise=False,
        settings=settings,
        rows="",
        inner=optimizer,
    )


def global_norm(gradients: Mapping) -> float:
    """Return the square root of the sum of squares over all arrays in `gradients`, in float64."""
    return math.sqrt(math.fsum(_squares(gradient) for gradient in gradients.values()))


def _squares(gradient) -> float:
    xp = array_module(gradient)
    if xp is not np:
        return float(xp.sum(xp.square(gradient, dtype=np.float64)))
    flat = gradient.reshape(-1)
    # float64 without BLAS has the same bits on every kind of processor.
    pieces = (flat[start : start + PIECE] for start in range(0, flat.size, PIECE))
    return float(sum(np.square(piece, dtype=np.float64).sum() for piece in pieces))


def _check(max_norm: float) -> float:
    number = isinstance(max_norm, int | float | np.number) and not isinstance(max_norm, bool)
    if not number or not max_norm > 0:
        raise ConfigError(f"clipping: max_norm is {max_norm!r}, expected a number > 0")
    return float(max_norm)
