"""Answer a pull piece by piece with one version of the parameters, while updates are made.

::

    parameters   | 0 | 1 | 2 | 3 | 4 | 5 |       pieces 0 and 1 are sent, 2 and 3 are on the way
                         an update begins:       4 and 5 are copied, and sent from the copies

Each piece is copied to a buffer just before it is sent, so that an update never waits for a worker.
Before an update, the pieces that are not sent yet are copied, once for all workers that receive
this version.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..link import Link
from ..protocol import PIECE_DOWN
from ..shards import ServerShard
from ..wire.wire_pieces import WirePiece, allowed
from .piece_transfers import PieceSends


class PulledVersion:
    """One version of a server's parameters, in pieces, for the workers that receive it."""

    def __init__(self, link: Link, shard: ServerShard, pieces: Sequence[WirePiece]):
        self.link, self.pieces, self.users = link, pieces, 0
        self._shard = shard
        self._saved: dict[int, np.ndarray] = {}

    def save(self, first: int) -> None:
        """Copy the pieces of the parameters from `first` on, before an update changes them."""
        for number in range(first, len(self.pieces)):
            self._saved[number] = self._copy(number)

    def piece(self, number: int) -> tuple[np.ndarray, bool]:
        """Return the bytes of piece `number`, and whether the caller must give them back.

        The caller gives them back to `link.pool`, which keeps buffers for later messages.
        """
        if number in self._saved:
            return self._saved[number], False
        return self._copy(number), True

    def leave(self) -> None:
        """Record that one more worker has received all pieces of this version of the parameters.

        When no other worker is receiving this version, the copies of its pieces are freed.
        """
        self.users -= 1
        if not self.users:
            for copy in self._saved.values():
                self.link.pool.give(copy)

    def _copy(self, number: int) -> np.ndarray:
        piece, shard = self.pieces[number], self._shard
        memory = self.link.pool.take(piece.nbytes)
        for tensor, start, stop, at in piece.spans:
            values = shard.parameters[shard.key_of(tensor)]
            first = shard.first(tensor)
            room = memory[at : at + (stop - start) * values.dtype.itemsize]
            room.view(values.dtype)[...] = values[start - first : stop - first]
        return memory


class PullStream:
    """The parameters that a worker has asked for, sent in pieces from number `first` on."""

    def __init__(self, version: PulledVersion, rank: int, first: int = 0):
        # `next`: the number of the next piece to send.
        self.version, self._ranks, self.next = version, [rank], first
        version.users += 1
        # The bytes that are not sent yet.
        self.left = sum(piece.nbytes for piece in version.pieces[first:])
        self._sends = PieceSends(version.link, PIECE_DOWN)
        version.link.count_pieces(len(version.pieces) - first, self.left, 0, 0)

    def progress(self) -> bool:
        """Send pieces, at most 4 (`WINDOW`) at a time; return whether all pieces have been sent."""
        self._sends.reap()
        pieces, done = self.version.pieces, self.next - len(self._sends)
        for number in allowed(len(pieces), self.next, done):
            memory, pooled = self.version.piece(number)
            self._sends.send(memory, self._ranks, pooled)
            self.left -= pieces[number].nbytes
            self.next = number + 1
            self.version.link.moved = True
        if self.next < len(pieces) or self._sends:
            return False
        self.version.leave()
        return True


class PullStreams:
    """The requests for parameters of one model that a server is answering in pieces now."""

    def __init__(self, shard: ServerShard, pieces: Sequence[WirePiece]):
        self._shard, self._pieces = shard, pieces
        self._open: list[PullStream] = []
        # The present version, if a pull is being answered with it.
        self._now: PulledVersion | None = None

    def __len__(self) -> int:
        return len(self._open)

    @property
    def left(self) -> int:
        """The number of bytes that are still to be sent for all begun answers."""
        return sum(pull.left for pull in self._open)

    def begin(self, link: Link, rank: int, first: int = 0) -> None:
        """Begin to send the present parameters to a rank, from piece number `first` on."""
        if self._now is None:
            self._now = PulledVersion(link, self._shard, self._pieces)
        self._open.append(PullStream(self._now, rank, first))

    def send_more(self) -> None:
        """Send more pieces of the answers, as far as possible without waiting."""
        if self._open:
            self._open = [pull for pull in self._open if not pull.progress()]
            if not any(pull.version is self._now for pull in self._open):
                self._now = None

    def keep(self) -> None:
        """Copy the pieces of the present parameters that are still to be sent, before an update."""
        nexts = [pull.next for pull in self._open if pull.version is self._now]
        if nexts and self._now is not None:
            self._now.save(min(nexts))
        self._now = None
