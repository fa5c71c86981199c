"""Gradient descent with momentum, the default for the reference models."""

from __future__ import annotations

import numpy as np

from .optimizer import Optimizer, elementwise
from .schedules import Rate, check_range


def momentum(lr: Rate, beta: float = 0.9, weight_decay: float = 0.0) -> Optimizer:
    """Make an optimizer with heavy-ball momentum, ``v = beta * v + g; p -= lr * v``.

    Over its own and all later updates, a gradient g moves the parameters by ``lr / (1 - beta) * g``
    in total. With beta=0.9, a gradient moves the parameters ten times as far as in plain gradient
    descent with the same `lr`. On an asynchronous parameter server, the velocity decays with every
    gradient that a worker sends, not with every global step. The total distance that a gradient
    moves the parameters stays the same, but old gradients lose their effect sooner. The faster
    decay makes asynchronous training more stable, because stale gradients also act like momentum.
    The velocity is a sum of gradients and does not contain `lr`, so a lower `lr` takes effect at
    once.

    If a gradient has only some rows of a parameter, the other rows do not change. The velocity of a
    row without a gradient does not decay, and acts again when the row gets its next gradient. A row
    that gets a gradient in one of k updates is trained as if only these updates existed. The row
    moves as far in total, ``lr / (1 - beta) * g`` per gradient, but later than with zero gradients
    in the other updates.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a schedule ``step -> float``.
    beta : float
        Decay of the velocity, in [0, 1); 0 is plain descent.
    weight_decay : float
        L2 penalty, added to the gradient before the velocity.

    References
    ----------
    Polyak, 1964; Sutskever et al., On the importance of initialization and momentum, ICML 2013.
    Mitliagkas et al., Asynchrony begets momentum, 2016, arXiv:1605.09774.
    """
    beta = check_range("momentum", "beta", beta, 1)
    decay = check_range("momentum", "weight_decay", weight_decay)

    def kernel(parameter, gradient, velocity, scratch, rate, keep, shrink):
        dtype = parameter.dtype
        np.multiply(velocity, keep, out=velocity, dtype=dtype)
        np.add(velocity, gradient, out=velocity, dtype=dtype)
        if decay:
            np.multiply(parameter, shrink, out=scratch, dtype=dtype)
            np.add(velocity, scratch, out=velocity, dtype=dtype)
        np.multiply(velocity, rate, out=scratch, dtype=dtype)
        np.subtract(parameter, scratch, out=parameter, dtype=dtype)

    settings = {"beta": beta, "weight_decay": decay}

    def coefficients(rate: float, count: int, weight: float) -> tuple:
        return rate, beta, decay

    return elementwise("momentum", lr, settings, ("velocity",), coefficients, kernel)
