"""Close mpidist's state for a communicator: all ranks do this together, or some raise an error.

    rank 0   close ....... all are here | finish handles | count statuses until none is on its way
    rank 1   close .. all are here      |                |
    rank 2   allreduce ... receives "rank 0 left after 7 operations" and raises MismatchError

A status is a message that says in which operation a rank is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import numpy as np
from mpi4py import MPI

from ..errors import MismatchError
from .agreement.mismatch import BALLOT, Signature
from .failure import asked_exit_code
from .polling import wait_until

#: After all ranks have left, nonblocking operations must end within this many seconds.
_FINISH = 5.0

#: A rank that leaves receives the statuses of ranks that continue, for this many seconds.
_HEAR = 3.0

_LEAVING = Signature("leave", "", "")

#: The error text if `Context.chain`, a digest of earlier calls, differs between ranks.
CHAIN_DIFFERS = (
    "the ranks made different calls earlier, and no rank waited for another in these calls; "
    "all ranks must make the same calls, with the same root"
)


class _NotWaited(Exception):
    """Raised when this process exits with an error, to end its wait for other ranks."""


def leave_together(context) -> bool:
    """Wait for the other ranks, and receive the messages that are on their way. Collective.

    Returns false if an operation is still running or a message has not arrived. The caller must
    then free no memory. Raises MismatchError if the ranks have not made the same calls.
    """
    if context.size == 1:
        return True
    # Every new operation begins with the same reduction. If another rank continues and begins an
    # operation, this rank therefore notices it in the reduction.
    key, ballot = _LEAVING.key, np.zeros(BALLOT, np.int64)
    ballot[:2] = key, -key
    request = context.control.Iallreduce(MPI.IN_PLACE, ballot, MPI.MAX)
    statuses = context.statuses
    leave_once = cache(statuses.leave)

    def answer(seconds: float) -> None:
        _give_up(seconds)
        leave_once()
        statuses.answer()

    try:
        wait_until(_progress(context, request.Test), answer, patience=0.2)
        if ballot[0] != key or ballot[1] != -key:
            _others_go_on(statuses)
        return _settle(context)
    except _NotWaited:
        return False
    except MismatchError:
        if context.unconfirmed:
            return False  # this rank has raised its own error and sent it to the other ranks
        raise


def _others_go_on(statuses) -> None:
    """Raise MismatchError: another rank has begun an operation that this rank has not called."""
    statuses.leave()
    end = time.monotonic() + _HEAR
    while time.monotonic() < end:
        statuses.answer()  # a rank that waits composes the error text
        time.sleep(0.01)
    statuses.fail("other ranks go on after this rank left; all ranks must make the same calls")


def _give_up(seconds: float) -> None:
    if seconds > 1.0 and asked_exit_code():
        raise _NotWaited


def _settle(context) -> bool:
    """Finish the operations that are still running and receive all statuses. Collective.

    Returns false if an operation goes on or a message has not arrived.
    """
    statuses, end = context.statuses, time.monotonic() + _FINISH

    def listen(seconds: float) -> None:
        # This rank receives statuses while it waits, because a rank that has failed never takes
        # part in the last reduction of the ranks that leave. (A failed rank may have taken part in
        # their first reduction, if this was matched with the reduction of the call in which the
        # rank failed.)
        _give_up(seconds)
        statuses.listen()

    finished = _progress(context, lambda: not context.handles or time.monotonic() > end)
    wait_until(finished, _give_up)
    while True:
        statuses.take_the_rest()
        unfinished = bool(context.handles) or context.leftovers
        counts = np.array([statuses.said, statuses.heard, unfinished, context.chain], np.int64)
        wait_until(context.control.Iallreduce(MPI.IN_PLACE, counts, MPI.SUM).Test, listen)
        if counts[2]:
            return False
        if counts[0] == counts[1]:
            statuses.check_raised()
            if counts[3] != context.chain * context.size:
                statuses.fail(f"{CHAIN_DIFFERS}; md.free found it")
            return True


def _progress(context, test: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that first continues the operations of all threads, then calls `test`."""

    def look() -> bool:
        for handle in tuple(context.handles):
            handle.test()
        return test()

    return look


def end_after_death(context) -> list:
    """Remove all that `context` (mpidist's state for a communicator) holds, after a rank has died.

    Sends no messages. Returns the objects that own the buffers of the communicator, which the
    caller must keep while MPI may still use the buffers.
    """
    kept = [*context.plans.values(), *context.store.values(), context.pool]
    for each in (context.plans, context.quick, context.store):
        each.clear()
    return kept
