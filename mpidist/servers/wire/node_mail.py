"""Small messages of a push_pull between ranks of one host, through memory that they share.

::

    worker   writes header and gradient, then rings:    line[RUNG] += 1
    server   sees the new count, and handles the message like any other message
    server   writes header and parameters, then:        line[ANSWERED] += 1

A line is a cache line with counters; to ring means to increase the counter RUNG. A message in
memory may overtake an earlier message by MPI. So the worker also writes how many messages it has
sent to the server by MPI, and the server first receives these messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from .. import protocol
from ..layout.routing import WholeShard
from ..link import Link
from ..protocol import ALL, write_header
from .bound_push_pull import FLAGS, BoundExchange
from .node_share import NodePair, NodeShare, count_shared

#: Positions in the line of a worker: how often it has rung, for which model, and how many messages
#: it had sent by MPI. The line of a server has the number of answered messages.
RUNG, MODEL, SENT = 0, 1, 2
ANSWERED = 0


class MailExchange(BoundExchange):
    """Exchanges small messages with one server of this host through shared memory."""

    by_messages = False

    def __init__(
        self, rank: int, shard: WholeShard, gradients: Mapping, out: Mapping,
        *, door: NodePair, pair: NodePair,
    ):  # fmt: skip
        assert pair.push is not None
        assert pair.answer is not None
        pair.push.fill(0)
        super().__init__(rank, shard, gradients, out, (pair.push, pair.answer))
        # Counters that announce messages.
        self._rung, self._answered, self._number = door.rung, door.answered, 0

    def post(
        self, link: Link, name: str, model: int, clock: int, samples: int, entered: int, note: tuple
    ) -> None:
        """Write the header of the request, whose gradients are already written, and announce it."""
        self.operation = link.trail.begin(protocol.NAMES[FLAGS], self.rank, name, clock)
        write_header(
            self.push, FLAGS, model, clock, self.push.size, ALL, ALL, samples, 0, entered, 0, 0, 0,
            *note,
        )  # fmt: skip
        count_shared(link, self.push.size)
        line = self._rung
        line[MODEL], line[SENT] = model, link.sent[self.rank]
        self._number = line[RUNG] + 1
        line[RUNG] = self._number  # written after the data, see `node_share`

    def is_here(self, link: Link, status) -> bool:
        """Return whether the answer is here; if so, copy its parameters to the caller's arrays."""
        if self._answered[ANSWERED] != self._number:
            return False
        self.take(self.answer.size, link)
        return True


def exchanges(
    link: Link, ranks: Sequence[int], shards: Sequence[WholeShard], share: NodeShare | None
) -> list[Callable[[Mapping, Mapping], BoundExchange]]:
    """Return for each server a function that makes the object for exchanging messages with it."""
    make: list[Callable] = []
    for rank, shard in zip(ranks, shards, strict=True):
        exchange: Callable = partial(BoundExchange, rank, shard)
        pair = None if share is None else share.pair(link.comm.rank, rank)
        # A rank that became a server later (see the folder `balance`) has no such counters.
        door = None if pair is None else link.doors.pair(link.comm.rank, rank)
        if door is not None and pair is not None:
            exchange = partial(MailExchange, rank, shard, door=door, pair=pair)
        make.append(exchange)
    return make
