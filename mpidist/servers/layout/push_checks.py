"""Check what a worker pushes, before anything is sent: the number of samples, and the values."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import numpy as np

from ...arrays import all_finite
from ...errors import ConfigError, shown

_MANY = 1 << 62  # the number of samples must be lower, because a header has 64 bits for it


def checked_samples(model: str, samples, global_batch: int | None) -> int | None:
    """Return the argument `samples` of a push as an int, or None if it is None.

    Raises ConfigError if `samples` is not a whole number of at least 0, or if it is None although
    the model has a `global_batch`.
    """
    if samples is None:
        if global_batch is None:
            return None
        raise ConfigError(f"push to {model!r}: give samples=, the model has a global batch")
    try:
        number = -1 if isinstance(samples, bool) else operator.index(samples)
    except TypeError:
        number = -1
    if not 0 <= number < _MANY:
        got = shown(samples)
        raise ConfigError(
            f"push to {model!r}: samples is {got}; expected a whole number, 0 or more"
        )
    return number


def not_finite(model: str, pushes: Mapping) -> str | None:
    """Return the text of an error if a gradient has a NaN or an infinity, otherwise None."""
    wrong = next((name for name, (_, flat) in pushes.items() if not all_finite(flat)), None)
    if wrong is None:
        return None
    flat = pushes[wrong][1]
    bad = np.flatnonzero(~np.isfinite(flat))
    return (
        f"push to {model!r}: gradient {wrong!r} has {bad.size} of {flat.size} values that are not "
        f"finite, the first at index {bad[0]}, as {flat.dtype}; nothing was sent; lower the "
        "learning rate, or leave such pushes out by nonfinite='drop'"
    )
