"""Actions that a model's gate has allowed, but that must wait until pieces have arrived.

    due   | update of clock 7, in pieces | answer to 0 | answer to 1 | update of clock 8 | ...

An update in pieces takes a while, and all later actions wait for its end. An update also waits
until MPI has sent the answers that it sends directly from the memory of the parameters. This wait
is short: the workers have received these answers before they send the pushes of the next update.
Answers to pulls are copied instead (`pull_stream`), so no update waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..consistency import Action, Apply
from ..link import Link
from ..pieces.piece_transfers import PieceSends
from ..pieces.pull_stream import PullStreams
from ..protocol import PIECE_DOWN, PIECES
from ..shards import ServerShard
from .node_share import NodeShare
from .node_stream import NodePushStream, NodeReaders
from .server_stream import PushStream, ShardPieces, StreamedUpdate
from .wire_pieces import WirePiece


class DueActions:
    """The actions of one model that are due, in their order, and its pushes and pulls in pieces.

    Attributes
    ----------
    in_pieces : bool
        Whether pushes or answers may travel in pieces; else no action waits.
    update : StreamedUpdate or None
        The update in pieces that is under way, or that has just ended.
    pulls : PullStreams
        The pulls that are being answered in pieces.
    share : NodeShare or None
        The memory that workers of this host share with this server.
    """

    def __init__(self, shard: ServerShard, piece_bytes: int):
        self.update: StreamedUpdate | None = None
        self.share: NodeShare | None = None
        self._shard, self._all = shard, ShardPieces(shard, piece_bytes)
        self.in_pieces = len(self.pieces) > 1
        self.pulls = PullStreams(shard, self.pieces)
        self._actions: deque[Action] = deque()
        self._sends: PieceSends | None = None  # made for the first push in pieces
        self._readers = NodeReaders()

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def pieces(self) -> list[WirePiece]:
        """The pieces of all that the server holds."""
        return self._all.pieces

    @property
    def pending(self) -> bool:
        """Whether actions are due, or answers in pieces are being sent."""
        sending = self._sends is not None and not self._sends.reap()
        return bool(self._actions or self.pulls or sending)

    def receive(self, link: Link, source: int) -> PushStream:
        """Begin to receive a push in pieces, each of which is answered at once."""
        if self._sends is None:
            self._sends = PieceSends(link, PIECE_DOWN)
        if self.share is not None and (pair := self.share.pair(source, link.comm.rank)):
            self._readers.add(source, pair, 0)
            return NodePushStream(source, pair)
        return PushStream(link, source, self.pieces)

    def send(self, link: Link, rank: int, how: int) -> None:
        """Begin to send all parameters to a worker, or (STREAM) let it copy them."""
        if how == PIECES:
            self.pulls.begin(link, rank)
        elif self.share is not None and (pair := self.share.pair(rank, link.comm.rank)):
            self._readers.add(rank, pair, len(self.pieces))

    def ready(
        self, actions: Sequence[Action], shares: Callable[[Apply], list[tuple[float, Any]]]
    ) -> Iterator[Action]:
        """Add actions, and yield all that may be carried out now.

        `shares` returns the share and the parts of each push of an update.
        """
        self._actions += actions
        while self._actions:
            action = self._actions[0]
            if isinstance(action, Apply):
                if self.update is None:
                    if not self._readers.have_read():
                        return
                    if self._sends is not None and not self._sends.reap():
                        return
                    self.pulls.keep()
                streams = any(isinstance(push.parts, PushStream) for _, push in action.pushes)
                if streams and self._sends is not None:
                    if self.update is None:
                        self.update = StreamedUpdate(
                            self._sends, self._shard, self._all, shares(action)
                        )
                    if not self.update.progress():
                        return
            self._actions.popleft()
            yield action

    def ended(self) -> StreamedUpdate | None:
        """Return the update in pieces that has just ended, and forget it."""
        update, self.update = self.update, None
        return update
