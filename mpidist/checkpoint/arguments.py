"""Arguments of stores, checked: each comes back in a plain form, or is a ConfigError that names it.

Pure: nothing here looks at a disk.
"""

from __future__ import annotations

import operator
import os
import re
from pathlib import Path

from ..errors import ConfigError, shown
from .storage.steps import MAX_STEP

#: Also what is left of it when a path is made of an address: ``s3:/bucket``.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/", re.ASCII)


def path_of(name: str, given) -> str:
    """Return a path as text. A URL is refused: it would become a local folder. Pure."""
    try:
        path = os.fsdecode(given)
    except TypeError:
        raise ConfigError(f"{name}={shown(given)}; expected a path") from None
    if not path:
        raise ConfigError(f"{name}={path!r}; expected a path, '.' for the current folder")
    if scheme := _SCHEME.match(path):
        raise ConfigError(
            f"{name}={path!r} is an address of {scheme[1]!r}; expected a path in a file system "
            "that all hosts have mounted"
        )
    return path


def is_integer(value) -> bool:
    """Whether `value` is a whole number of any type, but not a bool. Pure."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def wanted(step, needed: bool = False, name: str = "step") -> int | None:
    """Return a step that is possible, or None where none is `needed`. Pure."""
    if step is None and not needed:
        return None
    if not is_integer(step) or not 0 <= operator.index(step) <= MAX_STEP:
        raise ConfigError(f"{name}={shown(step)}; expected an integer from 0 to {MAX_STEP}")
    return operator.index(step)


def which(step, history, needed: bool = False) -> dict:
    """Return the step and the history that are asked for. Pure."""
    return {"step": wanted(step, needed), "history": wanted(history, name="history")}


def steps_to_keep(name: str, value, or_none: bool = True) -> int | None:
    """Return a number of steps. Pure."""
    if value is None and or_none:
        return None
    if not is_integer(value) or operator.index(value) < 1:
        none = ", or None" if or_none else ""
        raise ConfigError(f"{name}={shown(value)}; expected a number of steps of 1 or more{none}")
    return operator.index(value)


def yes_or_no(name: str, value) -> bool:
    """Return a truth value. Pure."""
    try:
        return bool(value)
    except Exception:
        raise ConfigError(f"{name}={shown(value)}; expected True or False") from None


def of_store(path, keep, keep_every, writers, direct, sha256, fresh) -> dict:
    """Return the arguments of a store, by name. Pure."""
    if not (isinstance(writers, str) and writers in ("all", "node")):
        if not is_integer(writers) or operator.index(writers) < 1:
            given = shown(writers)
            raise ConfigError(f"writers={given}; expected 'all', 'node' or a number from 1")
        writers = operator.index(writers)
    return {
        "path": str(Path(path_of("path", path)).absolute()),
        "keep": steps_to_keep("keep", keep),
        "keep_every": steps_to_keep("keep_every", keep_every),
        "writers": writers,
        "direct": yes_or_no("direct", direct),
        "sha256": yes_or_no("sha256", sha256),
        "fresh": fresh if isinstance(fresh, str) else yes_or_no("fresh", fresh),
    }
