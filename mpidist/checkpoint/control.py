"""The rounds of a store: `run_on_all`, with what files and memory refuse as StorageError.

After a StorageError the same call may work later, so it must be one on all ranks alike; any other
exception of a store's local work is a CheckpointError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError, MpidistError, StorageError
from ..runtime import context
from ..runtime.agreement import run_on_all as rounds


def fault(error: Exception) -> type[MpidistError]:
    """Return the class that an exception is raised as on all ranks. Pure."""
    return StorageError if isinstance(error, OSError | MemoryError) else CheckpointError


def run_on_all(
    comm,
    doing: str,
    local: Callable[[], Any],
    decide: Callable[[list], Any] | None = None,
    each: bool = False,
    *,
    if_differs: bool = False,
):
    """Do as `mpidist.runtime.agreement.run_on_all.run_on_all`. Collective over `comm`."""
    return rounds.run_on_all(comm, doing, local, decide, each, fault=fault, if_differs=if_differs)


def same_on_all(comm, doing: str, local: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do as `mpidist.runtime.agreement.run_on_all.same_on_all`. Collective over `comm`."""
    return rounds.same_on_all(comm, doing, local, fault=fault)


def call(comm, kind: str):
    """Return a ``with`` for a public call; what is raised inside the other ranks hear."""
    return context.of(comm).call(kind)
