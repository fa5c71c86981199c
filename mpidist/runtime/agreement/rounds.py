"""The messages of `run_on_all`: compare the calls, send results to rank 0, receive its answers."""

from __future__ import annotations

import base64
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import MismatchError, in_one_line
from ..context import of
from .mismatch import Signature, digest_number

#: If rank 0 receives at most this many bytes in a gather, all ranks pad their messages to the same
#: length, and one round of messages suffices. If rank 0 receives more bytes, the ranks send the
#: lengths in a first round and the data in a second one.
_PADDED = 1 << 20
#: Bytes of the first message of an answer, which contains the length of the answer, and as many of
#: its bytes as fit.
ROOM = 1024
#: A rank sends this text in place of data that do not fit in the message. No pickle begins with
#: these bytes.
_TOO_LONG = b"too long"
#: The text of an error is cut to this many characters before a rank sends it.
LONGEST = 4000

#: A function that rank 0 calls with the messages of all ranks; it returns an answer for each rank.
_Answer = Callable[[list[bytes]], list[bytes]]


class Polled:
    """The communication steps of `run_on_all`, in nonblocking collectives on a communicator."""

    def __init__(self, comm):
        self.context = of(comm)
        self.rank, self.size = comm.rank, comm.size
        self.longest = 0

    def call(self, doing: str):
        """Return a context manager that sends this rank's exceptions to the other ranks."""
        return self.context.call(in_one_line(doing, LONGEST))

    def end(self) -> None:
        """Record that all communication steps of this operation are done."""
        self.context.under_way = False

    def begin(
        self, doing: str, packed: bytes, cause: BaseException | None, number: int = 0
    ) -> tuple[bool, bool, int]:
        """Make sure that all ranks are in the same call of `run_on_all`.

        `doing` is the name of the work for error texts. `cause` is the exception with which this
        rank has failed, or None. `number` is an integer >= 0. Returns three values: whether a rank
        failed, whether `packed` (this rank's pickled result) differs between ranks, and the largest
        of the integers `number` that the ranks have passed.
        """
        try:
            signature = self._begun(doing, cause)
            digest = digest_number(packed)
            failed, self.longest, most, least, largest = self.context.agree(
                signature, cause is not None, len(packed), digest, -digest, number
            )
        except MismatchError as error:
            raise error from cause
        return bool(failed), most != -least, largest

    def _begun(self, doing: str, cause: BaseException | None) -> Signature:
        if cause is not None and (self.context.failed or self.context.closed):
            raise cause  # the broken communicator cannot send it to the other ranks
        signature = Signature(in_one_line(doing, LONGEST), "", "")
        self.context.begin(signature)
        return signature

    def without_agreement(
        self, doing: str, packed: bytes, cause: BaseException | None, frame: int, answer: _Answer
    ) -> bytes | None:
        """Gather messages of `frame` bytes on rank 0, and return rank 0's answer on all ranks.

        Each message has `packed`, the pickled result of a rank. ``answer(packed of all ranks)``
        returns rank 0's answer. Returns None if `packed` of any rank is longer than `frame` bytes.
        """
        try:
            key = self._begun(doing, cause).key.to_bytes(8, "little")
            self.longest = 8 + max(frame, len(_TOO_LONG))
            everyone = self.gather(key + (packed if len(packed) <= frame else _TOO_LONG))
            if any(not data.startswith(key) for data in everyone):
                self.context.disagree()  # a rank is in another operation
            told = [data[8:] for data in everyone]
            long = any(data.startswith(_TOO_LONG) for data in told)
            answers = ([_TOO_LONG] if long else answer(told)) if self.rank == 0 else []
            data = self.hand_out(answers, each=False)
        except MismatchError as error:
            raise error from cause
        return None if data == _TOO_LONG else data

    def gather(self, data: bytes) -> list[bytes]:
        """Return, on rank 0, a list of the `data` of all ranks."""
        if self.size == 1:
            return [data]
        control, root, size = self.context.control, self.rank == 0, self.size
        if size * self.longest <= _PADDED:
            rows = np.empty((size if root else 0, self.longest), np.uint8)
            mine = [data.ljust(self.longest, b"\0"), MPI.BYTE]
            self._wait(control.Igather(mine, [rows, MPI.BYTE] if root else None, 0))
            return [row.tobytes() for row in rows]  # pickle ignores the padding
        lengths = np.zeros(size, np.int64)
        number = np.array([len(data)], np.int64)
        self._wait(control.Igather(number, lengths if root else None, 0))
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        everything = np.empty(starts[-1], np.uint8)
        target = [everything, lengths.tolist(), starts[:-1], MPI.BYTE]
        self._wait(control.Igatherv([data, MPI.BYTE], target if root else None, 0))
        ends = itertools.pairwise(starts if root else [])
        return [everything[start:end].tobytes() for start, end in ends]

    def hand_out(self, answers: list[bytes], each: bool, room: int = ROOM) -> bytes:
        """Send rank 0's `answers` to the ranks; return the answer for this rank.

        If `each` is true, `answers` has one answer for each rank, otherwise one for all ranks.
        """
        if self.size == 1:
            return answers[0]
        return self._scatter(answers) if each else self._bcast(answers, room)

    def _bcast(self, answers: list[bytes], room: int) -> bytes:
        head, root = bytearray(room), self.rank == 0
        room -= 8
        if root:
            first = len(answers[0]).to_bytes(8, "little") + answers[0][:room]
            head[: len(first)] = first
        self._wait(self.context.control.Ibcast([head, MPI.BYTE], 0))
        length = int.from_bytes(head[:8], "little")
        if length <= room:
            return bytes(head[8 : 8 + length])
        rest = bytearray(answers[0][room:] if root else length - room)
        self._wait(self.context.control.Ibcast([rest, MPI.BYTE], 0))
        return bytes(head[8:] + rest)

    def _scatter(self, answers: list[bytes]) -> bytes:
        control, root = self.context.control, self.rank == 0
        lengths = np.array([len(one) for one in answers], np.int64)
        number = np.zeros(1, np.int64)
        self._wait(control.Iscatter(lengths if root else None, number, 0))
        mine = bytearray(int(number[0]))
        starts = (np.cumsum(lengths) - lengths).tolist()
        source: Any = [b"".join(answers), lengths.tolist(), starts, MPI.BYTE]
        self._wait(control.Iscatterv(source if root else None, [mine, MPI.BYTE], 0))
        return bytes(mine)

    def _wait(self, request: MPI.Request) -> None:
        self.context.wait(request.Test)


class Private:
    """The communication steps of `run_on_all` for callers that pass a function `exchange`.

    All data are sent by `exchange`.
    """

    def __init__(self, comm, exchange: Callable[[Any], list]):
        self.rank, self.size, self.exchange = comm.rank, comm.size, exchange
        self._everyone: list[bytes] = []

    def call(self, doing: str):
        """Return a context manager that does nothing, because the caller handles exceptions."""
        return contextlib.nullcontext()

    def end(self) -> None:
        """Do nothing: only `Polled` must record the end of the operation."""

    def begin(
        self, doing: str, packed: bytes, cause: BaseException | None, number: int = 0
    ) -> tuple[bool, bool, int]:
        """Send each rank's result to all ranks; see `Polled.begin` for parameters and returns."""
        try:
            told = self.exchange([cause is not None, _text(packed), number])
        except Exception as error:
            if cause is not None:
                raise cause from error  # the broken channel cannot send it to the other ranks
            raise
        failed, texts, numbers = zip(*told, strict=True)
        self._everyone = [base64.b64decode(text) for text in texts]
        return any(failed), len(set(texts)) > 1, max(numbers)

    def without_agreement(self, *_) -> None:
        """Return None, which makes `run_on_all` call `begin`."""

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks, which `begin` has already received."""
        return self._everyone

    def hand_out(self, answers: list[bytes], each: bool, room: int = 0) -> bytes:
        """Send rank 0's `answers` to the ranks; return the answer for this rank."""
        said = [_text(one) for one in (answers if each else answers[:1])]
        return base64.b64decode(self.exchange(said)[0][self.rank if each else 0])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()  # the channel may be able to send JSON only
