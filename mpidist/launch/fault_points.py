"""Named points at which a test may let something go wrong. At all other times nothing happens.

``fault_point("step", 20)`` tests one variable that is None, unless MPIDIST_FAULT was set when the
process began; then `faults` is loaded and does what that says. Points stand where things happen
once per step or less often.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def _first(name: str, number: int | None, about: dict) -> None:
    global _act
    from .faults import read_faults  # what goes wrong is not loaded where nothing does

    _act = read_faults(os.environ)
    _act(name, number, about)


_act: Callable[[str, int | None, dict], None] | None = (
    _first if os.environ.get("MPIDIST_FAULT") else None
)


def fault_point(name: str, number: int | None = None, **about) -> None:
    """Say that this process is at a point: faults with that name happen here.

    Parameters
    ----------
    name : str
        One of docs/faults.md, or a test's own.
    number : int, optional
        What ``:NUMBER`` is compared with; by default how often the point was reached.
    file : path or descriptor, optional
        What ``flip`` and ``truncate`` damage.
    """
    if _act is not None:
        _act(name, number, about)
