"""Named points of the program at which a test may inject a fault.

Unless MPIDIST_FAULT is set, the points do nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def _first(name: str, number: int | None, about: dict) -> None:
    global _act
    from .faults import read_faults  # loaded only if a fault is requested

    _act = read_faults(os.environ)
    _act(name, number, about)


_act: Callable[[str, int | None, dict], None] | None = (
    _first if os.environ.get("MPIDIST_FAULT") else None
)


def fault_point(name: str, number: int | None = None, **about) -> None:
    """Mark a point of the program, called `name`, at which a test may inject faults.

    Parameters
    ----------
    name : str
        A name from the list in docs/faults.md, or a name that a test has chosen.
    number : int, optional
        The number with which ``:NUMBER`` in MPIDIST_FAULT is compared. The default is the number of
        times that this process has reached the point.
    file : path or descriptor, optional
        The file that ``flip`` and ``truncate`` damage.
    """
    if _act is not None:
        _act(name, number, about)
