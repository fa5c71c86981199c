"""What is around a run: a watch where there is none yet, and a word to the others if it fails here.

Nothing collective happens on the way of an exception: the other ranks may be anywhere.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

from .. import events
from ..errors import ConfigError
from ..fault_tolerance.guard import Stopped
from ..fault_tolerance.watch import watch


def watched(comm, seconds: float):
    """Return a watch of this run for a ``with``. Collective over `comm`.

    Where the hosts share no folder in which it could work the run goes on without, and says so.
    """
    try:
        return watch(comm, seconds)
    except ConfigError as error:  # raised on all ranks
        events.emit("not_watched", reason=str(error))
        if comm.rank == 0 and events.VERBOSITY:
            print(
                "mpidist: note: md.train does not watch this run for hangs: the hosts share no "
                "folder that this program begins in; use md.watch(comm, directory=...)",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return nullcontext()


class AbandonOnError:
    """A ``with`` that tells the other ranks what has ended this rank's run.

    Unless they have it too: all ranks stop together, and what is raised everywhere they know.
    """

    def __init__(self, exchange):
        self.exchange = exchange

    def __enter__(self) -> AbandonOnError:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, Stopped) or getattr(error, "everywhere", False):
            return
        self.exchange.abandon(error)
