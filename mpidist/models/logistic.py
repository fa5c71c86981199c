"""Multinomial logistic regression, the smallest model; its loss is convex."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..registry import checked_whole
from .layers import Dense, Rows
from .network import Network


def logistic(inputs: int | Sequence[int], classes: int, seed: int = 0) -> Network:
    """Make the model ``scores = x @ weight + bias``, with softmax cross entropy as its loss.

    Parameters
    ----------
    inputs : int or sequence of int
        Number of features of a sample, or the shape of a sample, which is then flattened.
    classes : int
        Number of classes, at least 2.
    seed : int
        Seed of the weights.
    """
    shape = sample_shape("logistic: inputs", inputs)
    classes = checked_whole("logistic: classes", classes, 2)
    return Network([Rows(), Dense("dense", math.prod(shape), classes)], shape, seed)


def sample_shape(name: str, given) -> tuple[int, ...]:
    """Return `given`, a number or a sequence, as a tuple of integers of at least 1."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        given = (given,)
    return tuple(checked_whole(name, size, 1) for size in given)
