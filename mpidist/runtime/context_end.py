"""The end of a communicator's context: all ranks leave together, or some hear that they did not.

    rank 0   close ....... all are here | finish handles | count statuses until none is on its way
    rank 1   close .. all are here      |                |
    rank 2   allreduce ... hears "rank 0 left after 7 operations" and raises MismatchError

Ranks that leave after different numbers of operations raise too: an operation that nobody waited
for was not made by all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from ..errors import MismatchError
from .agreement.mismatch import BALLOT, Signature
from .failure import asked_exit_code
from .polling import wait_until

#: Seconds that nonblocking operations have to end in when all ranks have left.
_FINISH = 5.0

#: Seconds to hear from ranks that go on.
_HEAR = 3.0

_LEAVING = Signature("leave", "", "")

#: What is known where ranks remember different operations: `Context.chain`.
CHAIN_DIFFERS = (
    "the ranks made different calls earlier, in which none of them waited for another; "
    "all ranks must make the same calls, with the same root"
)


class _NotWaited(Exception):
    """A process that leaves with an error does not wait for those that go on."""


def leave_together(context) -> bool:
    """Wait for the other ranks, and take in what is on its way. Collective.

    Returns false where something is left under way, so that nothing may be freed. Raises
    MismatchError where the ranks have not made the same calls.
    """
    if context.size == 1:
        return True
    # A vote like that before an operation: ranks that still begin one meet these in it.
    key, ballot = _LEAVING.key, np.zeros(BALLOT, np.int64)
    ballot[:2] = key, -key
    request = context.control.Iallreduce(MPI.IN_PLACE, ballot, MPI.MAX)
    statuses, told = context.statuses, False

    def answer(seconds: float) -> None:
        nonlocal told
        _give_up(seconds)
        if not told:
            told = True
            statuses.leave()
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
            return False  # this rank raised, which it knows, and the others have heard of it
        raise


def _others_go_on(statuses) -> None:
    """Raise MismatchError: another rank has begun an operation that this one has not made."""
    statuses.leave()
    end = time.monotonic() + _HEAR
    while time.monotonic() < end:
        statuses.answer()  # who waits composes the line
        time.sleep(0.01)
    statuses.fail("other ranks go on after this one has left; all ranks must make the same calls")


def _give_up(seconds: float) -> None:
    if seconds > 1.0 and asked_exit_code():
        raise _NotWaited


def _settle(context) -> bool:
    """Finish what is under way and take in all statuses. Collective.

    All ranks are here: nobody begins anything any more. A status that was left behind would reach
    whoever gets a new communicator with the number of the one that is freed.
    """
    statuses, end = context.statuses, time.monotonic() + _FINISH

    def listen(seconds: float) -> None:
        # A rank that failed has not come here, even if a call that it broke off met the barrier.
        _give_up(seconds)
        statuses.listen()

    finished = _progress(context, lambda: not context.handles or time.monotonic() > end)
    wait_until(finished, _give_up)
    while True:
        statuses.take_the_rest()
        unfinished = bool(context.handles) or context.leftovers
        facts = [statuses.said, statuses.heard, unfinished, context.chain]
        counts = np.array(facts, np.int64)
        wait_until(context.control.Iallreduce(MPI.IN_PLACE, counts, MPI.SUM).Test, listen)
        if counts[2]:
            return False
        if counts[0] == counts[1]:
            statuses.check_raised()
            if counts[3] != context.chain * context.size:
                statuses.fail(f"{CHAIN_DIFFERS}; md.free found it")
            return True


def _progress(context, test: Callable[[], bool]) -> Callable[[], bool]:
    """Return a test that makes progress for all operations of the context, of any thread."""

    def look() -> bool:
        for handle in tuple(context.handles):
            handle.test()
        return test()

    return look
