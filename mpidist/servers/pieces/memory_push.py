"""A push that stays in the memory of its worker until the server on the same host applies it.

::

    gradients of the worker    | 0 | 1 | 2 | 3 | ...      the worker sends their addresses
                                     |                    the kernel copies, see `cross_memory`
    memory for one piece            | 1 |                 the server updates these parameters

The worker waits in its call until the server has answered, so the gradients do not change. If the
server must answer before it applies the push, it copies the push first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...runtime.node_memory.cross_memory import CrossMemory
from ..layout.routing import WholeShard
from ..link import Link
from ..wire.node_stream import READY
from ..wire.server_stream import PushStream
from ..wire.wire_pieces import WirePiece


class MemoryPush(PushStream):
    """Gradients that stay in the memory of the rank `source`, where the server reads them."""

    by_messages = False

    def __init__(
        self,
        link: Link,
        source: int,
        memory: CrossMemory,
        local_rank: int,
        shard: WholeShard,
        pieces: Sequence[WirePiece],
        addresses: Sequence[int],
    ):
        self.source, self._link, self._pieces = source, link, pieces
        self._memory, self._local_rank, self._nbytes = memory, local_rank, shard.nbytes
        sizes = [shard.layout.tensors[part.piece.tensor].dtype.itemsize for part in shard.parts]
        # From the addresses in the memory of `source` at which the gradient of each part begins.
        self._places = {
            part.piece.tensor: (address - part.piece.start * size, size)
            for part, address, size in zip(shard.parts, addresses, sizes, strict=True)
        }
        # Counters in shared memory of the pieces of new parameters that workers may copy.
        self.readers: list[memoryview] = []
        self._used, self._read = 0, -1  # number of used pieces; the piece in the buffer
        self._buffer: np.ndarray | None = None
        self._kept = False

    def here(self) -> int:
        """Return how many pieces of the gradients can be read now, which is always all of them."""
        return len(self._pieces)

    def piece(self, number: int) -> np.ndarray:
        """Return one piece of the gradients, in memory that is valid until the next `use`."""
        piece = self._pieces[number]
        if self._kept and self._buffer is not None:
            return self._buffer[piece.start : piece.stop]
        if self._buffer is None:
            self._buffer = self._link.pool.take(max(each.nbytes for each in self._pieces))
        if self._read != number:
            self._copy(piece, self._buffer)
            self._read = number
        return self._buffer[: piece.nbytes]

    def use(self) -> None:
        """Count one more piece of gradients as applied; workers may now copy the new parameters."""
        self._used += 1
        for line in self.readers:
            line[READY] += 1
        if self._used == len(self._pieces):
            self._link.pool.give(self._buffer)
            self._buffer = None

    def keep(self) -> None:
        """Copy the push to the server's memory, so that the worker may change its gradients."""
        whole = self._link.pool.take(self._nbytes)
        for piece in self._pieces:
            self._copy(piece, whole[piece.start : piece.stop])
        self._buffer, self._kept = whole, True

    def _copy(self, piece: WirePiece, target: np.ndarray) -> None:
        first = target.__array_interface__["data"][0]
        for tensor, start, stop, at in piece.spans:
            place, size = self._places[tensor]
            nbytes = (stop - start) * size
            self._memory.read(self._local_rank, place + start * size, first + at, nbytes)


def addresses_of(
    memory: CrossMemory, shard: WholeShard, gradients: dict[str, np.ndarray]
) -> np.ndarray | None:
    """Return the addresses at which the gradients for one server begin in this rank's memory.

    Returns None if another process cannot read the gradients, for example because their memory is
    pinned for a GPU.
    """
    found = []
    for (tensor, start, stop), _ in shard.parts:
        gradient = gradients[shard.layout.tensors[tensor].name]
        found.append(gradient.__array_interface__["data"][0] + start * gradient.itemsize)
        if not memory.holds(found[-1], (stop - start) * gradient.itemsize):
            return None
    return np.array(found, np.int64)
