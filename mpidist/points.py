"""Named points at which a test may let something go wrong. At all other times nothing happens.

``points.reach("step", 20)`` tests one variable that is None, unless MPIDIST_FAULT was set when
the process began; then `mpidist.testing.faults` is loaded and does what that says. Points stand
where things happen once per step or less often.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable


def _first(name: str, number: int | None, about: dict) -> None:
    global _act
    # By its name: what goes wrong in tests is known on a higher floor, and nothing here needs it.
    _act = importlib.import_module("mpidist.testing.faults").read(os.environ)
    _act(name, number, about)


_act: Callable[[str, int | None, dict], None] | None = (
    _first if os.environ.get("MPIDIST_FAULT") else None
)


def reach(name: str, number: int | None = None, **about) -> None:
    """Say that this process is at a point. Local.

    `number` is that of the step, where there is one; else the point counts how often it was
    reached. `about` may hold ``file``, a path or a descriptor that can be damaged here.
    """
    if _act is not None:
        _act(name, number, about)
