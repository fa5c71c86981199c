"""Plain stochastic gradient descent: the one rule under which every mode of training agrees."""

from __future__ import annotations

import numpy as np

from .optimizer import Optimizer, check_range, elementwise
from .schedules import Rate


def sgd(lr: Rate, weight_decay: float = 0.0) -> Optimizer:
    """Gradient descent, ``p -= lr * (g + weight_decay * p)``.

    The update is linear in the gradient, so k pushes of weight 1/k at the same parameters equal
    one update with their mean: SSP(0) on a parameter server equals serial training.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a schedule ``step -> float``.
    weight_decay : float
        L2 penalty; applied to every parameter, biases included.

    References
    ----------
    Robbins and Monro, A Stochastic Approximation Method, 1951.
    """
    decay = check_range("sgd", "weight_decay", weight_decay, 0, float("inf"))

    def kernel(parameter, gradient, scratch, rate, shrink):
        dtype = parameter.dtype
        if decay:
            np.multiply(parameter, shrink, out=scratch, dtype=dtype)
            np.add(scratch, gradient, out=scratch, dtype=dtype)
            np.multiply(scratch, rate, out=scratch, dtype=dtype)
        else:
            np.multiply(gradient, rate, out=scratch, dtype=dtype)
        np.subtract(parameter, scratch, out=parameter, dtype=dtype)

    settings = {"weight_decay": decay}
    return elementwise("sgd", lr, settings, (), lambda rate, count: (rate, decay), kernel)
