"""The executor of `node.staged` and of its halves: private vectors through a node's shared memory.

The steps of `node.py` copy one piece for each owner. Written out here, pieces of owners whose parts
follow each other are one block: rows of the vector on one side, rows of staging on the other, so
that NumPy is called as often on a node of 256 ranks as on one of 17.

    vector   | part 0 | part 1 | part 2 | ...     two matrices: the first n % lanes parts are
    matrix     row 0    row 1    row 2            one element longer than the others
    piece t    [:, t * piece : (t + 1) * piece]

What a rank does between two syncs is four methods: `stage`, `add`, `publish`, `fetch`. The order of
additions is that of the steps: my piece, then the others' in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...events import Counters
from ..schedules import node
from .node_barrier import NodeBarrier, NodeProgram

STAGED, REDUCE_SCATTER, ALLGATHER = "staged", "reduce_scatter", "allgather"

Matrices = tuple[np.ndarray, np.ndarray]


class _Block(NamedTuple):
    """Pieces of owners that follow each other, `length` elements each."""

    matrix: int
    owners: slice | int
    length: int
    inbox: np.ndarray
    outbox: np.ndarray


class _Round(NamedTuple):
    """What this rank touches in a round: the others' pieces, its own, and what it adds to it.

    `taken` are the pieces that it fetches. Where they are many its own is among them: it lies in
    the same block.
    """

    others: list[_Block]
    taken: list[_Block]
    mine: _Block | None
    rows: list[np.ndarray] | np.ndarray


class StagedProgram(NodeProgram):
    """One rank's part of the allreduce of a private vector of `n` elements, or of a half of it.

    `memory` is the node's staging, in bytes. `form` is "staged", "reduce_scatter" or "allgather".
    """

    def __init__(
        self, gate: NodeBarrier, form: str, size: int, rank: int, n: int, lanes: int,
        memory: np.ndarray, dtype: np.dtype, ufunc: np.ufunc,
    ):  # fmt: skip
        super().__init__(gate)
        self.ufunc, self.dtype = ufunc, dtype
        stride = node.piece_bytes(size)
        self.piece = stride // dtype.itemsize
        short, longer = divmod(n, lanes)
        self._longer, self._shapes = (
            longer * (short + 1),
            ((longer, short + 1), (lanes - longer, short)),
        )
        rounds = -(-(short + (longer > 0)) // self.piece)
        self._full = short // self.piece  # rounds in which every part has a whole piece
        rows = memory[: node.staging_length(size, lanes, stride)].reshape(lanes * size, 2, stride)
        rows = rows[..., : self.piece * dtype.itemsize].view(dtype)
        make = _Rounds(size, rank, lanes, longer, rows)
        whole, rest = (self.piece, self.piece), self._full * self.piece
        last = (short + 1 - rest, short - rest)
        self._rounds = [make(0, whole), make(1, whole), make(self._full % 2, last)]
        self._run: Callable = getattr(self, f"_{form}")
        self.rounds = rounds
        own = short + (rank < longer) if rank < lanes else 0
        staged = 0 if form == ALLGATHER else n - own
        published = 0 if form == REDUCE_SCATTER else own
        added = 0 if form == ALLGATHER else own * (size - 1)
        self.counters = Counters(
            shared_bytes=(staged + published) * dtype.itemsize, bytes_reduced=added * dtype.itemsize
        )

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Run all rounds on the flat vector `work`. Collective over the node."""
        if key is not None:
            self.gate.announce(key)
        if self.rounds:
            longer, (first, second) = self._longer, self._shapes
            parts = work[:longer].reshape(first), work[longer:].reshape(second)
            self._run(self.gate, key, parts, divisor)

    def _staged(self, gate: NodeBarrier, key: int | None, x: Matrices, divisor) -> None:
        self.stage(0, x)
        gate.sync()
        if key is not None:
            gate.check(key)
        for t in range(1, self.rounds):
            self.stage(t, x)
            self.add(t - 1, x)
            self.publish(t - 1, x, divisor)
            gate.sync()
            self.fetch(t - 1, x)
        last = self.rounds - 1
        self.add(last, x)
        self.publish(last, x, divisor)
        gate.sync()
        self.fetch(last, x)

    def _reduce_scatter(self, gate: NodeBarrier, key: int | None, x: Matrices, divisor) -> None:
        for t in range(self.rounds):
            self.stage(t, x)
            gate.sync()
            if t == 0 and key is not None:
                gate.check(key)
            self.add(t, x)

    def _allgather(self, gate: NodeBarrier, key: int | None, x: Matrices, divisor) -> None:
        for t in range(self.rounds):
            self.publish(t, x, divisor)
            gate.sync()
            if t == 0 and key is not None:
                gate.check(key)
            self.fetch(t, x)

    def stage(self, t: int, x: Matrices) -> None:
        """Copy piece `t` of every other rank's part to where that rank reads it."""
        start = t * self.piece
        for matrix, owners, length, inbox, _ in self._round(t).others:
            inbox[...] = x[matrix][owners, start : start + length]

    def add(self, t: int, x: Matrices) -> None:
        """Add the others' pieces to piece `t` of my part."""
        _, _, block, rows = self._round(t)
        if block is None:
            return
        mine, ufunc = self._mine(t, x, block), self.ufunc
        if type(rows) is list:
            for row in rows:
                ufunc(mine, row, out=mine)
        else:
            single = block.length == 1
            if single:  # NumPy adds up a single column in another order
                rows = np.repeat(rows, 2, axis=1)
            ufunc(mine, rows[0], out=rows[0])
            out = np.empty(2, self.dtype) if single else mine
            ufunc.reduce(rows, axis=0, dtype=self.dtype, out=out, initial=None)
            if single:
                mine[...] = out[:1]

    def publish(self, t: int, x: Matrices, divisor) -> None:
        """Finish piece `t` of my part and show it to all."""
        block = self._round(t).mine
        if block is not None:
            mine = self._mine(t, x, block)
            if divisor is not None:
                np.divide(mine, divisor, out=mine)
            block.outbox[...] = mine

    def fetch(self, t: int, x: Matrices) -> None:
        """Take piece `t` of all other parts."""
        start = t * self.piece
        for matrix, owners, length, _, outbox in self._round(t).taken:
            x[matrix][owners, start : start + length] = outbox

    def _round(self, t: int) -> _Round:
        return self._rounds[t & 1 if t < self._full else 2]

    def _mine(self, t: int, x: Matrices, block: _Block) -> np.ndarray:
        start = t * self.piece
        return x[block.matrix][block.owners, start : start + block.length]


class _Rounds:
    """Makes the `_Round` of one rank for a buffer (0 or 1) and a length of the pieces."""

    def __init__(self, size: int, rank: int, lanes: int, longer: int, rows: np.ndarray):
        self.size, self.rank, self.lanes, self.longer = size, rank, lanes, longer
        # Owner, who puts it there, buffer, element; and owner, buffer, element.
        self.inbox = rows[: lanes * (size - 1)].reshape(lanes, size - 1, *rows.shape[1:])
        self.outbox = rows[lanes * (size - 1) :]

    def __call__(self, buffer: int, lengths: tuple[int, int]) -> _Round:
        others, everyone, mine, rank = [], [], None, self.rank
        few = self.size <= node.FEW_RANKS
        added: list[np.ndarray] | np.ndarray = []
        spans = (0, self.longer, lengths[0]), (self.longer, self.lanes, lengths[1])
        for matrix, (first, stop, length) in enumerate(spans):
            if length <= 0 or first == stop:
                continue
            # Of owners behind this rank it is row `rank`, of those before it the one less.
            for low, high, row in (
                (first, min(rank, stop), rank - 1),
                (max(rank + 1, first), stop, rank),
            ):
                if low < high:
                    others.append(self._block(matrix, first, low, high, row, buffer, length))
            if not few:
                everyone.append(self._block(matrix, first, first, stop, 0, buffer, length))
            if first <= rank < stop:
                own = self.outbox[rank, buffer, :length]
                mine = _Block(matrix, rank - first, length, own, own)
                rows = self.inbox[rank, :, buffer, :length]
                added = list(rows) if few else rows
        return _Round(others, others if few else everyone, mine, added)

    def _block(self, matrix, first, low, high, row, buffer, length) -> _Block:
        """Return the pieces of owners `low` to `high`, which stand in one row for each."""
        one = high == low + 1
        at: slice | int = low if one else slice(low, high)
        owners: slice | int = low - first if one else slice(low - first, high - first)
        inbox, outbox = self.inbox[at, row, buffer, :length], self.outbox[at, buffer, :length]
        return _Block(matrix, owners, length, inbox, outbox)
