"""Pieces of a push_pull between ranks of one host, through memory that they share.

::

    gradients of the worker   | 0 | 1 | 2 | 3 | 4 | ...
    ring, in the worker's part    | 4 | 1 | 2 | 3 |       the worker copies, the server reads
    parameters of the server  | 0 | 1 | ...               the server updates, the worker copies

The worker counts the pieces that are in the ring, and the server those that it has updated. No
piece is sent: the server reads gradients in the ring, and the worker copies new parameters from
the memory in which the server updates them. Both also count the pieces that the worker may copy,
and has copied. The server begins the next update only when these are equal, so a worker always
reads parameters of one version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..layout.placement import ServerLayout
from ..link import Link
from ..protocol import Incoming
from .node_share import NodePair, count_shared
from .server_stream import PushStream
from .wire_pieces import WirePiece

#: The places in the line of a worker: how many pieces are in the ring, and how many it has copied.
#: In the line of a server: how many it has updated. It keeps the number to be copied as well.
PUSHED, COPIED = 4, 5
UPDATED, ALLOWED = 4, 5


class NodePushStream(PushStream):
    """The pieces of one push in the ring of a worker, which the server uses like others."""

    by_messages = False

    def __init__(self, source: int, pair: NodePair):
        self.source = source
        self._slots, self._rung, self._answered = pair.slots, pair.rung, pair.answered
        # The worker may have put pieces into the ring already.
        self._base = self._answered[UPDATED]

    def here(self) -> int:
        """Return how many pieces have arrived."""
        return self._rung[PUSHED] - self._base

    def piece(self, number: int) -> np.ndarray:
        """Return the memory of a piece that has arrived; it is valid until `use` releases it."""
        return self._slots[number % len(self._slots)]

    def use(self) -> None:
        """Say that the oldest piece is updated: the worker may read the new parameters."""
        self._answered[ALLOWED] += 1
        self._answered[UPDATED] += 1


class NodeReaders:
    """The workers of this host that may be copying parameters of one model on this server."""

    def __init__(self) -> None:
        self._pairs: dict[int, NodePair] = {}

    def add(self, rank: int, pair: NodePair, pieces: int) -> None:
        """Let a worker copy so many pieces, besides those of its pushes."""
        self._pairs[rank] = pair
        pair.answered[ALLOWED] += pieces

    def have_read(self) -> bool:
        """Whether the workers have copied all that they may, so that it may change."""
        pairs = self._pairs.values()
        return all(pair.rung[COPIED] == pair.answered[ALLOWED] for pair in pairs)


class NodeClientStream:
    """The pieces of one push_pull of this worker with a server of its host.

    Without `gradients`, the stream only copies the parameters, after the answer has arrived.
    """

    def __init__(
        self,
        link: Link,
        layout: ServerLayout,
        pieces: Sequence[WirePiece],
        pair: NodePair,
        out: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray] | None = None,
    ):
        self._link, self._pieces, self._pair = link, pieces, pair
        self._gradients, self._out = gradients, out
        self._names = [tensor.name for tensor in layout.tensors]
        self._begun = self._taken = 0
        self._base = pair.rung[PUSHED]
        nbytes = sum(piece.nbytes for piece in pieces)
        if gradients is not None:
            count_shared(link, nbytes)
            self._fill(0)

    handed = True  # the next server may be asked

    def is_here(self, incoming: Incoming) -> bool:
        """Put more pieces into the ring, and copy answers; return whether all is done."""
        pieces = len(self._pieces)
        if self._gradients is None:
            if not incoming.test():
                return False
            for number in range(pieces):
                self._take(number)
            return True
        while True:
            updated = self._pair.answered[UPDATED] - self._base
            self._fill(updated)
            if self._taken == updated:
                return self._taken == pieces and incoming.test()
            self._take(self._taken)
            self._taken += 1
            self._link.moved = True

    def _fill(self, updated: int) -> None:
        """Copy the gradients that have room into the ring."""
        assert self._gradients is not None
        pair = self._pair
        for number in range(self._begun, min(len(self._pieces), updated + len(pair.slots))):
            slot = pair.slots[number % len(pair.slots)]
            for tensor, start, stop, at in self._pieces[number].spans:
                gradient = self._gradients[self._names[tensor]][start:stop]
                np.copyto(slot[at : at + gradient.nbytes].view(gradient.dtype), gradient)
            self._begun = number + 1
            pair.rung[PUSHED] = self._base + self._begun  # after the data, see `node_share`

    def _take(self, number: int) -> None:
        """Copy one piece of the new parameters."""
        for tensor, start, stop, _ in self._pieces[number].spans:
            first, values = self._pair.parameters[tensor]
            np.copyto(
                self._out[self._names[tensor]][start:stop], values[start - first : stop - first]
            )
        self._pair.rung[COPIED] += 1  # the server may change these now
