"""The function with which mpidist waits for MPI: it polls, and lets other programs run.

A rank cannot leave a blocking MPI call if a peer is dead, is stopped, or makes another call.
Therefore every wait calls a test function until it returns true.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigError, shown

#: After this many seconds, a wait calls `on_wait` for the first time.
PATIENCE = 1.0

#: Seconds that the main thread has spent in waits so far. Waits that end at once do not count.
waited = 0.0

#: The last time (of `time.monotonic`) at which a wait was in progress that had already lasted
#: longer than a moment.
long_wait = 0.0

#: True while this rank gets no answer from some other host (`network_watch`).
unreachable = False

#: A function that every wait calls between its tests, or None. The function may raise an exception.
look: Callable[[], None] | None = None

#: An object that shows the other ranks of this node what this rank does, or None
#: (`elasticity.node_watch` sets it). The board shows each wait of the main thread that does not end
#: at once.
board: Any = None
#: The phases of a rank that a board shows. A rank may stay in each of the last four phases for any
#: time.
PHASES = ("outside", "compute", "wait", "save", "data", "evaluate", "plan")

_SPINS = 200
_BATCH = 32


def wait_until(
    test: Callable[[], bool],
    on_wait: Callable[[float], None] | None = None,
    patience: float | None = None,
) -> None:
    """Return as soon as `test()` is true.

    Parameters
    ----------
    test : callable
        A cheap function that makes MPI progress, such as ``request.Test``.
    on_wait : callable, optional
        A function that takes the seconds waited so far, and is called about ten times a second. An
        exception of `on_wait` ends the wait.
    patience : float, optional
        Seconds before the first call of `on_wait`; 1 by default (`PATIENCE`).
    """
    global waited, long_wait
    patience = PATIENCE if patience is None else patience
    for _ in range(_SPINS):
        if test():
            return
    # If there are more ranks than cores, a rank that polls without a pause keeps other ranks from
    # running. So after every test the rank lets other processes use its core (sched_yield). If no
    # other process needs the core, sched_yield takes 0.3 microseconds.
    start = time.monotonic()
    look_around = start + patience
    main = threading.current_thread() is threading.main_thread()
    told = board if main else None
    before = told.begin_wait(start) if told is not None else 0
    try:
        while True:
            for _ in range(_BATCH):
                if test():
                    return
                os.sched_yield()
            if look is not None:
                look()
            now = time.monotonic()
            if told is not None and now >= told.next_look:
                told.look(now)
            if now >= look_around:
                long_wait = now
                if on_wait is not None:
                    on_wait(now - start)
                look_around = now + 0.1
            if now - start > patience:
                time.sleep(0.0005)
    finally:
        if main:
            end = time.monotonic()
            waited += end - start
            if told is not None:
                told.show(before, end)


class ElasticWait:
    """Notices deaths of ranks in a wait that has a loop of its own instead of `wait_until`.

    It is used in elastic programs, which go on after a rank has died. The loop must call `look`
    again and again, and `end` after the wait.
    """

    _EVERY = 0.001  # seconds between two calls of `look`

    def __init__(self, start: float):
        self.next = start + self._EVERY
        self._board = board_of_main_thread()
        self._before: int | None = None  # the phase that the board showed before the wait

    def look(self, now: float) -> None:
        """Raise RankFailure if a rank has died; let the other ranks see that this rank waits."""
        self.next = now + self._EVERY
        if look is not None:
            look()
        if self._board is not None:
            if self._before is None:
                self._before = self._board.begin_wait(now)
            if now >= self._board.next_look:
                self._board.look(now)

    def end(self) -> None:
        """Let the other ranks of the node see that the wait of this rank is over."""
        if self._before is not None:
            self._board.show(self._before, time.monotonic())


def elastic_wait(start: float) -> ElasticWait | None:
    """Return an `ElasticWait`, which notices deaths in a wait that begins at time `start`, or None.

    The result is None unless the program is elastic (it goes on after the death of a rank).
    """
    return None if look is None else ElasticWait(start)


def board_of_main_thread() -> Any:
    """Return `board` if this is the main thread, and None in other threads."""
    return board if threading.current_thread() is threading.main_thread() else None


@contextmanager
def phase(name: str) -> Iterator[None]:
    """During the ``with`` block, show the other ranks of the node that this rank may be late.

    `name` says what the rank does: "save", "data", "evaluate" or "plan". In an elastic program,
    which goes on after it has lost a rank, such a rank is not removed for being late. Does nothing
    outside the main thread.
    """
    if name not in PHASES[3:]:
        raise ConfigError(f"phase {shown(name)}; expected one of {', '.join(PHASES[3:])}")
    told = board_of_main_thread()
    if told is None:
        yield
        return
    before = told.show(PHASES.index(name), time.monotonic())
    try:
        yield
    finally:
        told.show(before, time.monotonic())
