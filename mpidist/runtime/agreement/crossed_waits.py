"""Find ranks that wait for each other on two communicators, and raise an error on these ranks.

    rank 0   allreduce(a) ...... waits for rank 1
    rank 1   allreduce(b) ...... waits for rank 0       or in the first call on a new communicator

On each of the two communicators, the other rank seems to be only late. So a waiting rank sends a
message to all ranks that wait for it on other communicators. The message says in which operation of
which communicator it waits.
"""

from __future__ import annotations

import threading

from mpi4py import MPI

from ...errors import MismatchError
from ..communicator import translated_rank
from .mismatch import ELSEWHERE, Status

#: mpidist's states (`Context`) for the communicators of this process that are in use.
open_contexts: list = []


def look(comm: MPI.Comm, context=None, number: int = 0) -> None:
    """Report that this rank waits on `comm` to ranks that wait for it on other communicators.

    `context` is mpidist's state for `comm`, or None while it is being made. `number` is the number
    of the operation in which this rank waits. Raises MismatchError if another rank has reported
    that the two ranks wait for each other.
    """
    place, here = None, (comm, number)
    for other in tuple(open_contexts):
        if other is context or other.thread != threading.get_ident():
            continue  # another thread uses this communicator, and may continue meanwhile
        statuses = other.statuses
        if other.failed or not statuses.quiet.acquire(blocking=False):
            continue
        try:
            for status in statuses.waiting_for_me():
                place = place or _place(comm, context, number)
                needed = translated_rank(status.rank, other.comm, comm) != MPI.UNDEFINED
                statuses.say_elsewhere(status, place if needed else "")
                statuses.told_place = here
        except MismatchError as error:
            # If this rank has not yet told other ranks in which operation it waits now, the verdict
            # (an error text for all ranks) is about an earlier wait.
            if statuses.crossed and statuses.told_place == here:
                crossed = MismatchError(str(error))
                crossed.crossed = True
                raise crossed from None
        finally:
            statuses.quiet.release()


def _place(comm, context, number: int) -> str:
    """Return a text that says in which operation of which communicator this rank waits.

    `context` is mpidist's state for `comm`, or None while it is being made.
    """
    what, identity = "the first call", 0
    if context is not None:
        begun, identity = context.operation(number), context.identity
        what = f"{begun.kind if begun else 'an operation'} #{number}"
    return f"{identity:x}\x1e{number}\x1e{what} on a communicator of {comm.size} ranks"


def crossing(context, number: int, status: Status) -> str | None:
    """Return the error text if this rank and another rank wait for each other, else None.

    `context` is mpidist's state for the communicator on which this rank waits, and `number` is the
    number of the operation. `status` says in which operation of which communicator the other rank
    waits.
    """
    if status.state != ELSEWHERE or status.sequence != number:
        return None
    identity, at, words = status.signature.split("\x1e")
    there = [one for one in open_contexts if f"{one.identity:x}" == identity]
    if int(at) and (not there or there[0].sequence >= int(at)):
        return None  # this rank has begun that operation already
    mine = context.operation(number)
    return (
        f"{mine.kind if mine else 'operation'} #{number}: rank {context.rank} waits for rank "
        f"{status.rank}, which waits for it in {words} ({status.host}, {status.site}); all ranks "
        "must make their calls on different communicators in one order"
    )
