"""Choices by name: one table per kind of thing, one error when the name or a setting is wrong.

A table maps a name to the function that makes the thing; the keys that a job file may give are
that function's parameters, so a new optimizer, model or source needs one line in its table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from .errors import ConfigError, nearest, shown


def look_up(table: Mapping[str, Callable], name: str, kind: str) -> Callable:
    """Return ``table[name]``. Raises ConfigError that lists the names and the nearest."""
    if name in table:
        return table[name]
    known = ", ".join(repr(key) for key in table)
    hint = nearest(name, table)
    raise ConfigError(f"unknown {kind} {shown(name)}: expected one of {known}{hint}")


def build(table: Mapping[str, Callable], name: str, settings: Mapping, kind: str):
    """Call ``table[name]`` with `settings` as keywords.

    Raises ConfigError for an unknown name, an unknown setting (with the nearest known one) and
    a missing one, each before the function runs.
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
    return function(**settings)
