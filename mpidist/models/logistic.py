"""Multinomial logistic regression: the smallest model, convex, a line of algebra to check by."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ..errors import ConfigError
from .layers import Dense, Rows
from .network import Network


def logistic(inputs: int | Sequence[int], classes: int, seed: int = 0) -> Network:
    """``scores = x @ weight + bias`` under softmax cross entropy.

    Parameters
    ----------
    inputs : int or sequence of int
        Features of a sample, or the shape of a sample that is to be flattened.
    classes : int
        Number of classes, at least 2.
    seed : int
        Seeds the weights.
    """
    shape = sample_shape("logistic", "inputs", inputs)
    classes = checked_whole("logistic", "classes", classes, 2)
    return Network([Rows(), Dense("dense", math.prod(shape), classes)], shape, seed)


def sample_shape(model: str, name: str, given) -> tuple[int, ...]:
    """`given` as a shape of whole numbers from 1; one number is a shape of one."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        given = (given,)
    return tuple(checked_whole(model, name, size, 1) for size in given)


def checked_whole(model: str, name: str, value, low: int) -> int:
    """`value` as an int of at least `low`, or ConfigError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{model}: {name} is {value!r}, expected a whole number") from None
    if number < low:
        raise ConfigError(f"{model}: {name} is {value}, expected at least {low}")
    return number
