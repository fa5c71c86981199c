"""The checks of the settings of a guard (`md.guard`), which must be equal on all ranks."""

from __future__ import annotations

import operator
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from ..errors import ConfigError, shown

#: Signals that no process can handle.
_NEVER = {signal.SIGKILL, signal.SIGSTOP}


def settings_of(*, state, store, signals, time_limit, patience, every, deciders) -> dict[str, Any]:
    """Check the arguments of `md.guard`; return the settings that must be equal on all ranks."""
    if state is not None and not (isinstance(state, Mapping) or callable(state)):
        raise _bad("state", state, "a mapping of name to array, a function that makes one, or None")
    if store is not None and not callable(getattr(store, "save", None)):
        raise _bad("store", store, "an object with save(step, state), or None")
    if deciders is not None and not isinstance(deciders, MPI.Comm):
        raise _bad("deciders", deciders, "a communicator, MPI.COMM_NULL, or None")
    if patience is not None and _whole(patience) < 1:
        raise _bad("patience", patience, "a number of steps >= 1, or None")
    if _whole(every) < 1:
        raise _bad("every", every, "a whole number of steps >= 1")
    return {
        "signals": sorted(_numbers(signals)),
        "time_limit": _seconds(time_limit),
        "patience": None if patience is None else _whole(patience),
        "every": _whole(every),
        "state": "none" if state is None else "given",
        "store": "none" if store is None else type(store).__qualname__,
        "deciders": "none" if deciders is None else "given",
    }


def _numbers(signals: Iterable[int]) -> tuple[int, ...]:
    """Return the signals as integers. Raises ConfigError if no process can handle one of them."""
    try:
        numbers = tuple(signal.Signals(operator.index(number)) for number in signals)
    except (TypeError, ValueError):
        expected = "an iterable of signal numbers, such as (signal.SIGTERM,)"
        raise _bad("signals", signals, expected) from None
    if _NEVER & set(numbers):
        raise _bad("signals", signals, "signals that can be handled: neither SIGKILL nor SIGSTOP")
    return tuple(int(number) for number in numbers)


def _seconds(time_limit) -> float | str | None:
    if time_limit is None or (isinstance(time_limit, str) and time_limit == "auto"):
        return time_limit
    number = isinstance(time_limit, int | float) and not isinstance(time_limit, bool)
    with suppress(OverflowError):
        if number and time_limit > 0:
            return float(time_limit)
    raise _bad("time_limit", time_limit, "seconds > 0, 'auto', or None")


def _whole(value) -> int:
    """Return `value` as an int, or 0 if it is not a whole number."""
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0


def _bad(name: str, value, expected: str) -> ConfigError:
    return ConfigError(f"guard: {name}={shown(value)}; expected {expected}")
