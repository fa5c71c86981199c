"""Check the arguments of a checkpoint store; an error names the argument that is wrong."""

from __future__ import annotations

import math
import operator
import os
import re
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError, shown

#: The highest step number: the name of a step's folder has space for 12 digits.
MAX_STEP = 10**12 - 1

#: A pattern for the scheme of a URL. It accepts a single slash, because `Path` turns
#: ``s3://bucket`` into ``s3:/bucket``.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/", re.ASCII)


def checked_path(name: str, given) -> str:
    """Return the argument `given` as a string; raise ConfigError if it is a URL or no path."""
    try:
        path = os.fsdecode(given)
    except TypeError:
        raise ConfigError(f"{name}={shown(given)}; expected a path") from None
    if not path:
        raise ConfigError(f"{name}={path!r}; expected a path, '.' for the current folder")
    if "\0" in path:
        raise ConfigError(f"{name}={path!r}; a path cannot contain a zero byte")
    if scheme := _SCHEME.match(path):
        raise ConfigError(
            f"{name}={path!r} is an address of {scheme[1]!r}; expected a path in a file system "
            "that all hosts have mounted"
        )
    return path


def checked_number(
    name: str, value, least: int, expected: str, most: float = math.inf, optional: bool = False
) -> int | None:
    """Return `value` as an int; raise ConfigError unless it is from `least` to `most`.

    None is allowed if `optional` is true.
    """
    if value is None and optional:
        return None
    with suppress(TypeError):
        if least <= (number := operator.index(value)) <= most and not isinstance(value, bool):
            return number
    raise ConfigError(f"{name}={shown(value)}; expected {expected}")


def checked_step(step, needed: bool = False, name: str = "step") -> int | None:
    """Return a step number as an int; raise ConfigError if it is not valid.

    None is allowed unless `needed` is true.
    """
    expected = f"an integer from 0 to {MAX_STEP}"
    return checked_number(name, step, 0, expected, MAX_STEP, optional=not needed)


def which(step, history, needed: bool = False) -> dict:
    """Check the arguments `step` and `history`, and return them in a dict with these two keys."""
    return {"step": checked_step(step, needed), "history": checked_step(history, name="history")}


def yes_or_no(name: str, value) -> bool:
    """Return an argument as a bool; raise ConfigError if ``bool(value)`` is not possible."""
    try:
        return bool(value)
    except Exception:
        raise ConfigError(f"{name}={shown(value)}; expected True or False") from None


def of_store(path, keep, keep_every, writers, direct, sha256, fresh) -> dict:
    """Check the arguments of `CheckpointStore`; return them in a dict with their names as keys."""
    if not (isinstance(writers, str) and writers in ("all", "node")):
        writers = checked_number("writers", writers, 1, "'all', 'node' or a number from 1")
    steps = "a number of steps of 1 or more, or None"
    return {
        "path": str(Path(checked_path("path", path)).absolute()),
        "keep": checked_number("keep", keep, 1, steps, optional=True),
        "keep_every": checked_number("keep_every", keep_every, 1, steps, optional=True),
        "writers": writers,
        "direct": yes_or_no("direct", direct),
        "sha256": yes_or_no("sha256", sha256),
        "fresh": fresh if isinstance(fresh, str) else yes_or_no("fresh", fresh),
    }
