"""Allreduce inside a node: private vectors are copied, piece by piece, through shared memory.

Each of `lanes` ranks sums one part of the vector over all ranks of the node. A part is copied and
summed in pieces that fit into the shared buffer. One NumPy call copies the same piece of many
parts, because the longer parts are the rows of one matrix, and the shorter parts are the rows of
another:

    vector   | part 0 | part 1 | part 2 | ...     two matrices, as the first n % lanes parts are
    matrix     row 0    row 1    row 2            one element longer than the others
    piece t    [:, t * piece : (t + 1) * piece]
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
    """Equally long pieces of the vector that neighbouring ranks sum; one NumPy call copies all."""

    matrix: int
    owners: slice | int
    length: int
    inbox: np.ndarray
    outbox: np.ndarray


class _Round(NamedTuple):
    """The memory that this rank reads and writes between two barriers.

    A piece is as much of a part of the vector as fits into a shared buffer. `others` are pieces
    that this rank copies to shared memory for other ranks, and `taken` are sums that it copies from
    there. `mine` is the piece that this rank sums, and `rows` has the other ranks' values of this
    piece.
    """

    others: list[_Block]
    taken: list[_Block]
    mine: _Block | None
    rows: list[np.ndarray] | np.ndarray


class StagedProgram(NodeProgram):
    """An object that runs one rank's steps of an allreduce, or of half an allreduce, in a node.

    `memory` is the shared buffer of the node, as bytes. `form` is "staged" for the whole allreduce,
    and "reduce_scatter" or "allgather" for one half of it.
    """

    def __init__(
        self, gate: NodeBarrier, form: str, size: int, rank: int, n: int, lanes: int,
        memory: np.ndarray, dtype: np.dtype, ufunc: np.ufunc,
    ):  # fmt: skip
        super().__init__(gate)
        self.ufunc, self.dtype, self.size, self.rank = ufunc, dtype, size, rank
        stride = node.piece_bytes(size)
        self.piece = stride // dtype.itemsize
        short, longer = divmod(n, lanes)
        #: For each of the two matrices: its first owner, the number after its last owner, and the
        #: length of a part.
        self._matrices = (0, longer, short + 1), (longer, lanes, short)
        self.rounds = -(-(short + (longer > 0)) // self.piece)
        self._full = short // self.piece  # the rounds in which every part has a whole piece
        rows = memory[: node.staging_length(size, lanes, stride)].reshape(lanes * size, 2, stride)
        rows = rows[..., : self.piece * dtype.itemsize].view(dtype)
        # `_inboxes` has the axes owner, rank that writes, buffer, element. `_outboxes` has the axes
        # owner, buffer, element.
        self._inboxes = rows[: lanes * (size - 1)].reshape(lanes, size - 1, *rows.shape[1:])
        self._outboxes = rows[lanes * (size - 1) :]
        self._rounds = [self._make_round(k, self.piece, self.piece) for k in (0, 1)]
        rest = self._full * self.piece
        self._rounds.append(self._make_round(self._full % 2, short + 1 - rest, short - rest))
        # `_run` is a function and not a method of `self`, because a method would make a reference
        # cycle, whose memory Python frees much later.
        self._run: Callable = getattr(StagedProgram, f"_{form}")
        own = short + (rank < longer) if rank < lanes else 0
        staged, added = (0, 0) if form == ALLGATHER else (n - own, own * (size - 1))
        published = 0 if form == REDUCE_SCATTER else own
        self.counters = Counters(
            shared_bytes=(staged + published) * dtype.itemsize, bytes_reduced=added * dtype.itemsize
        )

    def _make_round(self, buffer: int, *lengths: int) -> _Round:
        """Return the `_Round`: the memory that this rank uses between two barriers."""
        others, everyone, mine, rank = [], [], None, self.rank
        few = self.size <= node.FEW_RANKS
        added: list[np.ndarray] | np.ndarray = []
        for matrix, length in enumerate(lengths):
            first, stop, _ = self._matrices[matrix]
            if length <= 0 or first == stop:
                continue
            # An owner has no row for its own pieces. So among the rows of an owner with a lower
            # number, this rank's row is one place earlier.
            for low, high, row in (
                (first, min(rank, stop), rank - 1),
                (max(rank + 1, first), stop, rank),
            ):
                if low < high:
                    others.append(self._block(matrix, low, high, row, buffer, length))
            if not few:
                everyone.append(self._block(matrix, first, stop, 0, buffer, length))
            if first <= rank < stop:
                own = self._outboxes[rank, buffer, :length]
                mine = _Block(matrix, rank - first, length, own, own)
                rows = self._inboxes[rank, :, buffer, :length]
                added = list(rows) if few else rows
        return _Round(others, others if few else everyone, mine, added)

    def _block(self, matrix, low, high, row, buffer, length) -> _Block:
        """Return the pieces of ranks `low` to `high` - 1, as a block that one NumPy call copies."""
        first = self._matrices[matrix][0]
        inbox = self._inboxes[low:high, row, buffer, :length]
        outbox = self._outboxes[low:high, buffer, :length]
        return _Block(matrix, slice(low - first, high - first), length, inbox, outbox)

    def run(self, work, key, number: int = 0, divisor=None) -> None:
        """Run all steps on the 1-D vector `work`. Collective over the node.

        `key` is a number that identifies the operation, so that the ranks can check that they run
        the same one. It is None in the second half of an allreduce (the allgather), because the
        ranks have checked it in the first half. If `divisor` is given, the sums are divided by it.
        """
        if key is not None:
            self.gate.announce(key)
        if self.rounds:
            (_, longer, more), (_, lanes, fewer) = self._matrices
            long, rest = work[: longer * more], work[longer * more :]
            parts = long.reshape(longer, more), rest.reshape(lanes - longer, fewer)
            self._run(self, key, parts, divisor)

    def _staged(self, key: int | None, x: Matrices, divisor) -> None:
        for t in range(self.rounds + 1):
            if t < self.rounds:
                self.stage(t, x)
            if t:
                self.add(t - 1, x)
                self.publish(t - 1, x, divisor)
            self._sync(t, key)
            if t:
                self.fetch(t - 1, x)

    def _reduce_scatter(self, key: int | None, x: Matrices, divisor) -> None:
        for t in range(self.rounds):
            self.stage(t, x)
            self._sync(t, key)
            self.add(t, x)

    def _allgather(self, key: int | None, x: Matrices, divisor) -> None:
        for t in range(self.rounds):
            self.publish(t, x, divisor)
            self._sync(t, key)
            self.fetch(t, x)

    def _sync(self, t: int, key: int | None) -> None:
        """Wait at barrier `t`; at barrier 0, check that all ranks run the same operation."""
        self.gate.sync()
        if t == 0 and key is not None:
            self.gate.check(key)

    def stage(self, t: int, x: Matrices) -> None:
        """Copy piece `t` of each part to shared memory, except of the part that this rank sums."""
        start = t * self.piece
        for matrix, owners, length, inbox, _ in self._round(t).others:
            inbox[...] = x[matrix][owners, start : start + length]

    def add(self, t: int, x: Matrices) -> None:
        """Add the other ranks' values to piece `t` of the part that this rank sums."""
        _, _, block, rows = self._round(t)
        if block is None:
            return
        mine, ufunc = self._mine(t, x, block), self.ufunc
        if type(rows) is list:
            for row in rows:
                ufunc(mine, row, out=mine)
        else:
            single = block.length == 1
            if single:  # NumPy would add up one column in another order
                rows = np.repeat(rows, 2, axis=1)
            ufunc(mine, rows[0], out=rows[0])
            out = np.empty(2, self.dtype) if single else mine
            ufunc.reduce(rows, axis=0, dtype=self.dtype, out=out, initial=None)
            if single:
                mine[...] = out[:1]

    def publish(self, t: int, x: Matrices, divisor) -> None:
        """Copy piece `t` of the part that this rank has summed to shared memory."""
        block = self._round(t).mine
        if block is not None:
            mine = self._mine(t, x, block)
            if divisor is not None:
                np.divide(mine, divisor, out=mine)
            block.outbox[...] = mine

    def fetch(self, t: int, x: Matrices) -> None:
        """Copy the finished piece `t` of every part from shared memory into this rank's vector."""
        start = t * self.piece
        for matrix, owners, length, _, outbox in self._round(t).taken:
            x[matrix][owners, start : start + length] = outbox

    def _round(self, t: int) -> _Round:
        return self._rounds[t & 1 if t < self._full else 2]

    def _mine(self, t: int, x: Matrices, block: _Block) -> np.ndarray:
        start = t * self.piece
        return x[block.matrix][block.owners, start : start + block.length]
