"""The sends and the receives of the pieces of pushes and answers.

::

    receives     | 0 | 1 | 2 | 3 |          the receives of 4 pieces (`WINDOW`) are posted ahead
    sends        | 0 | 1 | 2 | 3 |          a piece is sent from memory that nobody changes during
                                            the send, or from a buffer of the pool, which goes back
                                            to the pool after the send
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ...runtime.elastic_requests import test_one
from ..link import Link
from ..protocol import SUMS, check_piece
from ..wire.wire_pieces import WirePiece, allowed


# After an exception, the `Link` of the rank keeps the objects of this module, because MPI may still
# use their memory.
class PieceReceives:
    """Receives the pieces of one push or one answer from the rank `source`, in their order.

    ``memory(number)`` returns the bytes into which piece `number` is received.
    """

    def __init__(
        self,
        link: Link,
        source: int,
        tag: int,
        pieces: Sequence[WirePiece],
        memory: Callable[[int], np.ndarray],
        model: str = "",
    ):
        # How many pieces have arrived, and how many have begun.
        self.here = self._begun = 0
        self._link, self._source, self._tag = link, source, link.tag + tag
        self._pieces, self._memory = pieces, memory
        self._requests: deque[tuple[MPI.Request, np.ndarray]] = deque()
        self._sums: deque[tuple[MPI.Request, np.ndarray]] = deque()  # of the checksums
        self._status, self._model = MPI.Status(), model

    def post(self, free: int) -> None:
        """Begin to receive the next pieces, so that at most 4 (`WINDOW`) are unused at a time.

        The caller has used the data of the first `free` pieces, so their memory may be overwritten.
        """
        for number in allowed(len(self._pieces), self._begun, free):
            self._link.receiving.add(self)
            memory, comm = self._memory(number), self._link.comm
            if self._link.checksums is not None:
                words = np.empty(8, np.uint8)
                request = comm.Irecv([words, MPI.BYTE], self._source, self._tag + SUMS)
                self._sums.append((request, words))
            request = comm.Irecv([memory, MPI.BYTE], self._source, self._tag)
            self._requests.append((request, memory))
            self._begun = number + 1

    def take(self) -> list[tuple[int, np.ndarray]]:
        """Return the numbers and the memory of the pieces that have arrived since the last call."""
        requests, found = self._requests, []
        while requests and self._is_here(requests[0][0]):
            got = self._status.Get_count(MPI.BYTE)
            check_piece(got, self._pieces[self.here].nbytes, self._source)
            found.append((self.here, memory := requests.popleft()[1]))
            if self._sums:
                where, words = (self._source, self._tag, self._model), self._sums.popleft()[1]
                self._link.checksums.check_piece(memory, words, *where)
            self.here += 1
        if found:
            self._link.moved = True
            if self.done:
                self._link.receiving.discard(self)
        return found

    def _is_here(self, request: MPI.Request) -> bool:
        if self._sums and not test_one(self._sums[0][0], self._status):
            return False
        return test_one(request, self._status)

    @property
    def done(self) -> bool:
        """Whether all pieces have arrived."""
        return self.here == len(self._pieces)


class PieceSends:
    """Sends pieces of pushes, or of answers, with one message tag, and keeps track of the sends."""

    def __init__(self, link: Link, tag: int):
        self.link, self._tag = link, link.tag + tag
        self._sends: deque[tuple[MPI.Request, np.ndarray | None]] = deque()
        self._status = MPI.Status()

    def __len__(self) -> int:
        return len(self._sends)

    def send(self, memory: np.ndarray, ranks: Sequence[int], pooled: bool = False) -> None:
        """Begin to send the bytes in `memory` to each rank in `ranks`."""
        link = self.link
        link.receiving.add(self)
        for k, rank in enumerate(ranks, 1):
            if link.checksums is not None:
                link.checksums.send_sum(memory, rank, self._tag - link.tag)
            request = link.comm.Isend([memory, MPI.BYTE], rank, self._tag)
            # A pooled buffer goes back to the pool after the last send.
            self._sends.append((request, memory if pooled and k == len(ranks) else None))

    def reap(self) -> bool:
        """Give buffers of completed sends back to the pool; return whether no send is left."""
        sends = self._sends
        while sends and test_one(sends[0][0], self._status):
            memory = sends.popleft()[1]
            if memory is not None:
                self.link.pool.give(memory)
        if not sends:
            self.link.receiving.discard(self)
        return not sends
