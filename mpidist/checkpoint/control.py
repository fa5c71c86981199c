"""Do work on each rank of a store, and raise an error of one rank on all ranks.

If one rank has an error of the file system or lacks memory, all ranks raise StorageError: the same
call may succeed later. Any other exception that is not an error of mpidist becomes a
CheckpointError.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from .. import events
from ..errors import CheckpointError, MpidistError, StorageError
from ..runtime import context
from ..runtime.agreement import run_on_all as rounds
from ..runtime.agreement.mismatch import Signature


def fault(error: Exception) -> type[MpidistError]:
    """Return the class of the exception that all ranks raise if one rank has raised `error`."""
    return StorageError if isinstance(error, OSError | MemoryError) else CheckpointError


run_on_all = partial(rounds.run_on_all, fault=fault)
same_on_all = partial(rounds.same_on_all, fault=fault)


def by_rank_0(comm, doing: str, work: Callable[[], Any]) -> Any:
    """Call `work` on rank 0; return its result, or raise its error, on all ranks. Collective."""
    return run_on_all(comm, doing, lambda: None, lambda _: work())


def call(comm, kind: str):
    """Return a context manager for the method `kind`; it sends exceptions to the other ranks."""
    return context.of(comm).call(kind)


def all_come(comm) -> None:
    """Record that all ranks will make the next collective call, so the call need not check this."""
    # If this rank raises before that call, the other ranks are told and abort it. Otherwise this
    # rank would receive the messages of the missed call in its next operation.
    context.of(comm).under_way = True


@contextmanager
def operation(comm, kind: str) -> Iterator[tuple[context.Context, int]]:
    """Yield the `Context` of `comm` and an MPI tag, for messages in the ``with`` block. Collective.

    An exception in the block on one rank ends the block on all ranks.
    """
    own = context.of(comm)
    tag = own.tag(own.begin(Signature(kind, "", "")))
    try:
        yield own, tag
    except BaseException as error:
        own.break_off(error)
        raise
    own.under_way = False


def report_no_copy(reason: str) -> None:
    """Report on stderr, and in the event log, why no copy of a checkpoint is kept on the nodes."""
    events.emit("checkpoint_not_held", reason=reason)
    print(f"mpidist: no {reason}", file=sys.stderr, flush=True)
