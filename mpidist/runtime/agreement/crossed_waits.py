"""Find ranks that wait for each other on two communicators, and raise an error on both.

    rank 0   allreduce(a) ...... waits for rank 1
    rank 1   allreduce(b) ...... waits for rank 0       or in the first call on a new communicator

On each of the two nothing is wrong: nobody is in another operation. So a rank that waits looks at
its other communicators too, and answers whoever waits for it there: "I am elsewhere, and need you".
If that rank has not come to where it is needed, neither can go on, and it tells all so.

MPI requires that ranks call the collectives of communicators that share ranks in the same order,
even if one of the calls need not wait.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from mpi4py import MPI

from ...errors import MismatchError
from .mismatch import ELSEWHERE, Status

#: The contexts of this process that are open.
open_contexts: list = []


class Place(NamedTuple):
    """Where this rank waits: an operation on a communicator; number 0 for its first call."""

    comm: MPI.Comm
    number: int
    identity: int
    words: str


def look(comm: MPI.Comm, context=None, number: int = 0) -> None:
    """Answer ranks that wait for this one on other communicators than `comm`.

    `context` is that of `comm`, None while it is made. Raises MismatchError where a rank there
    has found that neither can go on.
    """
    place, here = None, (comm, number)
    for other in tuple(open_contexts):
        if other is context or other.thread != threading.get_ident():
            continue  # another thread's: that one may come to it while this one waits
        statuses = other.statuses
        if other.failed or not statuses.quiet.acquire(blocking=False):
            continue
        try:
            for status in statuses.waiting_for_me():
                if place is None:
                    place = _place(comm, context, number)
                statuses.say_elsewhere(status, _needs(place, other, status.rank))
                statuses.told_place = here
        except MismatchError as error:
            # An old verdict that comes now is about another wait.
            if statuses.crossed and statuses.told_place == here:
                crossed = MismatchError(str(error))
                crossed.crossed = True
                raise crossed from None
        finally:
            statuses.quiet.release()


def _place(comm, context, number: int) -> Place:
    if context is None:
        return Place(comm, 0, 0, f"the first call on a communicator of {comm.size} ranks")
    begun = context.operation(number)
    kind = begun.kind if begun else "an operation"
    return Place(
        comm, number, context.identity, f"{kind} #{number} on a communicator of {comm.size} ranks"
    )


def _needs(place: Place, other, rank: int) -> str:
    """Say where this rank is, to a rank of another communicator; "" where that is not needed."""
    theirs, ours = other.comm.Get_group(), place.comm.Get_group()
    (found,) = theirs.Translate_ranks([rank], ours)
    theirs.Free()
    ours.Free()
    if found == MPI.UNDEFINED:
        return ""
    return f"{place.identity:x}\x1e{place.number}\x1e{place.words}"


def crossing(context, number: int, status: Status) -> str | None:
    """Return the line that says that the sender of `status` and this rank cannot go on.

    This rank waits in operation `number` of `context`; the other one told where it is.
    """
    if status.state != ELSEWHERE or status.sequence != number:
        return None
    identity, at, words = status.signature.split("\x1e")
    there = [one for one in open_contexts if f"{one.identity:x}" == identity]
    if int(at) and (not there or there[0].sequence >= int(at)):
        return None  # this rank has been there already
    mine = context.operation(number)
    return (
        f"{mine.kind if mine else 'operation'} #{number}: rank {context.rank} waits for rank "
        f"{status.rank}, which waits for it in {words} ({status.host}, {status.site}); all ranks "
        "must make their calls on different communicators in one order"
    )
