"""Gradient descent with a velocity: the default for the reference models."""

from __future__ import annotations

import numpy as np

from .optimizer import Optimizer, check_range, elementwise
from .schedules import Rate


def momentum(lr: Rate, beta: float = 0.9, weight_decay: float = 0.0) -> Optimizer:
    """Heavy-ball momentum, ``v = beta * v + g;  p -= lr * v``.

    A gradient moves the parameters by ``lr / (1 - beta)`` times itself in the end: at the same
    `lr`, beta=0.9 goes ten times as far as plain descent. Under asynchronous servers the decay
    is per push, not per global step; the distance is the same, the memory shorter, which is the
    stable side (staleness acts as momentum of its own). With a falling schedule the velocity
    holds gradients, not steps, so a drop of `lr` takes effect at once.

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
    beta = check_range("momentum", "beta", beta, 0, 1)
    decay = check_range("momentum", "weight_decay", weight_decay, 0, float("inf"))

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

    def coefficients(rate: float, count: int) -> tuple:
        return rate, beta, decay

    return elementwise("momentum", lr, settings, ("velocity",), coefficients, kernel)
