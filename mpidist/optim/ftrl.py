"""FTRL-Proximal, for sparse linear models: rates as in AdaGrad, and many weights exactly zero."""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError
from .optimizer import Optimizer, elementwise
from .schedules import Rate, check_range


def ftrl(lr: Rate, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> Optimizer:
    """Make the FTRL-Proximal optimizer, which sets most weights to exactly 0 if `l1` is above 0.

    ::

        z += lr g - (sqrt(n + g^2) - sqrt(n)) p;    n += g^2
        p = -(z - sign(z) lr l1) / (beta + sqrt(n) + lr l2)     or 0 where abs(z) <= lr l1

    With ``l1 = l2 = 0`` FTRL is AdaGrad, ``p -= lr g / (beta + sqrt(n))``. Here z is `lr` times as
    large as in the usual form of FTRL. Each gradient is multiplied by the `lr` of its own step, so
    `lr` may be a schedule. At the first nonzero gradient of an element, its z is set so that the
    formula for p gives the present value of the element. If a gradient has only some rows of a
    parameter, the result has the same bits as with zero gradients for the other rows.

    An element that begins at 0 stays 0 until its gradients add up to more than `l1`.

    Parameters
    ----------
    lr : float or callable
        Learning rate (alpha in the paper), or a schedule ``step -> float``.
    beta : float
        Makes the first steps shorter; larger than 0.
    l1, l2 : float
        Penalties of the sum of absolute values and of half the sum of squares.

    References
    ----------
    McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013.
    """
    beta = check_range("ftrl", "beta", beta)
    if not beta:
        raise ConfigError("ftrl: beta is 0, expected a number > 0; the first step divides by it")
    l1, l2 = check_range("ftrl", "l1", l1), check_range("ftrl", "l2", l2)

    def kernel(weights, gradient, z, n, scratch, rate, weight, threshold, smooth):
        dtype = weights.dtype
        moves = np.not_equal(gradient, 0)
        # If an element has had no gradient so far, z is set so that the formula for p gives the
        # present value of the weight.
        begins = np.equal(n, 0)
        np.multiply(weights, smooth, out=scratch, dtype=dtype)
        np.add(scratch, np.sign(weights) * threshold, out=scratch, dtype=dtype)
        np.copyto(z, -scratch, where=begins & moves)
        root = np.empty_like(scratch)
        np.sqrt(n, out=root, dtype=dtype)
        np.multiply(gradient, gradient, out=scratch, dtype=dtype)
        np.multiply(scratch, weight, out=scratch, dtype=dtype)
        np.add(n, scratch, out=n, dtype=dtype)
        np.sqrt(n, out=scratch, dtype=dtype)
        np.subtract(scratch, root, out=root, dtype=dtype)
        np.multiply(root, weights, out=root, dtype=dtype)
        np.subtract(z, root, out=z, dtype=dtype)
        np.multiply(gradient, rate, out=root, dtype=dtype)
        np.add(z, root, out=z, dtype=dtype)
        np.add(scratch, smooth, out=scratch, dtype=dtype)
        np.subtract(np.sign(z) * threshold, z, out=root, dtype=dtype)
        np.divide(root, scratch, out=scratch, dtype=dtype)
        np.copyto(scratch, dtype.type(0), where=np.abs(z) <= threshold)
        np.copyto(weights, scratch, where=moves)

    def coefficients(rate: float, count: int, weight: float) -> tuple:
        full = rate / weight if weight else 0.0  # the penalties do not depend on the weight
        return rate, weight, full * l1, beta + full * l2

    settings = {"beta": beta, "l1": l1, "l2": l2}
    return elementwise("ftrl", lr, settings, ("z", "n"), coefficients, kernel, "exact")
