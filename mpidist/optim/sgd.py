"""Plain gradient descent (SGD)."""

from __future__ import annotations

import numpy as np

from .optimizer import Optimizer, elementwise
from .schedules import Rate, check_range


def sgd(lr: Rate, weight_decay: float = 0.0) -> Optimizer:
    """Make the optimizer of gradient descent, ``p -= lr * (g + weight_decay * p)``.

    If all gradients are computed at the same parameters, with the same `lr` and without
    `weight_decay`, k updates of weight 1/k equal one update with the mean gradient. A parameter
    server in synchronous mode then gives the same result as serial training.

    If a gradient has only some rows of a parameter, the other rows do not change, not even by
    weight decay.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a schedule ``step -> float``.
    weight_decay : float
        L2 penalty, applied to every parameter, including biases.

    References
    ----------
    Robbins and Monro, A Stochastic Approximation Method, 1951.
    """
    decay = check_range("sgd", "weight_decay", weight_decay)

    def kernel(parameter, gradient, scratch, rate, shrink):
        dtype = parameter.dtype
        if decay:
            np.multiply(parameter, shrink, out=scratch, dtype=dtype)
            np.add(scratch, gradient, out=scratch, dtype=dtype)
            np.multiply(scratch, rate, out=scratch, dtype=dtype)
        else:
            np.multiply(gradient, rate, out=scratch, dtype=dtype)
        np.subtract(parameter, scratch, out=parameter, dtype=dtype)

    settings, rows = {"weight_decay": decay}, "lazy" if decay else "exact"
    return elementwise("sgd", lr, settings, (), lambda rate, *_: (rate, decay), kernel, rows)
