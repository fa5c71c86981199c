"""The check that the arrays and numbers of a state have no NaN and no infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..arrays import all_finite


def is_finite(state) -> bool:
    """Return whether all arrays and numbers in the nested dicts and lists of `state` are finite."""
    if isinstance(state, Mapping):
        return all(is_finite(value) for value in state.values())
    if isinstance(state, list | tuple):
        return all(is_finite(value) for value in state)
    if isinstance(state, float):
        return math.isfinite(state)
    state = getattr(state, "array", state)  # a Shard has the part of a global array in `array`
    return not hasattr(state, "dtype") or all_finite(state)
