"""Allreduce inside a node: ranks add each other's values in memory that they share.

The owner of a part of the vector is the rank that adds this part of all ranks' vectors, in pieces
that fit into the cache. The sums of all parts are then copied to every rank.

    in_place_allreduce, 4 ranks: vectors v0 to v3 lie in shared memory, and rank 1 owns part B
      sync | rank 1: v1[B] += v0[B], v2[B], v3[B]; v0[B] = v2[B] = v3[B] = v1[B] | sync
    staged: private vectors are copied piece by piece through shared buffers `in` and `out`:
      copy piece t for every owner into `in` | add my part of piece t-1, publish in `out` | sync |
      fetch piece t-1 of the other parts
    flat, short vectors: every rank copies in, sync, every rank adds all vectors in rank order

With q ranks on the node and N bytes, each rank reads N bytes and writes N bytes in
`in_place_allreduce`, and moves (q+2)N bytes in `flat`. Jain, Kaleem, Balmana, Langer, Durnov,
Sannikov, Garzaran, "Framework for Scalable Intra-Node Collective Operations using Shared Memory",
SC 2018.
"""

from __future__ import annotations

from collections.abc import Callable

from ...partition import BlockPartition, pieces
from .schedule import FINISH, NOTHING, REDUCE, REDUCE_LEFT, Range, Step, copy, length, node_sync

#: Bytes that a rank copies to shared buffers per round, for all owners together. 512 KiB were the
#: fastest in measurements with 2 ranks: with more bytes per round, the data do not stay in the
#: cache, and with fewer bytes, there are more barriers, at each of which a rank waits for the
#: slower rank.
ROUND_BYTES = 512 << 10
#: Bytes of the shared buffers of a node with up to 96 ranks, and bytes per rank on a larger node.
#: From 30 ranks on, this limit, and not `ROUND_BYTES`, decides how much a rank copies per round.
STAGING_BYTES, STAGING_BYTES_PER_RANK = 30 << 20, 240 << 10
#: Pieces begin at multiples of a cache line.
LINE_BYTES = 64
#: On a node with more ranks than this, one NumPy call reads all counters, and another NumPy call
#: adds the pieces of all ranks. On a node with at most this many ranks, a loop in Python is quicker
#: than these calls.
FEW_RANKS = 16
#: The bytes of a piece in `in_place_allreduce`, which adds pieces in shared memory without a copy.
IN_PLACE_BYTES = 128 << 10
#: A vector is reduced by `flat` if its copies, one per rank of the node, fit into this many bytes.
FLAT_BYTES = 128 << 10


def piece_bytes(size: int) -> int:
    """Return the number of bytes from the start of one piece in a shared buffer to the next piece.

    The number is the same for all dtypes. `size` is the number of ranks of the node.
    """
    most = max(STAGING_BYTES, size * STAGING_BYTES_PER_RANK) // (2 * size * size)
    return max(LINE_BYTES, min(ROUND_BYTES // size, most) // LINE_BYTES * LINE_BYTES)


def staging_bytes(size: int) -> int:
    """Return the number of bytes of all shared buffers on a node with `size` ranks.

    Vectors that the ranks do not share are copied through these buffers.
    """
    return staging_length(size, size, piece_bytes(size))


def in_place_length(itemsize: int) -> int:
    """Return the number of elements that `in_place_allreduce` adds at a time."""
    return max(1, IN_PLACE_BYTES // itemsize)


def staging_length(size: int, lanes: int, piece: int) -> int:
    """Return the number of elements of all shared buffers together.

    `lanes` is the number of owners, which are the ranks that each sum a part of the vector. The
    buffers have room for two pieces, of `piece` elements each, for each pair of a rank and an
    owner.
    """
    return 2 * piece * lanes * size


def _reduce(round: int, source: Range, target: Range) -> Step:
    return Step(round, REDUCE, -1, source, target)


def inbox_row(size: int, rank: int, owner: int) -> int:
    """Return the number of the row of the shared buffers that `rank` fills for `owner`.

    `rank` copies pieces of its vector into this row, and `owner` adds them to its own values.
    """
    return owner * (size - 1) + rank - (rank > owner)


def outbox_row(size: int, lanes: int, owner: int) -> int:
    """Return the number of the row of the shared buffers in which `owner` writes its sums."""
    return lanes * (size - 1) + owner


class _Staging:
    """Computes where each piece lies in shared memory, and the steps that copy and add a piece.

    A piece is as much of a rank's part of the vector as fits into a shared buffer.
    """

    def __init__(self, size: int, rank: int, n: int, piece: int, lanes: int, base: int):
        self.size, self.rank, self.piece, self.lanes, self.base = size, rank, piece, lanes, base
        self.parts = BlockPartition(n, lanes)
        self.rounds = -(-self.parts.size(0) // piece)  # the first part is the longest
        self.others = [owner for owner in range(lanes) if owner != rank]

    def part(self, owner: int, t: int) -> Range:
        """Return the range of elements of piece `t` of `owner`'s part; it may be empty."""
        start, stop = self.parts.range(owner)
        return min(start + t * self.piece, stop), min(start + (t + 1) * self.piece, stop)

    def _place(self, row: int, owner: int, t: int) -> Range:
        start = self.base + (2 * row + t % 2) * self.piece
        return start, start + length(self.part(owner, t))

    def inbox(self, rank: int, owner: int, t: int) -> Range:
        """Return the range of shared memory in which `rank` puts piece `t` of `owner`'s part."""
        return self._place(inbox_row(self.size, rank, owner), owner, t)

    def outbox(self, owner: int, t: int) -> Range:
        """Return the range of shared memory to which `owner` writes the sum of its piece `t`."""
        return self._place(outbox_row(self.size, self.lanes, owner), owner, t)

    def stage(self, round: int, t: int) -> list[Step]:
        """Return steps that copy piece `t` of each other owner's part to that owner's buffer."""
        return [copy(round, self.part(o, t), self.inbox(self.rank, o, t)) for o in self.others]

    def add(self, round: int, t: int) -> list[Step]:
        """Return steps that sum piece `t` of this rank's part over all ranks of the node."""
        if self.rank >= self.lanes:
            return []
        mine = self.part(self.rank, t)
        rows = [self.inbox(rank, self.rank, t) for rank in range(self.size) if rank != self.rank]
        if self.size <= max(FEW_RANKS, 1):
            return [_reduce(round, row, mine) for row in rows]
        # One NumPy call adds all rows, beginning with the first row. This rank's values must come
        # first in the sum. So they are added to the first row, as the left operand, before NumPy
        # adds the rows.
        return [
            Step(round, REDUCE_LEFT, -1, mine, rows[0]),
            *(_reduce(round, row, rows[0]) for row in rows[1:]),
            copy(round, rows[0], mine),
        ]

    def publish(self, round: int, t: int) -> list[Step]:
        """Return steps that put the sum of piece `t` of this rank's part into shared memory."""
        if self.rank >= self.lanes:
            return []
        mine = self.part(self.rank, t)
        finish = Step(round, FINISH, -1, NOTHING, mine)
        return [finish, copy(round, mine, self.outbox(self.rank, t))]

    def fetch(self, round: int, t: int) -> list[Step]:
        """Return steps that copy the other owners' sums of piece `t` into this rank's vector."""
        return [copy(round, self.outbox(o, t), self.part(o, t)) for o in self.others]


def staged(size: int, rank: int, n: int, piece: int, base: int) -> list[Step]:
    """Return the steps of an allreduce of private vectors, copied through shared buffers.

    In the steps, the elements of the vector are numbered from 0, and those of the shared buffers
    from `base`.
    """
    staging = _Staging(size, rank, n, piece, size, base)
    steps: list[Step] = []
    # Two buffers are enough: when a rank writes a buffer again, it has passed a barrier that all
    # ranks reach only after they have read the buffer.
    for t in range(staging.rounds + 1 if n else 0):
        if t < staging.rounds:
            steps += staging.stage(t, t)
        if t:
            steps += staging.add(t, t - 1) + staging.publish(t, t - 1)
        steps.append(node_sync(t))
        if t:
            steps += staging.fetch(t, t - 1)
    return steps


def reduce_scatter(size: int, rank: int, n: int, piece: int, lanes: int, base: int) -> list[Step]:
    """Return the steps of a reduce-scatter through shared buffers: owner r gets part r of the sum.

    The vector is cut into `lanes` parts, and each of the first `lanes` ranks owns one part.
    """
    staging = _Staging(size, rank, n, piece, lanes, base)
    steps: list[Step] = []
    for t in range(staging.rounds):
        steps += [*staging.stage(t, t), node_sync(t), *staging.add(t, t)]
    return steps


def allgather(size: int, rank: int, n: int, piece: int, lanes: int, base: int) -> list[Step]:
    """Return the steps of an allgather through shared buffers: each rank gets all parts of the sum.

    The vector is cut into `lanes` parts, and each of the first `lanes` ranks owns one part.
    """
    staging = _Staging(size, rank, n, piece, lanes, base)
    steps: list[Step] = []
    for t in range(staging.rounds):
        steps += [*staging.publish(t, t), node_sync(t), *staging.fetch(t, t)]
    return steps


def flat(size: int, rank: int, n: int, base: int) -> list[Step]:
    """Return the steps of an allreduce of short vectors; all are first copied to shared memory.

    In the steps, the vector begins at position 0, and the shared memory at position `base`.
    """
    slots = [(base + r * n, base + (r + 1) * n) for r in range(size)]
    return [
        copy(0, (0, n), slots[rank]),
        node_sync(0),
        copy(1, slots[0], (0, n)),
        *(_reduce(1, slots[r], (0, n)) for r in range(1, size)),
        Step(1, FINISH, -1, NOTHING, (0, n)),
    ]


def in_place_allreduce(size: int, rank: int, n: int, piece: int, stride: int) -> list[Step]:
    """Return the steps of an allreduce in shared memory; rank r's vector is at ``r * stride``."""
    steps = _in_place(size, rank, n, piece, size, stride, _add_slots, _show)
    return [node_sync(0), *steps, node_sync(0)]


def in_place_reduce_scatter(
    size: int, rank: int, n: int, piece: int, lanes: int, stride: int
) -> list[Step]:
    """Return the steps of the first half of `in_place_allreduce`: each owner sums its part.

    The vector is cut into `lanes` parts, and each of the first `lanes` ranks owns one part.
    """
    return [node_sync(0), *_in_place(size, rank, n, piece, lanes, stride, _add_slots)]


def in_place_allgather(
    size: int, rank: int, n: int, piece: int, lanes: int, stride: int
) -> list[Step]:
    """Return the steps of the second half of `in_place_allreduce`: copy all sums to all ranks.

    The vector is cut into `lanes` parts, and each of the first `lanes` ranks owns one part.
    """
    return [*_in_place(size, rank, n, piece, lanes, stride, _show), node_sync(0)]


def _in_place(size, rank, n, piece, lanes, stride, *actions: Callable) -> list[Step]:
    """Return the steps that the functions `actions` return for each piece that this rank owns."""
    steps: list[Step] = []
    if rank < lanes:
        for t, (start, stop) in enumerate(pieces(*BlockPartition(n, lanes).range(rank), piece)):
            slots = [(r * stride + start, r * stride + stop) for r in range(size)]
            own = slots.pop(rank)
            for action in actions:
                steps += action(t, own, slots)
    return steps


def _add_slots(t: int, own: Range, others: list[Range]) -> list[Step]:
    return [_reduce(t, other, own) for other in others]


def _show(t: int, own: Range, others: list[Range]) -> list[Step]:
    return [Step(t, FINISH, -1, NOTHING, own), *(copy(t, own, other) for other in others)]
