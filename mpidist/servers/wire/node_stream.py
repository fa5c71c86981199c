"""Pieces of a push_pull between ranks of one host, through memory that they share.

::

    gradients of the worker   | 0 | 1 | 2 | 3 | 4 | ...
    ring, in the worker's part    | 4 | 1 | 2 | 3 |       the worker copies, the server reads
    parameters of the server  | 0 | 1 | ...               the server updates, the worker copies

The server begins the next update when all workers have copied their pieces, so a worker always gets
parameters of one version. If a worker copies no piece for a while, the server stops waiting for it,
and sends a copy of the remaining pieces in messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ..layout.placement import ServerLayout
from ..link import Link
from ..pieces.pull_stream import PullStreams
from ..protocol import Incoming
from .client_stream import ClientStream
from .node_share import NodePair, count_shared
from .server_stream import PushStream
from .wire_pieces import WirePiece

#: The positions of counters in the line of a worker: how many pieces of gradients it has put into
#: the ring, and how many pieces of parameters it has copied.
PUSHED, COPIED = 4, 5
#: The positions in the line of a server. UPDATED: how many pieces of the ring it has used. ALLOWED:
#: how many pieces the worker may copy in all, now or later. READY: how many of these it may copy
#: now. ENDS: the value of ALLOWED when the server stopped waiting for the worker. FIRST: this value
#: times `_MOST`, plus the number of the first piece that the server sends in messages.
FIRST, UPDATED, ALLOWED, READY, ENDS = 3, 4, 5, 6, 7

#: An update waits for a worker until the worker has copied no piece for so many seconds. Tests
#: change this number.
PATIENCE = 0.01

_MOST = 1 << 20  # more than the number of pieces of any server
_lock = threading.Lock()


# When the server stops waiting for a worker, it says so in its line. The worker looks there after
# each piece. If the server has stopped, the piece just copied may be a mixture of two versions, so
# the worker takes it from the message. Both first write their own line, and then read the other's
# line; `fence` keeps this order.
class NodePushStream(PushStream):
    """Gradients that a worker of this host writes into shared memory, in pieces."""

    by_messages = False

    def __init__(self, source: int, pair: NodePair):
        self.source = source
        self._slots, self._rung, self._answered = pair.slots, pair.rung, pair.answered
        # The worker may already have written pieces to the ring.
        self._base = self._answered[UPDATED]

    def here(self) -> int:
        """Return how many pieces of the gradients have arrived."""
        return self._rung[PUSHED] - self._base

    def piece(self, number: int) -> np.ndarray:
        """Return the memory of one piece of the gradients, which is valid until `use` is called."""
        return self._slots[number % len(self._slots)]

    def use(self) -> None:
        """Count one more piece of gradients as applied; the worker may copy the new parameters."""
        self._answered[ALLOWED] += 1
        self._answered[READY] += 1
        self._answered[UPDATED] += 1


class NodeReaders:
    """The workers of this host that may be copying a model's parameters from this server's memory.

    The server must not update the parameters while a worker copies them.
    """

    def __init__(self, pieces: int) -> None:
        self._pieces, self._pairs = pieces, dict[int, NodePair]()
        self._sent = set[int]()  # workers that get the rest of their version in messages
        # How many pieces workers had still to copy at the newest look, and since when.
        self._left, self._since = 0, 0.0

    def add(self, rank: int, pair: NodePair, allowed: int, ready: int) -> None:
        """Let a worker copy `allowed` pieces of the parameters, `ready` of them now.

        It may copy each further piece when the server has updated the piece.
        """
        # The worker has copied the whole previous version, because it makes one call at a time.
        self._pairs[rank] = pair
        self._sent.discard(rank)
        # Each further piece when the server has updated it.
        pair.answered[ALLOWED] += allowed
        pair.answered[READY] += ready

    def leave_memory(self, link: Link, pulls: PullStreams) -> bool:
        """Return whether an update may begin now, because no worker is copying parameters.

        Before the update, the caller must call `PullStreams.keep`.
        """
        left = {
            rank: pair.answered[ALLOWED] - pair.rung[COPIED]
            for rank, pair in self._pairs.items()
            if rank not in self._sent
        }
        if total := sum(left.values()):
            now = time.monotonic()
            if total != self._left:
                self._left, self._since = total, now
            if now - self._since < PATIENCE:
                return False
            # These workers have copied nothing for a while; they get messages.
            for rank in (rank for rank, number in left.items() if number):
                self._end(link, pulls, rank, self._pairs[rank])
        self._left = 0
        return True

    def _end(self, link: Link, pulls: PullStreams, rank: int, pair: NodePair) -> None:
        """Stop waiting for a worker, and send the pieces that it has not copied, if any."""
        line = pair.answered
        line[ENDS] = line[ALLOWED]
        fence()
        # The worker sees `ENDS`, or this rank sees that the worker has copied all, or both.
        first = self._pieces - (line[ALLOWED] - pair.rung[COPIED])
        if first < self._pieces:
            pulls.begin(link, rank, first)
            self._sent.add(rank)
        line[FIRST] = line[ALLOWED] * _MOST + first


def fence() -> None:
    """Make all that this rank has written visible to other ranks before its next reads."""
    # Processors of type x86 delay writes beyond later reads, but not beyond a locked instruction.
    with _lock:
        pass


class NodeClientStream:
    """One push_pull in pieces between this worker and a server of its host."""

    def __init__(
        self,
        link: Link,
        rank: int,
        layout: ServerLayout,
        pieces: Sequence[WirePiece],
        pair: NodePair,
        out: Mapping[str, np.ndarray],
        gradients: Mapping[str, np.ndarray] | None = None,
        sends: ClientStream | None = None,
    ):
        self._link, self._rank, self._layout = link, rank, layout
        self._pieces, self._pair, self._rest = pieces, pair, sends
        # Without `gradients`, the push does not use shared memory.
        self._gradients, self._out = gradients, out
        self._names = [tensor.name for tensor in layout.tensors]
        self._begun = 0
        # The server may have counted pieces for this stream already, so its line is not read here.
        self._pushed, self._copied = pair.rung[PUSHED], pair.rung[COPIED]
        self._goal, self._ended = self._copied + len(pieces), False
        nbytes = sum(piece.nbytes for piece in pieces)
        if gradients is not None:
            count_shared(link, nbytes)
            self._fill(0)

    @property
    def handed(self) -> bool:
        """Whether the worker may send its request to the next server."""
        return self._rest is None or self._rest.handed

    def is_here(self, incoming: Incoming) -> bool:
        """Write gradients to shared memory, and copy parameters; return whether all is done."""
        if self._rest is not None:  # pieces that are sent in messages
            if not self._rest.progress():
                return False
            self._rest = None
        rung, answered = self._pair.rung, self._pair.answered
        while not self._ended and rung[COPIED] < self._goal:
            if self._gradients is not None:
                self._fill(answered[UPDATED] - self._pushed)
            if rung[COPIED] == answered[READY]:
                return False
            self._take(rung[COPIED] - self._copied)
            self._link.moved = True
        if self._ended and answered[FIRST] // _MOST == self._goal:
            self._ended = False
            pieces = self._pieces[answered[FIRST] % _MOST :]
            rung[COPIED] = self._goal
            self._rest = ClientStream(
                self._link, self._rank, self._layout, pieces, None, self._out, False
            )
        return not self._ended and self._rest is None and incoming.test()

    def _fill(self, updated: int) -> None:
        """Copy gradients to the ring, as far as it has room."""
        assert self._gradients is not None
        pair = self._pair
        for number in range(self._begun, min(len(self._pieces), updated + len(pair.slots))):
            slot = pair.slots[number % len(pair.slots)]
            for tensor, start, stop, at in self._pieces[number].spans:
                gradient = self._gradients[self._names[tensor]][start:stop]
                np.copyto(slot[at : at + gradient.nbytes].view(gradient.dtype), gradient)
            self._begun = number + 1
            # Written after the data, see `node_share`.
            pair.rung[PUSHED] = self._pushed + self._begun

    def _take(self, number: int) -> None:
        """Copy one piece of the new parameters, unless the server has stopped waiting for this."""
        for tensor, start, stop, _ in self._pieces[number].spans:
            first, values = self._pair.parameters[tensor]
            np.copyto(
                self._out[self._names[tensor]][start:stop], values[start - first : stop - first]
            )
        rung, answered = self._pair.rung, self._pair.answered
        # An update that began meanwhile may have changed what was copied.
        self._ended = answered[ENDS] == self._goal  # read after the data
        if not self._ended:
            rung[COPIED] += 1  # the server may change these parameters now
            if rung[COPIED] == self._goal:
                fence()
                self._ended = answered[ENDS] == self._goal
