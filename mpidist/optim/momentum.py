"""Gradient descent with momentum, the default for the reference models."""

from __future__ import annotations

import numpy as np

from .optimizer import Optimizer, elementwise
from .schedules import Rate, check_range


def momentum(lr: Rate, beta: float = 0.9, weight_decay: float = 0.0) -> Optimizer:
    """Make an optimizer with heavy-ball momentum, ``v = beta * v + g; p -= lr * v``.

    In total, a gradient g moves the parameters by ``lr / (1 - beta) * g``: with beta=0.9, ten times
    as far as in plain gradient descent with the same `lr`. On an asynchronous parameter server, the
    velocity v decays with every gradient that a worker sends, not with every global step.

    If a gradient has only some rows of a parameter, the other rows do not change, and their
    velocity does not decay. With a gradient of zeros in the other rows, their velocity would decay
    and still move them.

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
