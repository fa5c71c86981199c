"""Adam, with decoupled weight decay (AdamW)."""

from __future__ import annotations

import math

import numpy as np

from .optimizer import Optimizer, elementwise
from .schedules import Rate, check_range


def adam(
    lr: Rate,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Make the Adam optimizer: each step moves a parameter by about `lr`, for any gradient scale.

    ::

        m = beta1 m + (1 - beta1) g        mean of gradients
        v = beta2 v + (1 - beta2) g^2      mean of squares
        p -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)

    Scaling the gradients has no effect; pass ``update`` a `weight`, which scales `lr`, instead. An
    asynchronous parameter server makes one update for every gradient that a worker sends, so the
    two means decay several times per global step. `init` refuses an `eps` that the dtype of the
    parameters rounds to zero, as float16 does with the default: keep float32 parameters, or pass
    ``eps=1e-4``.

    If a gradient has only some rows of a parameter, the other rows do not change, and their two
    means do not decay. With a gradient of zeros in the other rows, the means would decay and still
    move these rows.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a schedule ``step -> float``.
    beta1, beta2 : float
        Decay of the mean of gradients and of the mean of squares, in [0, 1).
    eps : float
        Added to the square root of the mean of squares.
    weight_decay : float
        Decoupled weight decay: the decay is not part of the two means.

    References
    ----------
    Kingma and Ba, ICLR 2015, arXiv:1412.6980; Loshchilov and Hutter, Decoupled Weight Decay
    Regularization, ICLR 2019, arXiv:1711.05101.
    """
    beta1 = check_range("adam", "beta1", beta1, 1)
    beta2 = check_range("adam", "beta2", beta2, 1)
    eps = check_range("adam", "eps", eps)
    decay = check_range("adam", "weight_decay", weight_decay)

    def coefficients(rate: float, count: int, weight: float) -> tuple:
        unbiased = rate / (1 - beta1**count), 1 / math.sqrt(1 - beta2**count)
        return beta1, 1 - beta1, beta2, 1 - beta2, eps, rate * decay, *unbiased

    def kernel(p, g, mean, square, scratch, keep1, new1, keep2, new2, small, shrink, rate, scale):
        dtype = p.dtype
        np.multiply(mean, keep1, out=mean, dtype=dtype)
        np.multiply(g, new1, out=scratch, dtype=dtype)
        np.add(mean, scratch, out=mean, dtype=dtype)
        np.multiply(square, keep2, out=square, dtype=dtype)
        np.multiply(g, g, out=scratch, dtype=dtype)
        np.multiply(scratch, new2, out=scratch, dtype=dtype)
        np.add(square, scratch, out=square, dtype=dtype)
        if decay:
            np.multiply(p, shrink, out=scratch, dtype=dtype)
            np.subtract(p, scratch, out=p, dtype=dtype)
        np.sqrt(square, out=scratch, dtype=dtype)
        np.multiply(scratch, scale, out=scratch, dtype=dtype)
        np.add(scratch, small, out=scratch, dtype=dtype)
        np.divide(mean, scratch, out=scratch, dtype=dtype)
        np.multiply(scratch, rate, out=scratch, dtype=dtype)
        np.subtract(p, scratch, out=p, dtype=dtype)

    settings = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
    return elementwise("adam", lr, settings, ("mean", "square"), coefficients, kernel)
