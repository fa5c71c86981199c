"""The updates and answers of a model that a server has still to carry out, in their order.

::

    due   | update of clock 7, in pieces | answer to 0 | answer to 1 | update of clock 8 | ...

The consistency mode already allows them. An update in pieces ends when its last piece is applied.
All later updates and answers wait for its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..consistency import Action, Answer, Apply, Drop
from ..layout.routing import WholeShard
from ..link import Link
from ..pieces.memory_push import MemoryPush
from ..pieces.piece_transfers import PieceSends
from ..pieces.pull_stream import PullStreams
from ..protocol import PIECE_DOWN, PIECES, STREAM
from ..shards import ServerShard
from .node_share import NodeShare
from .node_stream import NodePushStream, NodeReaders
from .server_stream import PushStream, ShardPieces, StreamedUpdate
from .wire_pieces import WirePiece


# The wait for sent answers is short: workers receive them before they send the pushes of the next
# update. Answers to pulls are copied (`pull_stream`), so no update waits for them.
class DueActions:
    """The updates and answers of one model that a server may carry out, but has not done yet.

    An update may wait for pieces of gradients that have not arrived, or for answers that are being
    sent.
    """

    def __init__(self, shard: ServerShard, piece_bytes: int):
        # The update in pieces that is under way, or that has just ended.
        self.update: StreamedUpdate | None = None
        # The memory that workers of this host share with this server.
        self.share: NodeShare | None = None
        self._shard, self._all = shard, ShardPieces(shard, piece_bytes)
        # If false, no update or answer waits.
        self.in_pieces = len(self.pieces) > 1
        self.pulls = PullStreams(shard, self.pieces)
        self._actions: deque[Action] = deque()
        self._sends: PieceSends | None = None  # made for the first push in pieces
        self._readers = NodeReaders(len(self.pieces))
        self._link: Link | None = None
        self._waiting: dict[int, MemoryPush] = {}  # worker -> its push, until it is answered
        self._reading: set[int] = set()  # ranks that copy before they get their answer

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def pieces(self) -> list[WirePiece]:
        """The pieces in which the server's part of the model is sent."""
        return self._all.pieces

    @property
    def pending(self) -> bool:
        """Whether the server has still to carry out actions, or to send pieces of answers."""
        sending = self._sends is not None and not self._sends.reap()
        return bool(self._actions or self.pulls or sending)

    def receive(self, link: Link, source: int) -> PushStream:
        """Begin to receive gradients in pieces from the rank `source`.

        The worker gets the new parameters of each piece as soon as they are updated.
        """
        self._open(link)
        if self.share is not None and (pair := self.share.pair(source, link.comm.rank)):
            self._readers.add(source, pair, 0, 0)
            return NodePushStream(source, pair)
        return PushStream(link, source, self.pieces)

    def read(
        self, link: Link, worker: int, source: int, shard: WholeShard, addresses: Sequence[int]
    ) -> PushStream:
        """Return gradients that stay in the memory of a worker until they are applied."""
        assert self.share is not None
        assert self.share.cross is not None
        self._open(link)
        memory, local = self.share.cross, self.share.local_rank(source)
        push = MemoryPush(link, source, memory, local, shard, self.pieces, addresses)
        self._waiting[worker] = push
        return push

    def _open(self, link: Link) -> None:
        self._link = link
        if self._sends is None:
            self._sends = PieceSends(link, PIECE_DOWN)

    def send(self, link: Link, rank: int, how: int) -> None:
        """Begin to send all parameters of this server to a worker, or let it copy them.

        `how` is PIECES to send them, or STREAM to let the worker copy them from shared memory.
        """
        if how == PIECES:
            self.pulls.begin(link, rank)
        elif rank in self._reading:
            self._reading.remove(rank)
        elif self.share is not None and (pair := self.share.pair(rank, link.comm.rank)):
            self._link = link
            self._readers.add(rank, pair, len(self.pieces), len(self.pieces))

    def ready(
        self,
        actions: Sequence[Action],
        weighed: Callable[[Apply], tuple[list[tuple[float, Any]], float]],
    ) -> Iterator[Action]:
        """Add `actions` (updates and answers) to the due ones; yield those that can be done now."""
        # `weighed(action)` returns the weight and the gradients of each push, and the update's
        # weight.
        self._actions += actions
        while self._actions:
            action = self._actions[0]
            if isinstance(action, Apply):
                if self.update is None:
                    if self._sends is not None and not self._sends.reap():
                        return
                    if self._link and not self._readers.leave_memory(self._link, self.pulls):
                        return
                    self.pulls.keep()
                streams = any(isinstance(push.parts, PushStream) for _, push in action.pushes)
                if streams and self._sends is not None:
                    if self.update is None:
                        self.update = StreamedUpdate(
                            self._sends, self._shard, self._all, *weighed(action)
                        )
                        self._let_read(action)
                    if not self.update.progress():
                        return
            self._actions.popleft()
            self._settle(action)
            yield action

    def _let_read(self, action: Apply) -> None:
        """Let workers whose answers follow this update copy each piece as soon as it is updated."""
        if self.share is None or self._link is None:
            return
        for answer in islice(self._actions, 1, None):
            if not isinstance(answer, Answer) or answer.item.pieces != STREAM:
                break
            push = self._waiting.get(answer.worker)
            if push is None or all(push is not one.parts for _, one in action.pushes):
                continue
            if (pair := self.share.pair(push.source, self._link.comm.rank)) is not None:
                self._readers.add(push.source, pair, len(self.pieces), 0)
                self._reading.add(push.source)
                push.readers.append(pair.answered)

    def _settle(self, action: Action) -> None:
        """Forget the pushes of an update that lie in the memory of workers."""
        if isinstance(action, Answer):
            # The push is not applied yet, and the worker may change its gradients after the answer.
            if (push := self._waiting.pop(action.worker, None)) is not None:
                push.keep()
        elif isinstance(action, Apply | Drop):
            for worker, one in action.pushes:
                if self._waiting.get(worker) is one.parts:
                    del self._waiting[worker]

    def ended(self) -> StreamedUpdate | None:
        """Return and forget the last update that was made in pieces; None if there is none."""
        update, self.update = self.update, None
        return update
