"""Status messages: while a rank waits, it tells other ranks which operation it is in.

After a moment of waiting, a rank sends its neighbours the number and the description of its
operation, its host, and the line of the user's program. The neighbours of a rank are the ranks at
the distances 1, 2, 4, 8 and so on, before and after it. Ranks in different operations raise an
error in these steps:

    two neighbours are in different operations  the rank that notices asks all ranks (ROLL_CALL)
    all have answered, or a moment is over      that rank sends one error text to all (VERDICT)
    each rank that waits or begins to wait      raises MismatchError with that text

A rank that is only late is never reported as wrong.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import types
from pathlib import Path

from mpi4py import MPI

from ... import events
from ...errors import MismatchError
from .. import polling, ulfm
from ..polling import wait_until
from . import crossed_waits, mismatch
from .mismatch import WAITING, Status, conflict, encode_signature, raised

#: How many signatures a rank remembers. A rank needs old signatures to answer ranks that wait in an
#: earlier operation, and to report its last operations when the job hangs.
HISTORY = 256
_TAG = 1

#: Seconds that ranks have to answer a roll call, so that the error text can name all ranks.
ROLL_CALL_SECONDS = 1.5
#: Seconds that ranks have to answer when received data have shown that the ranks disagree.
_DISAGREE_SECONDS = 2.0


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks ``rank + 1``, ``rank - 1``, ``rank + 2``, ``rank - 2``, ..., each once."""
    steps = [1 << k for k in range(max(size - 1, 1).bit_length())]
    found = dict.fromkeys((rank + sign * step) % size for step in steps for sign in (1, -1))
    found.pop(rank, None)
    return list(found)


class Statuses:
    """The status messages that this rank has sent and received on one communicator.

    A status says in which operation a rank is, and which line of the program has called it.
    `awaited` is the number of the operation for which this rank waits; None means the newest
    operation.
    """

    def __init__(self, context):
        self.context = context
        self.awaited: int | None = None
        self.said = self.heard = 0
        self.quiet = threading.Lock()  # held by the one thread that receives statuses
        self.crossed = False  # whether the verdict names a wait on two communicators
        self.told_place: tuple | None = None  # the waiting place that this rank has sent to others
        self._elsewhere: dict[int, Status] = {}
        self._reached: set[tuple[int, int]] = set()
        self.closing = False  # true at the end: messages are counted, and none is passed on
        self.found = False  # whether this rank composed the error text
        self.neighbours = neighbours(context.rank, context.size)
        self._others = len(self.neighbours)  # distance to the last non-neighbour that got a status
        self._told, self._next = -1, 0.0
        self._known: dict[int, Status] = {}
        self._raised: dict[int, Status] = {}
        self._caller = context.size  # the lowest rank that has asked all ranks
        self._asked: float | None = None  # when this rank asked all ranks
        self._inbox = bytearray(mismatch.STATUS_BYTES)
        self._outbox: list = []
        self._answered: set[int] = set()

    @property
    def current(self) -> int:
        """The number of the operation for whose completion this rank waits."""
        return self.context.sequence if self.awaited is None else self.awaited

    def look_around(self, waited: float) -> None:
        """Tell other ranks in which operation this rank waits, and receive what they tell.

        Does not block. Raises MismatchError if ranks are in different operations.
        """
        if self.context.failed:  # another thread or a nested wait has received the error text
            raise self.context.failed_as(self.context.failed)
        current = self.current
        if self._told != current:
            self._told, self._next, self._others = current, waited + 1.0, 0
            events.emit("waiting", sequence=current, seconds=round(waited, 2))
            self._tell(self._status(WAITING), self.neighbours)
        elif waited >= self._next and not polling.unreachable:
            # While a host cannot be reached (`polling.unreachable`), nothing is sent to new ranks:
            # to connect to them, MPI would wait in Isend, or end the job.
            self._next = waited + 1.0
            self._tell(self._status(WAITING), self._further())
        with self.quiet:
            self.listen()
        self._decide(waited)
        crossed_waits.look(self.context.comm, self.context, current)

    def waiting_for_me(self) -> list[Status]:
        """Return the statuses of ranks that wait in an operation that this rank has not begun."""
        self.listen()
        number = self.context.sequence
        waiting = [s for s in self._known.values() if s.state == WAITING and s.sequence > number]
        return [s for s in waiting if (s.rank, s.sequence) not in self._reached]

    def say_elsewhere(self, status: Status, words: str) -> None:
        """Send `words`, which say where this rank waits, to the sender of `status`.

        Sends nothing if `words` is empty.
        """
        self._reached.add((status.rank, status.sequence))
        if words:
            said = self._status(mismatch.ELSEWHERE, status.sequence)
            self._tell(said._replace(signature=words), [status.rank])

    def disagree(self, sequence: int | None = None) -> None:
        """Raise MismatchError, because received data show that ranks are in different operations.

        `sequence` is the number of the operation of this rank; the default is its newest operation.
        """
        number = self.context.sequence if sequence is None else sequence
        self.awaited, self._told = number, number
        self._call_the_roll()
        start = time.monotonic()

        def answered_or_late() -> bool:
            self.listen()
            current = [s for s in self._known.values() if s.sequence >= number]
            late = time.monotonic() - start > _DISAGREE_SECONDS
            if late:
                events.emit("mismatch", waited=_DISAGREE_SECONDS, heard=sorted(self._known))
            return late or len(current) == self.context.size - 1

        wait_until(answered_or_late)
        self.check_raised()
        statuses = [*self._known.values(), self._status(WAITING)]
        same = [s for s in statuses if s.state != WAITING or s.sequence == number]
        mine = self.context.operation(number)
        here = mine.text() if mine else "it"
        if conflict(same) is None:
            # The others have answered with a later operation, such as a nonblocking one.
            same = self._conflicting()
        self._disagreeing(same, f"operation #{number}: other ranks are not in {here}")

    def known(self, rank: int) -> Status | None:
        """Return the last status that `rank` has sent, or None before its first status."""
        return self._known.get(rank)

    # -- verdicts ------------------------------------------------------------------------

    def fail(self, text: str, state: int = mismatch.VERDICT) -> None:
        """Mark the communicator as failed, send `text` to all ranks, and raise MismatchError."""
        ulfm.expect_death()  # perhaps the ranks differ because a rank has died
        self.found, self.crossed = True, state == mismatch.CROSSED
        self.sentence(text, state)
        error = MismatchError(text)
        error.secondary = state == mismatch.BROKEN
        raise error

    def _disagreeing(self, group: list[Status], otherwise: str) -> None:
        """Raise MismatchError with a text on the statuses in `group`, else the text `otherwise`."""
        secondary = any(s.state == WAITING and raised(s.signature) for s in group)
        text = conflict(group) or otherwise
        self.fail(text, mismatch.BROKEN if secondary else mismatch.VERDICT)

    def sentence(self, text: str, state: int) -> None:
        """Mark the communicator as failed and send `text` to all ranks. Does not raise an error.

        `state` says whether `text` reports a mismatch or the exception of a rank.
        """
        self.context.give_up(text)
        number = self.context.sequence
        self._tell(Status(self.context.rank, state, number, text, "", ""), self.neighbours)
        events.emit("mismatch", message=text)

    def tell_raised(self, number: int) -> None:
        """Tell the neighbours that this rank has raised an exception.

        The exception took the place of operation `number`, which this rank does not begin.
        """
        self._tell(self._status(WAITING, number), self.neighbours)

    def _hear_verdict(self, status: Status) -> None:
        """Pass a received error text on to the neighbours, and raise MismatchError with it."""
        if not self.closing:
            self._tell(status._replace(rank=self.context.rank), self.neighbours)
        self.context.give_up(status.signature)
        self.crossed = status.state == mismatch.CROSSED
        error = MismatchError(status.signature)
        # For BROKEN, another rank has the exception itself, and prints it with its traceback.
        error.secondary = status.state == mismatch.BROKEN
        raise error

    # -- sending and receiving -------------------------------------------------------------

    def _status(self, state: int, number: int | None = None) -> Status:
        """Return this rank's status in operation `number`, by default the awaited operation."""
        number = self.current if number is None else number
        context, text = self.context, self._signature(number)
        return Status(context.rank, state, number, text, context.host, call_site())

    def _signature(self, number: int) -> str:
        """Return the encoded description of operation `number`, or "" if it is no longer stored."""
        signature = self.context.operation(number)
        return encode_signature(signature) if signature is not None else ""

    def _left(self) -> Status:
        return self._status(mismatch.LEFT, self.context.sequence)

    def _tell(self, status: Status, ranks) -> None:
        data = status.pack()
        self._outbox = [pair for pair in self._outbox if not pair[0].Test()]
        for rank in ranks:
            self.said += 1
            request = self.context.control.Isend([data, MPI.BYTE], rank, _TAG)
            self._outbox.append((request, data))

    def _further(self) -> list[int]:
        """Return some ranks that are not neighbours of this rank; the next call returns others."""
        size, rank = self.context.size, self.context.rank
        near, found = set(self.neighbours), list[int]()
        wanted = min(size.bit_length(), size - 1 - len(near))
        while len(found) < wanted:
            self._others = self._others % (size - 1) + 1
            other = (rank + self._others) % size
            if other not in near:
                found.append(other)
        return found

    def _call_the_roll(self) -> None:
        """Ask all ranks for their status, unless a lower rank has asked already."""
        if self.context.rank < self._caller:
            self._caller = self.context.rank
            self._tell(self._status(mismatch.ROLL_CALL), self.neighbours)

    def listen(self) -> None:
        """Receive the statuses of other ranks; raise MismatchError if one reports a mismatch."""
        while self.context.control.Iprobe(MPI.ANY_SOURCE, _TAG):
            self.context.control.Recv([self._inbox, MPI.BYTE], MPI.ANY_SOURCE, _TAG)
            self.heard += 1
            self._take(Status.unpack(self._inbox))

    def _take(self, status: Status) -> None:
        if status.state in (mismatch.VERDICT, mismatch.BROKEN, mismatch.CROSSED):
            self._hear_verdict(status)
        if status.state == mismatch.ELSEWHERE:
            self._elsewhere[status.rank] = status
            return
        self._known[status.rank] = status
        if status.state == WAITING and raised(status.signature):
            self._raised[status.rank] = status
        if status.state == mismatch.ROLL_CALL:
            self._known[status.rank] = status._replace(state=WAITING)
            # If several ranks call the roll, all ranks answer the lowest of them. The lowest rank
            # then knows all statuses, and raises the error.
            if status.rank < self._caller and not self.closing:
                self._caller = status.rank
                self._tell(status, [rank for rank in self.neighbours if rank != status.rank])
                gone = self.context.closed  # then no operation of this rank is under way
                self._tell(self._left() if gone else self._status(WAITING), [status.rank])

    def _decide(self, waited: float) -> None:
        """If statuses conflict, give all ranks time to send statuses, then raise MismatchError."""
        for status in self._elsewhere.values():
            crossing = crossed_waits.crossing(self.context, self.current, status)
            if crossing:
                self.fail(crossing, mismatch.CROSSED)
        found = self._conflicting()
        if not found:
            return
        if self._asked is None:
            if len(self._known) < self.context.size - 1:
                self._call_the_roll()
            self._asked = waited
        # The ranks that have not answered yet get a moment to answer, so that the text names all
        # ranks.
        if len(self._known) < self.context.size - 1 and waited < self._asked + ROLL_CALL_SECONDS:
            return
        self._disagreeing(found, "the ranks disagree")

    def _conflicting(self) -> list[Status]:
        """Return the statuses of an operation on which ranks disagree, or an empty list."""
        here, known = self.current, self._known.values()
        for other in (*self._raised.values(), *known):
            if other.state == mismatch.LEFT:
                if other.sequence < here:
                    same = [s for s in known if s.state == mismatch.LEFT or s.sequence == here]
                    return [*same, self._status(WAITING)]
                continue
            mine = self._signature(other.sequence)
            # If this rank and the other one have both raised an exception in place of the
            # operation, each of them has its own error, and there is no conflict.
            if mine not in ("", other.signature) and not (raised(other.signature) and raised(mine)):
                return self._group(other.sequence)
        return []

    def _group(self, number: int) -> list[Status]:
        """Return the statuses of all ranks that are known to be in operation `number`."""
        told = {**self._known, **{r: s for r, s in self._raised.items() if s.sequence == number}}
        group = [s for s in told.values() if s.sequence == number and s.state != mismatch.LEFT]
        mine = self._status(WAITING, number)
        return [*group, mine if number == self.current else mine._replace(site="")]

    # -- leaving ---------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell the ranks in `neighbours` that this rank will begin no more operations."""
        self._tell(self._left(), self.neighbours)

    def answer(self) -> None:
        """Tell the ranks that wait for this rank that this rank has left the communicator.

        Raises MismatchError if another rank has left the communicator after a different number of
        operations.
        """
        self.listen()
        mine = self.context.sequence
        for other in self._known.values():
            if other.state == mismatch.LEFT and other.sequence != mine:
                few, many = sorted([other, self._left()], key=lambda s: s.sequence)
                self.fail(
                    f"rank {few.rank} left after {few.sequence} operations ({few.host}), "
                    f"rank {many.rank} after {many.sequence} ({many.host}); "
                    "all ranks must make the same calls"
                )
            if other.sequence > mine and other.rank not in self._answered:
                self._answered.add(other.rank)
                self._tell(self._left(), [other.rank])

    def take_the_rest(self) -> None:
        """Receive all status messages that other ranks have sent to this rank so far."""
        self.closing = True
        self.listen()
        self._outbox = [pair for pair in self._outbox if not pair[0].Test()]

    def check_raised(self) -> None:
        """Raise MismatchError if a rank raised an exception instead of beginning an operation.

        Only operations that this rank itself has begun are meant.
        """
        for other in self._raised.values():
            if (mine := self._signature(other.sequence)) and not raised(mine):
                self._disagreeing(self._group(other.sequence), other.signature)


def call_site() -> str:
    """Return the line of the user's program that has called mpidist, such as ``train.py:31``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (
        # contextlib calls the exits of our ``with`` blocks while an exception goes through them.
        events.is_ours(frame.f_code.co_filename) or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
