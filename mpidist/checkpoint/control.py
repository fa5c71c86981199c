"""The rounds of a store: `run_on_all`, with what files and memory refuse as StorageError.

After a StorageError the same call may work later, so it must be one on all ranks alike; any other
exception of a store's local work is a CheckpointError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..errors import CheckpointError, MpidistError, StorageError
from ..runtime import context
from ..runtime.agreement import run_on_all as rounds
from ..runtime.agreement.mismatch import Signature


def fault(error: Exception) -> type[MpidistError]:
    """Return the class that an exception is raised as on all ranks. Pure."""
    return StorageError if isinstance(error, OSError | MemoryError) else CheckpointError


run_on_all = partial(rounds.run_on_all, fault=fault)
same_on_all = partial(rounds.same_on_all, fault=fault)


def by_rank_0(comm, doing: str, work: Callable[[], Any]) -> Any:
    """Return what rank 0 finds, on all ranks; so for what it raises. Collective over `comm`."""
    return run_on_all(comm, doing, lambda: None, lambda _: work())


def call(comm, kind: str):
    """Return a ``with`` for a public call; what is raised inside the other ranks hear."""
    return context.of(comm).call(kind)


def all_come(comm) -> None:
    """Say that all ranks come to the next round, which so need not begin with an agreement.

    What is raised before breaks it off: a rank that went on would meet, in its next operation, the
    messages of those that are in the round.
    """
    context.of(comm).under_way = True


@contextmanager
def operation(comm, kind: str) -> Iterator[tuple[context.Context, int]]:
    """Send data inside of the block: its context and a tag. Collective over `comm`.

    All ranks are known to come to it. What is raised inside breaks it off for all.
    """
    own = context.of(comm)
    tag = own.tag(own.begin(Signature(kind, "", "")))
    try:
        yield own, tag
    except BaseException as error:
        own.break_off(error)
        raise
    own.under_way = False
