"""Choose objects by name from tables (optimizers, models, ...); raise an error for a wrong name.

A table maps a name in a job file to the function that makes the object of that name. In the job
file, the keys next to the name are the arguments of that function.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from .errors import ConfigError, MpidistError, described, nearest, shown

T = TypeVar("T")


def look_up(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return ``table[name]``; for an unknown name, raise ConfigError with all known names."""
    if name in table:
        return table[name]
    known = ", ".join(repr(key) for key in table)
    hint = nearest(name, table)
    raise ConfigError(f"unknown {kind} {shown(name)}: expected one of {known}{hint}")


def build(table: Mapping[str, Callable], name: str, settings: Mapping, kind: str):
    """Call ``table[name]`` with `settings` as keywords.

    Raises ConfigError for an unknown name, for an unknown or missing setting, and if the function
    cannot use a value, such as a text in place of a number.
    """
    function = look_up(table, name, kind)
    accepted = inspect.signature(function).parameters
    for key in settings:
        if key not in accepted:
            known = ", ".join(repr(k) for k in accepted)
            raise ConfigError(
                f"{kind} {name!r}: unknown setting {key!r}: expected {known}"
                f"{nearest(key, accepted)}"
            )
    missing = [
        key
        for key, parameter in accepted.items()
        if parameter.default is parameter.empty and key not in settings
    ]
    if missing:
        raise ConfigError(f"{kind} {name!r}: setting {missing[0]!r} is missing; please give it")
    try:
        return function(**settings)
    except MpidistError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        given = ", ".join(f"{key}={shown(value, 60)}" for key, value in settings.items())
        raise ConfigError(
            f"{kind} {name!r} cannot be made with {given or 'its defaults'}: {described(error)}; "
            "correct these settings"
        ) from error


def has_argument(function: Callable, name: str) -> bool:
    """Return whether `function` (which the user may have written) has an argument `name`."""
    return name in inspect.signature(function).parameters


def checked_whole(name: str, value, low: int, hint: str = "") -> int:
    """Return the setting `value` as an int of at least `low`, or raise ConfigError."""
    with suppress(TypeError):
        number = operator.index(value)
        if number >= low and not isinstance(value, bool):
            return number
    raise ConfigError(f"{name} is {shown(value)}, expected a whole number of at least {low}{hint}")
