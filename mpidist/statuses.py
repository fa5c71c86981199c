"""Where do the others stand? What the ranks of a communicator tell each other while they wait.

A wait that lasts tells the other ranks the number and signature of its operation, its host and the
caller's line, and listens. Whoever sees two signatures under one number tells all: every rank then
raises the same `MismatchError`. A rank that is merely late is never accused, for its status agrees
once it comes. Nothing here blocks; statuses travel on the context's `control` communicator.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

from mpi4py import MPI

from . import events
from .errors import MismatchError
from .mismatch import LEFT, STATUS_BYTES, VERDICT, WAITING, Status, conflict, encode
from .waiting import wait_until

#: How many signatures a rank remembers, to answer ranks that wait in an earlier operation, and to
#: tell what it did last when the job hangs.
HISTORY = 256
_TAG = 1


class Statuses:
    """The conversation of one context.

    `awaited` is the number of the operation that is being waited for, None for the newest.
    """

    def __init__(self, context):
        self.context = context
        self.awaited: int | None = None
        self._told = -1
        self.said = self.heard = 0
        self._known: dict[int, Status] = {}
        self._inbox = bytearray(STATUS_BYTES)
        self._outbox: list = []
        self._answered: set[int] = set()

    @property
    def current(self) -> int:
        """The operation that is being waited for."""
        return self.context.sequence if self.awaited is None else self.awaited

    def look_around(self, waited: float) -> None:
        """Exchange statuses with the other ranks and raise on a conflict. Local, no blocking."""
        current = self.current
        if self._told != current:
            self._told = current
            events.emit("waiting", sequence=current, seconds=round(waited, 2))
            self._tell(self._status(WAITING))
        self.listen()
        conflicting = self._conflicting()
        if conflicting:
            # Give the ranks that have not spoken yet a moment, so that the message names all.
            if len(self._known) < self.context.size - 1 and waited < 2.5:
                return
            self.fail(conflict(conflicting) or "the ranks disagree")

    def disagree(self) -> None:
        """Raise MismatchError: the data showed that the ranks were in different operations."""
        self.awaited, self._told = None, self.context.sequence
        self._tell(self._status(WAITING))
        waited = 0.0

        def everyone_spoke() -> bool:
            self.listen()
            current = [s for s in self._known.values() if s.sequence >= self.context.sequence]
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
        statuses = [*self._known.values(), self._status(WAITING)]
        same = [s for s in statuses if s.state != WAITING or s.sequence == self.context.sequence]
        mine = self.context.operation(self.context.sequence)
        here = mine.text() if mine else "it"
        text = (
            conflict(same) or f"operation #{self.context.sequence}: other ranks are not in {here}"
        )
        self.fail(text)

    def fail(self, text: str) -> None:
        """Mark the communicator as failed, tell all ranks, raise MismatchError. Local."""
        self.context.failed, self.context.stopped = text, True
        self._tell(Status(self.context.rank, VERDICT, self.context.sequence, text, "", ""))
        events.emit("mismatch", message=text)
        raise MismatchError(text)

    def _status(self, state: int) -> Status:
        number = self.context.sequence if state == LEFT else self.current
        signature = self.context.operation(number)
        text = encode(signature) if signature is not None else ""
        return Status(self.context.rank, state, number, text, self.context.host, call_site())

    def _tell(self, status: Status) -> None:
        data = status.pack()
        self.said += 1
        self._outbox = [pair for pair in self._outbox if not pair[0].Test()]
        for rank in range(self.context.size):
            if rank != self.context.rank:
                request = self.context.control.Isend([data, MPI.BYTE], rank, _TAG)
                self._outbox.append((request, data))

    def listen(self) -> None:
        """Take in what the others have said; raise MismatchError when that is a verdict. Local."""
        while self.context.control.Iprobe(MPI.ANY_SOURCE, _TAG):
            self.context.control.Recv([self._inbox, MPI.BYTE], MPI.ANY_SOURCE, _TAG)
            self.heard += 1
            status = Status.unpack(self._inbox)
            if status.state == VERDICT:
                self.context.failed, self.context.stopped = status.signature, True
                raise MismatchError(status.signature)
            self._known[status.rank] = status

    def _conflicting(self) -> list[Status]:
        """Statuses (mine included) of the first operation number on which ranks disagree."""
        for other in self._known.values():
            if other.state == LEFT:
                if other.sequence < self.current:
                    known = self._known.values()
                    same = [s for s in known if s.state == LEFT or s.sequence == self.current]
                    return [*same, self._status(WAITING)]
                continue
            mine = self.context.operation(other.sequence)
            if mine is not None and encode(mine) != other.signature:
                number = other.sequence
                group = [
                    s for s in self._known.values() if s.sequence == number and s.state != LEFT
                ]
                site = call_site() if number == self.current else ""
                group.append(
                    Status(
                        self.context.rank, WAITING, number, encode(mine), self.context.host, site
                    )
                )
                return group
        return []

    def answer(self) -> None:
        """Tell the ranks that wait for this one, which leaves, that it has left. Local."""
        self.listen()
        for other in self._known.values():
            if other.sequence > self.context.sequence and other.rank not in self._answered:
                self._answered.add(other.rank)
                self._tell(self._status(LEFT))

    def settled(self, said_by_all: int) -> bool:
        """Whether all that was ever said has been sent and heard. Local."""
        self.listen()
        sent = all(request.Test() for request, _ in self._outbox)
        return sent and self.heard == said_by_all - self.said


def call_site() -> str:
    """File and line of the user's code that is inside mpidist now, as ``train.py:31``. Local."""
    package = str(Path(__file__).parent)
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
