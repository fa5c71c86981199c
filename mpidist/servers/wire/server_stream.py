"""How a server handles gradients that arrive in pieces: it updates and answers each piece.

::

    worker 0   | 0 | 1 | 2 | 3 |            pieces that have arrived from worker 0
    worker 1   | 0 | 1 |                    pieces that have arrived from worker 1
    answered   | 0 | 1 |                    updated parameters that the server has sent back

When piece k has arrived from all workers that push in pieces, the server adds the gradients in the
order of the workers, updates the parameters of this piece, and sends them to these workers. A
server needs memory for 4 pieces (`WINDOW`) per worker. The result has the same bits as if all
pushes were whole messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from ...arrays import work_dtype
from ..link import Link
from ..pieces.piece_transfers import PieceReceives, PieceSends
from ..protocol import PIECE_UP
from ..shards import Parts, ServerShard, scale
from .wire_pieces import WirePiece, allowed, cut_shard


class PushStream:
    """Receives the pieces of one worker's gradients from the rank `source`."""

    # Whether the worker gets the answer in messages, and not from shared memory.
    by_messages = True

    def __init__(self, link: Link, source: int, pieces: Sequence[WirePiece]):
        self.source, self._link, self._pieces, self._used = source, link, pieces, 0
        largest = max(piece.nbytes for piece in pieces)
        self._slots = [link.pool.take(largest) for _ in allowed(len(pieces), 0, 0)]
        self._receives = PieceReceives(link, source, PIECE_UP, pieces, self.piece)
        self._receives.post(0)

    def here(self) -> int:
        """Return how many pieces of the gradients have arrived."""
        self._receives.take()
        return self._receives.here

    def piece(self, number: int) -> np.ndarray:
        """Return the memory of one piece of the gradients, which is valid until `use` is called."""
        return self._slots[number % len(self._slots)][: self._pieces[number].nbytes]

    def use(self) -> None:
        """Release the memory of the oldest piece of the gradients, for a later piece."""
        self._used += 1
        self._receives.post(self._used)
        if self._used == len(self._pieces):
            for slot in self._slots:
                self._link.pool.give(slot)


class PieceViews(NamedTuple):
    """Views of the parameters and of the optimizer's state that one piece of a message covers."""

    piece: WirePiece
    parameters: dict[str, np.ndarray]
    state: dict[str, Any]
    # For each view, the dict and the key where the optimizer expects it.
    places: list[tuple[dict, str, np.ndarray]]
    # The bytes of the parameters, if the piece covers a range of only one tensor.
    memory: np.ndarray | None


class ShardPieces:
    """The ranges of a server's parameters that are updated and sent one by one, as pieces."""

    def __init__(self, shard: ServerShard, limit: int):
        self._shard, self.pieces = shard, cut_shard(shard.layout, shard.server, limit)
        self._made_for: list = []
        # The views are made once, and again if the optimizer replaces an array.
        self._views: dict[int, PieceViews] = {}
        self._before: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._scalars: dict[tuple[str, ...], np.ndarray] = {}

    def begin(self) -> None:
        """Begin an update in pieces: copy the optimizer's scalars, such as Adam's step count."""
        # Each piece starts from these copies, so that every piece is updated with the same scalars.
        leaves = self._shard.leaves()
        arrays = [*self._shard.parameters.values(), *(leaf for _, leaf in leaves)]
        # An optimizer may have replaced an array by another array.
        same = len(arrays) == len(self._made_for) and all(map(is_, arrays, self._made_for))
        if not same:
            self._made_for, self._views = arrays, {}
            scalars = [(path, leaf) for path, leaf in leaves if not np.ndim(leaf)]
            self._scalars = {path: np.array(leaf) for path, leaf in scalars}
            self._before = [(leaf, np.array(leaf), self._scalars[path]) for path, leaf in scalars]
        for leaf, before, _ in self._before:
            before[...] = leaf

    def update(self, number: int, gradients: Mapping[str, np.ndarray], weight: float = 1.0) -> None:
        """Update one piece of the parameters; `weight` is a factor of the learning rate."""
        views = self.views(number)
        for _, before, scalar in self._before:
            scalar[...] = before
        self._shard.update_part(gradients, views.state, views.parameters, weight)
        for where, key, view in views.places:
            if where[key] is not view:  # the optimizer has made a new array
                view[...] = where[key]
                where[key] = view

    def end(self) -> None:
        """End an update: store new scalars (such as Adam's step count), and count the update."""
        for (leaf, _, scalar), path in zip(self._before, self._scalars, strict=True):
            if isinstance(leaf, np.ndarray):
                leaf[...] = scalar
            else:  # the optimizer has replaced an array by a number
                where = self._shard.state
                for key in path[:-1]:
                    where = where[key]
                where[path[-1]] = scalar.copy()
        self._shard.version += 1

    def views(self, number: int) -> PieceViews:
        """Return views of one piece of the parameters, and of its optimizer state."""
        found = self._views.get(number)
        if found is None:
            found = self._views[number] = self._make(self.pieces[number])
        return found

    def answer(self, number: int, ranks: Sequence[int], sends: PieceSends) -> None:
        """Begin to send one piece of the parameters to each rank in `ranks`."""
        if not ranks:
            return
        piece, parameters, _, _, memory = self.views(number)
        if memory is not None:
            sends.send(memory, ranks)
            return
        packed = sends.link.pool.take(piece.nbytes)
        for view, (_, _, _, at) in zip(parameters.values(), piece.spans, strict=True):
            packed[at : at + view.nbytes] = view.view(np.uint8)
        sends.send(packed, ranks, pooled=True)

    def _make(self, piece: WirePiece) -> PieceViews:
        shard = self._shard
        ranges = {}
        for tensor, start, stop, _ in piece.spans:
            first = shard.first(tensor)
            ranges[shard.key_of(tensor)] = slice(start - first, stop - first)
        parameters = {key: shard.parameters[key][place] for key, place in ranges.items()}
        places: list[tuple[dict, str, np.ndarray]] = [
            (parameters, key, view) for key, view in parameters.items()
        ]
        state: dict[str, Any] = {}
        for path, leaf in shard.leaves():
            if not np.ndim(leaf):
                view = self._scalars[path]
            elif path[-1] in ranges:
                view = leaf[ranges[path[-1]]]
            else:
                continue
            where = state
            for key in path[:-1]:
                where = where.setdefault(key, {})
            where[path[-1]] = view
            places.append((where, path[-1], view))
        memory = None
        if len(piece.spans) == 1:
            ((_, view),) = parameters.items()
            memory = view.view(np.uint8)
        return PieceViews(piece, parameters, state, places, memory)


class StreamedUpdate:
    """One update of a server's parameters, piece by piece, with the answers to the workers.

    When all workers that push in pieces have sent the gradients of a piece, the server updates the
    parameters of this piece, and sends them back. MPI may send them directly from the server's
    arrays, so these arrays must not change before the sends end.
    """

    def __init__(
        self,
        sends: PieceSends,
        shard: ServerShard,
        pieces: ShardPieces,
        pushes: Sequence[tuple[float, PushStream | Parts]],
        weight: float = 1.0,
    ):
        self._shard, self._all, self._sends = shard, pieces, sends
        # Pairs (share, gradients); the share is the weight in the mean.
        pushes, self._weight = shard.weighed(pushes, weight)
        self._next, self._number = 0, len(pieces.pieces)
        self._streams = [push for _, push in pushes if isinstance(push, PushStream)]
        self._ranks = [stream.source for stream in self._streams if stream.by_messages]
        live = [(share, push) for share, push in pushes if share]
        # With shares of 0 no parameter changes.
        self.updates = bool(live)
        whole = [(share, push) for share, push in live if not isinstance(push, PushStream)]
        # If all pushes in pieces have no samples, the update is made at once and as a whole. It may
        # then leave out rows that no push names.
        if live and len(whole) == len(live):
            if (merged := shard.merge(whole)) is not None:
                shard.update(*merged)
            live = []
        self._pushes: list[tuple[float, PushStream | ScaledPush]] = [
            (share, push if isinstance(push, PushStream) else ScaledPush(shard, share, push))
            for share, push in live
        ]
        pieces.begin()
        times, nbytes = len(self._ranks), sum(piece.nbytes for piece in pieces.pieces)
        number, nbytes = times * self._number, times * nbytes
        sends.link.count_pieces(number, nbytes, number, nbytes)

    def progress(self) -> bool:
        """Update and send the parameters of the arrived pieces; return whether all is done."""
        here = min((stream.here() for stream in self._streams), default=self._number)
        while self._next < min(here, self._number):
            self._answer(self._next)
            self._next += 1
            self._sends.link.moved = True
        if self._next < self._number:
            return False
        if self._pushes:
            self._all.end()
        return True

    def _answer(self, number: int) -> None:
        if self._pushes:
            piece, parameters, *_ = self._all.views(number)
            keys = zip(parameters, piece.spans, strict=True)
            gradients = {key: self._gradient(number, *span) for key, span in keys}
            self._all.update(number, gradients, self._weight)
        # The receives of later pieces are posted before the answers are sent, because an answer
        # allows a worker to send a later piece.
        for stream in self._streams:
            stream.use()
        self._all.answer(number, self._ranks, self._sends)

    def _gradient(self, number: int, tensor: int, start: int, stop: int, at: int) -> np.ndarray:
        """Return the weighted mean of the gradients of one range, with the same bits as `merge`."""
        dtype = self._shard.layout.tensors[tensor].dtype
        room = slice(at, at + (stop - start) * dtype.itemsize)
        share, push = self._pushes[0]
        if (
            len(self._pushes) == 1
            and isinstance(push, PushStream)
            and (share == 1 or dtype == work_dtype(dtype))
        ):
            return scale(push.piece(number)[room].view(dtype), share)
        total = np.zeros(stop - start, np.promote_types(dtype, np.float32))
        for share, push in self._pushes:
            if isinstance(push, PushStream):
                view = push.piece(number)[room].view(dtype)
                total += scale(view.astype(total.dtype, copy=False), share)
            else:
                push.add(tensor, start - self._shard.first(tensor), total)
        return total.astype(dtype, copy=False)


class ScaledPush:
    """The gradients of one worker's message, multiplied by their weight in the mean."""

    def __init__(self, shard: ServerShard, share: float, parts: Parts):
        self._found: dict[int, tuple[np.ndarray | None, np.ndarray]] = {}
        for part, view in parts:
            tensor, rows = part.piece.tensor, None
            dtype = np.promote_types(view.dtype, np.float32)
            values = scale(view.astype(dtype, copy=False), share)
            if part.rows is not None:
                rows = part.local_rows(shard.layout)
                order = np.argsort(rows, kind="stable")
                rows = rows[order]
                values = values.reshape(order.size, -1)[order]
            self._found[tensor] = rows, values

    def add(self, tensor: int, first: int, total: np.ndarray) -> None:
        """Add these gradients to `total`, for the range of a tensor that begins at `first`."""
        if tensor not in self._found:
            return
        rows, values = self._found[tensor]
        stop = first + total.size
        if rows is None:
            total += values[first:stop]
            return
        width = values.shape[1]
        low, high = np.searchsorted(rows, (first // width, -(-stop // width)))
        place = rows[low:high, np.newaxis] * width + np.arange(-first, width - first)
        here = (place >= 0) & (place < total.size)
        # As in `merge`, the values of a row that occurs twice are added one after another.
        np.add.at(total, place[here], values[low:high][here])
