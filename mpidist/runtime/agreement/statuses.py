"""Where do the others stand? What the ranks of a communicator tell each other while they wait.

A wait that lasts tells its neighbours the number and signature of its operation, its host and the
caller's line, and listens. The neighbours of a rank are those 1, 2, 4, 8, ... places before and
after it, so that each of p ranks tells some 2 log2 p others and a word that all pass on once
reaches everyone, also past ranks that do not listen just now:

    two neighbours in different operations    whoever sees it asks all where they are (ROLL_CALL)
    all have answered, or a moment is over    one line is composed and told to all (VERDICT)
    every rank that waits, or comes to wait   raises that line as MismatchError

Ranks in two operations cannot all be neighbours of their own kind only, so somebody sees it. A rank
that is merely late is never accused: its status, once it comes, agrees. A wait that goes on
tells log2 p further ranks every second, whoever they are: one of them may be the one that left.
Nothing here blocks; statuses travel on the context's `control` communicator.
"""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path

from mpi4py import MPI

from ... import events
from ...errors import MismatchError
from ..polling import wait_until
from . import crossed_waits
from .mismatch import (
    BROKEN,
    CROSSED,
    ELSEWHERE,
    LEFT,
    ROLL_CALL,
    STATUS_BYTES,
    VERDICT,
    WAITING,
    Status,
    conflict,
    encode_signature,
    raised,
)

#: How many signatures a rank remembers, to answer ranks that wait in an earlier operation, and to
#: tell what it did last when the job hangs.
HISTORY = 256
_TAG = 1

#: Seconds that ranks have to answer a roll call, for the line that names them all.
ROLL_CALL_SECONDS = 1.5


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks 1, 2, 4, ... places after and before `rank`, each once. Pure."""
    steps = [1 << k for k in range(max(size - 1, 1).bit_length())]
    found = dict.fromkeys((rank + sign * step) % size for step in steps for sign in (1, -1))
    found.pop(rank, None)
    return list(found)


class Statuses:
    """The conversation of one context.

    `awaited` is the number of the operation that is being waited for, None for the newest.
    """

    def __init__(self, context):
        self.context = context
        self.awaited: int | None = None
        self.said = self.heard = 0
        self.quiet = threading.Lock()  # held by who listens: a message has one taker
        self.crossed = False  # the verdict was that ranks wait for each other elsewhere
        self.told_place: tuple | None = None  # where this rank said that it waits meanwhile
        self._elsewhere: dict[int, Status] = {}
        self._reached: set[tuple[int, int]] = set()
        self.closing = False  # at the end messages are counted: nothing is passed on any more
        self.found = False  # this rank composed the verdict
        self.neighbours = neighbours(context.rank, context.size)
        self._others = len(self.neighbours)  # the distance up to which further ranks were told
        self._told, self._next = -1, 0.0
        self._known: dict[int, Status] = {}
        self._raised: dict[int, Status] = {}
        self._caller = context.size  # the lowest rank that has called the roll
        self._asked: float | None = None  # when this rank called the roll
        self._inbox = bytearray(STATUS_BYTES)
        self._outbox: list = []
        self._answered: set[int] = set()

    @property
    def current(self) -> int:
        """The operation that is being waited for."""
        return self.context.sequence if self.awaited is None else self.awaited

    def look_around(self, waited: float) -> None:
        """Exchange statuses with other ranks and raise on a conflict. Does not block."""
        if self.context.failed:  # another thread heard of it, or a wait within this one
            raise MismatchError(self.context.failed)
        current = self.current
        if self._told != current:
            self._told, self._next = current, waited + 1.0
            self._others = 0
            events.emit("waiting", sequence=current, seconds=round(waited, 2))
            self._tell(self._status(WAITING), self.neighbours)
        elif waited >= self._next:
            self._next = waited + 1.0
            self._tell(self._status(WAITING), self._further())
        with self.quiet:
            self.listen()
        self._decide(waited)
        crossed_waits.look(self.context.comm, self.context, current)

    def waiting_for_me(self) -> list[Status]:
        """Return the statuses of ranks that wait in an operation this one has not begun."""
        self.listen()
        number = self.context.sequence
        return [
            status
            for status in self._known.values()
            if status.state == WAITING
            and status.sequence > number
            and (status.rank, status.sequence) not in self._reached
        ]

    def say_elsewhere(self, status: Status, words: str) -> None:
        """Tell the sender of `status` where this rank waits; nothing for no words."""
        self._reached.add((status.rank, status.sequence))
        if words:
            rank, host = self.context.rank, self.context.host
            said = Status(rank, ELSEWHERE, status.sequence, words, host, call_site())
            self._tell(said, [status.rank])

    def disagree(self, sequence: int | None = None) -> None:
        """Raise MismatchError: the data showed that the ranks were in different operations.

        `sequence` is this rank's number of the operation, by default of its newest one.
        """
        number = self.context.sequence if sequence is None else sequence
        self.awaited, self._told = number, number
        self._call_the_roll()
        waited = 0.0

        def everyone_spoke() -> bool:
            self.listen()
            current = [s for s in self._known.values() if s.sequence >= number]
            return len(current) == self.context.size - 1

        def give_up(seconds: float) -> None:
            nonlocal waited
            waited = seconds
            if seconds > 2.0:
                raise TimeoutError

        try:
            wait_until(everyone_spoke, give_up)
        except TimeoutError:
            events.emit("mismatch", waited=waited, heard=sorted(self._known))
        self.check_raised()
        statuses = [*self._known.values(), self._status(WAITING)]
        same = [s for s in statuses if s.state != WAITING or s.sequence == number]
        mine = self.context.operation(number)
        here = mine.text() if mine else "it"
        self._disagreeing(same, f"operation #{number}: other ranks are not in {here}")

    def known(self, rank: int) -> Status | None:
        """Return the last status of `rank`; None before its first."""
        return self._known.get(rank)

    # -- verdicts ------------------------------------------------------------------------

    def fail(self, text: str, secondary: bool = False) -> None:
        """Mark the communicator as failed, tell all ranks, raise MismatchError.

        `secondary`: another rank has raised, and knows why.
        """
        self.found = True
        self.sentence(text, BROKEN if secondary else VERDICT)
        error = MismatchError(text)
        error.secondary = secondary
        raise error

    def _disagreeing(self, group: list[Status], otherwise: str) -> None:
        """Raise the line that names the ranks of a conflict."""
        secondary = any(s.state == WAITING and raised(s.signature) for s in group)
        self.fail(conflict(group) or otherwise, secondary)

    def sentence(self, text: str, state: int) -> None:
        """Mark the communicator as failed and tell all ranks. Raises nothing."""
        self.context.give_up(text)
        number = self.context.sequence
        self._tell(Status(self.context.rank, state, number, text, "", ""), self.neighbours)
        events.emit("mismatch", message=text)

    def tell_raised(self, number: int) -> None:
        """Tell the neighbours that this rank raised in place of operation `number`."""
        signature = self.context.operation(number)
        status = Status(
            self.context.rank,
            WAITING,
            number,
            encode_signature(signature),
            self.context.host,
            call_site(),
        )
        self._tell(status, self.neighbours)

    def _hear_verdict(self, status: Status) -> None:
        """Pass a verdict on and raise it."""
        if not self.closing:
            self._tell(status._replace(rank=self.context.rank), self.neighbours)
        self.context.give_up(status.signature)
        self.crossed = status.state == CROSSED
        error = MismatchError(status.signature)
        # Another rank has the exception itself, with its traceback.
        error.secondary = status.state == BROKEN
        raise error

    # -- telling and listening -------------------------------------------------------------

    def _status(self, state: int) -> Status:
        number = self.context.sequence if state == LEFT else self.current
        signature = self.context.operation(number)
        text = encode_signature(signature) if signature is not None else ""
        return Status(self.context.rank, state, number, text, self.context.host, call_site())

    def _tell(self, status: Status, ranks) -> None:
        data = status.pack()
        self._outbox = [pair for pair in self._outbox if not pair[0].Test()]
        for rank in ranks:
            self.said += 1
            request = self.context.control.Isend([data, MPI.BYTE], rank, _TAG)
            self._outbox.append((request, data))

    def _further(self) -> list[int]:
        """Return the next log2 p ranks that are no neighbours, going round."""
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
        """Ask all ranks where they are; they answer to this one, unless a lower one asks too."""
        if self.context.rank < self._caller:
            self._caller = self.context.rank
            self._tell(self._status(ROLL_CALL), self.neighbours)

    def listen(self) -> None:
        """Receive the statuses of other ranks; raise MismatchError if one reports a mismatch."""
        while self.context.control.Iprobe(MPI.ANY_SOURCE, _TAG):
            self.context.control.Recv([self._inbox, MPI.BYTE], MPI.ANY_SOURCE, _TAG)
            self.heard += 1
            self._take(Status.unpack(self._inbox))

    def _take(self, status: Status) -> None:
        if status.state in (VERDICT, BROKEN, CROSSED):
            self._hear_verdict(status)
        if status.state == ELSEWHERE:
            self._elsewhere[status.rank] = status
            return
        self._known[status.rank] = status
        if status.state == WAITING and raised(status.signature):
            self._raised[status.rank] = status
        if status.state == ROLL_CALL:
            self._known[status.rank] = status._replace(state=WAITING)
            # Of several that ask the lowest is told, and speaks first, for it knows them all.
            if status.rank < self._caller and not self.closing:
                self._caller = status.rank
                others = [rank for rank in self.neighbours if rank != status.rank]
                self._tell(status, others)
                self._tell(self._status(WAITING), [status.rank])

    def _decide(self, waited: float) -> None:
        """Raise when what was heard is a conflict and all have spoken, or had the time to."""
        for status in self._elsewhere.values():
            crossing = crossed_waits.crossing(self.context, self.current, status)
            if crossing:
                self.found = self.crossed = True
                self.sentence(crossing, CROSSED)
                raise MismatchError(crossing)
        found = self._conflicting()
        if not found:
            return
        if self._asked is None:
            if len(self._known) < self.context.size - 1:
                self._call_the_roll()
            self._asked = waited
        # Give the ranks that have not spoken yet a moment, so that the message names all.
        if len(self._known) < self.context.size - 1 and waited < self._asked + ROLL_CALL_SECONDS:
            return
        self._disagreeing(found, "the ranks disagree")

    def _conflicting(self) -> list[Status]:
        """Statuses (mine included) of the first operation number on which ranks disagree."""
        for other in (*self._raised.values(), *self._known.values()):
            if other.state == LEFT:
                if other.sequence < self.current:
                    known = self._known.values()
                    same = [s for s in known if s.state == LEFT or s.sequence == self.current]
                    return [*same, self._status(WAITING)]
                continue
            mine = self.context.operation(other.sequence)
            if mine is None or encode_signature(mine) == other.signature:
                continue
            if raised(other.signature) and raised(encode_signature(mine)):
                continue  # both were told at once what is wrong
            return self._group(other.sequence, encode_signature(mine))
        return []

    def _group(self, number: int, mine: str) -> list[Status]:
        told = {**self._known, **{r: s for r, s in self._raised.items() if s.sequence == number}}
        group = [s for s in told.values() if s.sequence == number and s.state != LEFT]
        site = call_site() if number == self.current else ""
        group.append(Status(self.context.rank, WAITING, number, mine, self.context.host, site))
        return group

    # -- leaving ---------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell the neighbours that this rank has left, and after how many operations."""
        self._tell(self._status(LEFT), self.neighbours)

    def answer(self) -> None:
        """Tell the ranks that wait for this one, which leaves, that it has left.

        Raises MismatchError where another rank left after a different number of operations: one
        that nobody waited for, such as a broadcast that only some of the ranks made.
        """
        self.listen()
        mine = self.context.sequence
        for other in self._known.values():
            if other.state == LEFT and other.sequence != mine:
                few, many = sorted([other, self._status(LEFT)], key=lambda s: s.sequence)
                self.fail(
                    f"rank {few.rank} left after {few.sequence} operations ({few.host}), "
                    f"rank {many.rank} after {many.sequence} ({many.host}); "
                    "all ranks must make the same calls"
                )
            if other.sequence > mine and other.rank not in self._answered:
                self._answered.add(other.rank)
                self._tell(self._status(LEFT), [other.rank])

    def take_the_rest(self) -> None:
        """Receive statuses still under way, and free those that were sent. See `settle`."""
        self.closing = True
        self.listen()
        self._outbox = [pair for pair in self._outbox if not pair[0].Test()]

    def check_raised(self) -> None:
        """Raise MismatchError where a rank raised in place of an operation of this one."""
        for other in self._raised.values():
            mine = self.context.operation(other.sequence)
            if mine is not None and not raised(encode_signature(mine)):
                self._disagreeing(
                    self._group(other.sequence, encode_signature(mine)), other.signature
                )


def call_site() -> str:
    """File and line of the user's code that is inside mpidist now, as ``train.py:31``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and events.is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
