"""The rounds of `run_on_all`: agree, bring bytes to rank 0, bring its answers back.

`Polled` does them on the context of a communicator, in nonblocking collectives whose waits look
for ranks that do something else. `Private` does them on a channel that the caller brings.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import MismatchError, in_one_line
from ..context import of
from .mismatch import Signature

#: Bytes that rank 0 may receive in messages that are filled up to one length, in place of two
#: rounds: the lengths, then the data.
_FILLED_UP = 1 << 20
#: Bytes of the first message of an answer: its length, and as much of it as there is room for.
ROOM = 1024
#: What a rank tells in place of what a message has no room for: no pickle begins so.
_TOO_LONG = b"too long"
#: Characters of an error that are told.
LONGEST = 4000


class Polled:
    """Rounds on the context of a communicator."""

    def __init__(self, comm):
        self.context = of(comm)
        self.rank, self.size = comm.rank, comm.size
        self.longest = 0

    def call(self, doing: str):
        """Return a ``with`` around all rounds: what is raised inside the other ranks hear."""
        return self.context.call(in_one_line(doing, LONGEST))

    def end(self) -> None:
        """Take note that all rounds are over."""
        self.context.under_way = False

    def begin(
        self, doing: str, packed: bytes, cause: BaseException | None, number: int = 0
    ) -> tuple[bool, bool, int]:
        """Agree that all ranks are here; return whether one failed, and whether they differ.

        And the largest `number` of a rank.
        """
        try:
            signature = self._begun(doing, cause)
            digest = _digest(packed)
            failed, self.longest, most, least, largest = self.context.agree(
                signature, cause is not None, len(packed), digest, -digest, number
            )
        except MismatchError as error:
            raise error from cause
        return bool(failed), most != -least, largest

    def _begun(self, doing: str, cause: BaseException | None) -> Signature:
        context = self.context
        if cause is not None and (context.failed or context.closed):
            raise cause  # there is nobody to tell any more
        signature = Signature(in_one_line(doing, LONGEST), "", "")
        context.begin(signature)
        return signature

    def without_agreement(
        self,
        doing: str,
        packed: bytes,
        cause: BaseException | None,
        frame: int,
        answer: Callable[[list[bytes]], list[bytes]],
    ) -> bytes | None:
        """Gather in messages of `frame` bytes, and return what rank 0 answers to all.

        Without an agreement: all ranks are known to come. None where a message is too short for
        what a rank has to tell.
        """
        try:
            key = self._begun(doing, cause).key.to_bytes(8, "little")
            fits = len(packed) <= frame
            self.longest = 8 + max(frame, len(_TOO_LONG))
            everyone = self.gather(key + (packed if fits else _TOO_LONG))
            if any(not data.startswith(key) for data in everyone):
                self.context.disagree()  # a rank was in another operation after all
            told = [data[8:] for data in everyone]
            long = any(data.startswith(_TOO_LONG) for data in told)
            answers = ([_TOO_LONG] if long else answer(told)) if self.rank == 0 else []
            data = self.hand_out(answers, each=False)
        except MismatchError as error:
            raise error from cause
        return None if data == _TOO_LONG else data

    def gather(self, data: bytes) -> list[bytes]:
        """Return everyone's `data` on rank 0."""
        if self.size == 1:
            return [data]
        control, root, size = self.context.control, self.rank == 0, self.size
        if size * self.longest <= _FILLED_UP:
            mine = np.zeros(self.longest, np.uint8)
            mine[: len(data)] = np.frombuffer(data, np.uint8)
            rows = np.empty((size if root else 0, self.longest), np.uint8)
            self._wait(control.Igather(mine, rows if root else None, 0))
            return [row.tobytes() for row in rows]  # pickle stops where its data end
        lengths = np.zeros(size, np.int64)
        number = np.array([len(data)], np.int64)
        self._wait(control.Igather(number, lengths if root else None, 0))
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        everything = np.empty(starts[-1], np.uint8)
        target = [everything, lengths.tolist(), starts[:-1], MPI.BYTE]
        self._wait(control.Igatherv([data, MPI.BYTE], target if root else None, 0))
        if not root:
            return []
        ends = itertools.pairwise(starts)
        return [everything[start:end].tobytes() for start, end in ends]

    def hand_out(self, answers: list[bytes], each: bool, room: int = ROOM) -> bytes:
        """Return this rank's of rank 0's answers; up to `room` bytes of one for all go at once."""
        if self.size == 1:
            return answers[0]
        return self._scatter(answers) if each else self._bcast(answers, room)

    def _bcast(self, answers: list[bytes], room: int) -> bytes:
        control = self.context.control
        head = np.zeros(room, np.uint8)
        room -= 8
        if self.rank == 0:
            head[:8] = np.frombuffer(len(answers[0]).to_bytes(8, "little"), np.uint8)
            first = answers[0][:room]
            head[8 : 8 + len(first)] = np.frombuffer(first, np.uint8)
        self._wait(control.Ibcast(head, 0))
        length = int.from_bytes(head[:8].tobytes(), "little")
        if length <= room:
            return head[8 : 8 + length].tobytes()
        rest = np.empty(length - room, np.uint8)
        if self.rank == 0:
            rest[:] = np.frombuffer(answers[0], np.uint8)[room:]
        self._wait(control.Ibcast(rest, 0))
        return head[8:].tobytes() + rest.tobytes()

    def _scatter(self, answers: list[bytes]) -> bytes:
        control, root = self.context.control, self.rank == 0
        lengths = np.array([len(one) for one in answers], np.int64)
        number = np.zeros(1, np.int64)
        self._wait(control.Iscatter(lengths if root else None, number, 0))
        mine = np.empty(int(number[0]), np.uint8)
        source: Any = None
        if root:
            starts = (np.cumsum(lengths) - lengths).tolist()
            everything = np.frombuffer(b"".join(answers), np.uint8)
            source = [everything, lengths.tolist(), starts, MPI.BYTE]
        self._wait(control.Iscatterv(source, [mine, MPI.BYTE], 0))
        return mine.tobytes()

    def _wait(self, request: MPI.Request) -> None:
        self.context.wait(request.Test)


class Private:
    """Rounds on a channel that the caller has: it brings an object of each rank to all."""

    def __init__(self, comm, exchange: Callable[[Any], list]):
        self.rank, self.size, self.exchange = comm.rank, comm.size, exchange
        self._everyone: list[bytes] = []

    def call(self, doing: str):
        """Return a ``with`` around all rounds: whoever brings the channel looks after it."""
        return contextlib.nullcontext()

    def end(self) -> None:
        """Do nothing: a channel of one's own has no operations."""

    def begin(
        self, doing: str, packed: bytes, cause: BaseException | None, number: int = 0
    ) -> tuple[bool, bool, int]:
        """Tell all ranks what this one found; return whether one failed, and whether they differ.

        `packed` of all is compared. And the largest `number` of a rank.
        """
        try:
            told = self.exchange([cause is not None, _text(packed), number])
        except Exception as error:
            if cause is not None:
                raise cause from error  # nobody else listens any more
            raise
        self._everyone = [_bytes(text) for _, text, _ in told]
        failed, _, numbers = zip(*told, strict=True)
        return any(failed), len(set(self._everyone)) > 1, max(numbers)

    def without_agreement(self, *_) -> None:
        """Return None: on a channel of one's own there is nothing to save."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return everyone's `data`."""
        return self._everyone

    def hand_out(self, answers: list[bytes], each: bool, room: int = 0) -> bytes:
        """Return this rank's of rank 0's answers."""
        said = [_text(one) for one in (answers if each else answers[:1])]
        told = self.exchange(said)[0]
        return _bytes(told[self.rank if each else 0])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()  # an exchange may know JSON only


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
