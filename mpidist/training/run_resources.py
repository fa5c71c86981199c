"""Context managers for a whole run: the store, the watch for hangs, the report of an error.

If an exception has ended the run on this rank, these context managers call no collective operation.
"""

from __future__ import annotations

import sys
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from mpi4py import MPI

from .. import events
from ..errors import ConfigError, MpidistError
from ..fault_tolerance.guard import Stopped
from ..fault_tolerance.watch import watch
from ..runtime.ulfm import is_death


def watched(comm, seconds: float):
    """Return a context manager that ends this job if it hangs. Collective over `comm`.

    The job hangs if it makes no progress for `seconds` seconds, see `md.watch`. If there is no
    folder that all hosts share, the run continues without a watch, and prints a note.
    """
    try:
        return watch(comm, seconds)
    except ConfigError as error:  # raised on all ranks
        events.emit("not_watched", reason=str(error))
        if comm.rank == 0 and events.VERBOSITY:
            print(
                "mpidist: note: md.train does not watch this run for hangs: the hosts do not share "
                "the current folder; use md.watch(comm, directory=...)",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return nullcontext()


def open_store(comm, checkpoint, fresh: bool | str, memory: Path | None):
    """Return a context manager for the checkpoint store of a run. Collective over `comm`.

    In its ``with`` block, the value is the store, or None if the run saves no checkpoints. With
    `fresh`, the store ignores the checkpoints of earlier runs (see `Carried.fresh`). `memory` is
    the folder for copies of the state in the memory of the nodes, or None.
    """
    if checkpoint is None or hasattr(checkpoint, "restore"):
        return nullcontext(checkpoint)
    if not callable(checkpoint):
        # Imported here, because a run without checkpoints does not need the store.
        from ..checkpoint.memory_copies import open_with_copies
        from ..checkpoint.store import CheckpointStore

        if memory is not None:
            return open_with_copies(comm, checkpoint, memory, fresh=fresh)
        return CheckpointStore(comm, checkpoint, fresh=fresh)
    try:
        store = checkpoint(comm)
    except (MpidistError, MPI.Exception):
        raise
    except Exception as error:
        raise ConfigError(f"checkpoint(comm) raised {type(error).__name__}: {error}") from error
    if not hasattr(store, "restore"):
        raise ConfigError(f"checkpoint(comm) returned {type(store).__name__}; expected a store")
    return store if hasattr(store, "__exit__") else closing(store)


@contextmanager
def abandon_on_error(exchange):
    """Context manager: if an exception ends the run on this rank, send it to the other ranks.

    Nothing is sent if all ranks raise the same exception together, or if a rank has died.
    """
    try:
        yield
    except BaseException as error:
        if is_death(error):
            exchange.lost(error)
        elif not isinstance(error, Stopped) and not getattr(error, "everywhere", False):
            exchange.abandon(error)
        raise
