"""Local work whose failure on one rank is the same error on all of them.

    every rank:  local()  --gather-->  rank 0:  decide([...])  --bcast-->  every rank

Each phase of a save or a restore is one such round. No rank can be left alone in a collective
call, because nothing between two rounds may raise.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from mpidist.errors import CheckpointError, MpidistError, StorageError

#: What a rank says, or is told: (class and text of an error, or None; the result).
Answer = tuple[tuple[type, str] | None, Any]


def together(
    comm,
    doing: str,
    local: Callable[[], Any],
    decide: Callable[[list], Any] | None = None,
    each: bool = False,
):
    """Run `local` everywhere and return what rank 0 decided from the results.

    Collective over `comm`. Only small Python objects travel: control facts, never arrays.

    Parameters
    ----------
    doing : str
        What this is, for the message.
    local : callable
        Work of this rank, without communication.
    decide : callable, optional
        Called on rank 0 with all results, in rank order; by default nothing is decided.
    each : bool
        `decide` returns a list with one answer for each rank.

    Raises
    ------
    MpidistError
        On all ranks, when `local` raised on some or `decide` raised: of the same class where it
        was an error of mpidist, StorageError for those of files and memory, else CheckpointError.
    """
    cause: Exception | None = None
    mine: Answer
    try:
        mine = (None, local())
    except Exception as error:
        cause, mine = error, (_portable(error), None)
    everyone: list[Answer] = comm.gather(mine, root=0)
    answers: list[Answer] = []
    if comm.rank == 0:
        verdict = _failed(doing, everyone)
        if verdict is None:
            try:
                chosen: Any = decide([result for _, result in everyone]) if decide else None
                answers = [(None, item) for item in (chosen if each else [chosen] * comm.size)]
            except Exception as error:
                cause, verdict = error, _portable(error)
                if not isinstance(error, MpidistError):
                    verdict = (verdict[0], f"{doing}: rank 0 of {comm.size}: {verdict[1]}")
        if verdict is not None:
            answers = [(verdict, None)] * comm.size
    if each:
        verdict, value = comm.scatter(answers or None, root=0)
    else:
        verdict, value = comm.bcast(answers[0] if answers else None, root=0)
    if verdict is not None:
        failure = verdict[0](verdict[1])
        failure.everywhere = True
        raise failure from cause
    return value


def everywhere(comm, doing: str, local: Callable[[], Any]):
    """Run `local` on every rank and return this rank's own result. Collective over `comm`."""
    mine: list = []
    together(comm, doing, lambda: mine.append(local()))
    return mine[0]


def _portable(error: Exception) -> tuple[type, str]:
    """Return an error as (class, text): exceptions themselves need not survive a message."""
    if isinstance(error, MpidistError):
        return type(error), str(error)
    kind = StorageError if isinstance(error, OSError | MemoryError) else CheckpointError
    return kind, f"({socket.gethostname()}) {type(error).__name__}: {error}"


def _failed(doing: str, everyone: list) -> tuple[type, str] | None:
    """Join the failures of the ranks to one: class and text of the first, and how many more."""
    failed = [(rank, error) for rank, (error, _) in enumerate(everyone) if error]
    if not failed:
        return None
    rank, (kind, text) = failed[0]
    if len({error[1] for _, error in failed}) == 1 and len(failed) == len(everyone) > 1:
        return kind, f"{doing}: all {len(failed)} ranks: {text}"
    more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
    return kind, f"{doing}: rank {rank} of {len(everyone)}: {text}{more}"
