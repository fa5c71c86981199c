"""The one way mpidist waits for MPI: polled, polite to other ranks on the core, never blind.

A blocking MPI call cannot be left when a peer is dead, stopped or calling something else. So
every wait polls a test and, after a moment of patience, runs a callback that may look around
(read status messages, compare call sites, check a deadline) and raise. `servers.link.Link.wait`
does the same in a loop of its own, since it serves meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

#: Seconds without completion before a wait begins to look around.
PATIENCE = 1.0

#: Seconds that the main thread has spent in waits so far, without those that end at once.
waited = 0.0

_SPINS = 200
_BATCH = 32


def wait_until(
    test: Callable[[], bool],
    on_wait: Callable[[float], None] | None = None,
    patience: float | None = None,
) -> None:
    """Return as soon as `test()` is true. Adds to `waited`.

    Parameters
    ----------
    test : callable
        Cheap, makes MPI progress (``request.Test``), returns true when done.
    on_wait : callable, optional
        Called with the seconds waited, about ten times a second, once `patience` is over.
        It ends the wait by raising.
    patience : float, optional
        Seconds; `PATIENCE` by default.
    """
    global waited
    patience = PATIENCE if patience is None else patience
    for _ in range(_SPINS):
        if test():
            return
    # More ranks than cores: a spinning rank keeps its peer from running, so give the core away
    # after every look. With a free core sched_yield costs a third of a microsecond.
    start = time.monotonic()
    look_around = start + patience
    try:
        while True:
            for _ in range(_BATCH):
                if test():
                    return
                os.sched_yield()
            now = time.monotonic()
            if now >= look_around:
                if on_wait is not None:
                    on_wait(now - start)
                look_around = now + 0.1
            if now - start > patience:
                time.sleep(0.0005)
    finally:
        if threading.current_thread() is threading.main_thread():
            waited += time.monotonic() - start
