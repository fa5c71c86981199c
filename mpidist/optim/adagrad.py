"""AdaGrad: the learning rate of each element falls with the sum of its squared gradients."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError
from .optimizer import Optimizer, elementwise
from .schedules import Rate, check_range


def adagrad(lr: Rate, eps: float = 1e-7, weight_decay: float = 0.0) -> Optimizer:
    """Make the AdaGrad optimizer, ``s += g * g; p -= lr * g / (sqrt(s) + eps)``.

    The first step of an element has the length `lr`, whatever the scale of the gradient, and later
    steps get shorter. An element whose gradient is seldom nonzero, as for a rare feature, keeps
    long steps.

    If a gradient has only some rows of a parameter, the other rows do not change. Without
    `weight_decay`, the result has the same bits as with zero gradients for the other rows.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a schedule ``step -> float``.
    eps : float
        Added to the square root; `eps` must be larger than 0, even when rounded to the dtype of the
        parameters.
    weight_decay : float
        L2 penalty, added to the gradient.

    References
    ----------
    Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization, JMLR 2011.
    """
    eps = check_range("adagrad", "eps", eps)
    if not eps:
        raise ConfigError("adagrad: eps is 0, expected a number > 0; the first step divides by it")
    decay = check_range("adagrad", "weight_decay", weight_decay)

    def kernel(parameter, gradient, square, scratch, rate, small, weight, shrink):
        dtype = parameter.dtype
        root = np.empty_like(scratch)
        if decay:
            penalised = np.empty_like(scratch)
            np.multiply(parameter, shrink, out=penalised, dtype=dtype)
            gradient = np.add(penalised, gradient, out=penalised, dtype=dtype)
        np.multiply(gradient, gradient, out=scratch, dtype=dtype)
        np.multiply(scratch, weight, out=scratch, dtype=dtype)
        np.add(square, scratch, out=square, dtype=dtype)
        np.sqrt(square, out=root, dtype=dtype)
        np.add(root, small, out=root, dtype=dtype)
        np.multiply(gradient, rate, out=scratch, dtype=dtype)
        np.divide(scratch, root, out=scratch, dtype=dtype)
        np.subtract(parameter, scratch, out=parameter, dtype=dtype)

    def coefficients(rate: float, count: int, weight: float) -> tuple:
        return rate, eps, weight, decay

    settings, rows = {"eps": eps, "weight_decay": decay}, "lazy" if decay else "exact"
    return elementwise("adagrad", lr, settings, ("square",), coefficients, kernel, rows)
