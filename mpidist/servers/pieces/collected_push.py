"""A push that arrives in pieces, and is handled as one message when all pieces have arrived.

::

    messages     | header, selections |   | 0 | 1 | 2 | 3 | ...
    one buffer   | header, selections | 0 | 1 | 2 | 3 |          then handled as any other message

If a death interrupts a push, the pieces that have arrived have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..layout import capacity
from ..link import Link
from ..protocol import ALL, PIECE_UP, Incoming
from ..wire.wire_pieces import WirePiece
from .piece_transfers import PieceReceives


class CollectedPush:
    """Gradients whose pieces are arriving, and that are used when all pieces have arrived.

    It has the same attributes and methods as an `Incoming`, which is one message.
    """

    def __init__(
        self,
        link: Link,
        message: Incoming,
        pieces: Sequence[WirePiece],
        nbytes: int,
        has_room: Callable[[int], bool],
        model: str = "",
    ):
        # No piece is received while `has_room(nbytes)` is false.
        self._link, self._pieces, self._has_room, self._model = link, pieces, has_room, model
        self.source, self.buffer, self._first = message.source, message.buffer, message.header.total
        self.header = message.header._replace(push_words=ALL, total=self._first + nbytes)
        self._receives: PieceReceives | None = None

    @property
    def arrives(self) -> bool:
        """Whether the server has memory for the push, and has begun to receive its pieces."""
        return self._receives is not None

    def test(self) -> bool:
        """Whether all pieces have arrived; receives more pieces if possible."""
        if self._receives is None:
            if not self._has_room(self.header.total):
                return False
            message, self.buffer = self.buffer, self._link.pool.take(self.header.total)
            self.buffer[: self._first] = message[: self._first]
            self._link.pool.give(message)
            self._receives = PieceReceives(
                self._link, self.source, PIECE_UP, self._pieces, self._memory, self._model
            )
        self._receives.take()
        self._receives.post(self._receives.here)
        return self._receives.done

    def _memory(self, number: int) -> np.ndarray:
        piece = self._pieces[number]
        return self.buffer[self._first + piece.start : self._first + piece.stop]


class Arrivals(dict):
    """The messages that a server is receiving now, at most one from each worker."""

    @property
    def nbytes(self) -> int:
        """The sum of the bytes of the buffers of all arriving messages."""
        return sum(message.buffer.size for message in self.values())

    def has_room(self, nbytes: int) -> bool:
        """Whether the server may receive the pieces of another push, of `nbytes` bytes, now."""
        # Allowed if all buffers together stay below a limit, or if no other push in pieces is
        # arriving.
        alone = not any(getattr(message, "arrives", False) for message in self.values())
        return alone or self.nbytes + nbytes <= capacity.ROOM_BYTES

    def collect(self, link: Link, worker: int, message: Incoming, model: Any) -> None:
        """Begin to receive the pieces of a push of `worker`, whose first message has arrived."""
        pieces, nbytes = model.due.pieces, model.whole.nbytes
        self[worker] = CollectedPush(link, message, pieces, nbytes, self.has_room, model.name)
