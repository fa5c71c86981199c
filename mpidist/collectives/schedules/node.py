"""Allreduce inside a node: ranks add each other's numbers where they lie, in memory they share.

No messages. The vector is cut into one part per owner; each owner adds its part from all ranks, in
cache-sized pieces, and the result goes back to everyone. `node_sync` is a barrier of the node.

    in_place, 4 ranks: the vectors lie in shared memory (an arena)      q(N/q) = N bytes read and
      sync | rank 1: v1[B] += v0[B], v2[B], v3[B]; v0[B] = v2[B] = v3[B] = v1[B] | sync   N written
    staged: private vectors pass through small shared buffers, piece after piece, two of each:
      copy piece t for every owner into `in` | add my part of piece t-1, publish in `out` | sync |
      fetch piece t-1 of the other parts
    flat, short vectors: everyone copies in, sync, everyone adds everything in rank order

Cost per rank (memory traffic, not messages): in_place 2N, staged 2N plus what stays in the cache,
flat (q+2)N; a sync is a cache line per rank. `lanes` < q makes fewer owners: the two halves
(`reduce_scatter`, `allgather`) then leave one part on each lane for an exchange between nodes.

Jain, Kaleem, Balmana, Langer, Durnov, Sannikov, Garzaran, "Framework for Scalable Intra-Node
Collective Operations using Shared Memory", SC 2018.

Every builder returns the steps of one rank in the address space of `schedule`: ``[0, n)`` is the
vector, and from `base` on lies the memory of the node, the *same* positions on all ranks. Between
two syncs no rank writes what another reads or writes (`check.check_races` proves it).
"""

from __future__ import annotations

from ...partition import BlockPartition
from .schedule import COPY, FINISH, NODE_SYNC, NOTHING, REDUCE, REDUCE_LEFT, Range, Step

#: Bytes that a rank stages per round, over all owners. Measured at 2 ranks: longer rounds leave the
#: cache, shorter ones cost more syncs, each of which waits for the slower rank.
ROUND_BYTES = 512 << 10
#: Bytes of staging of a node of up to 96 ranks; beyond, so many for each rank. From 30 ranks on
#: this, not `ROUND_BYTES`, is how much a rank stages per round.
STAGING_BYTES, STAGING_BYTES_PER_RANK = 30 << 20, 240 << 10
#: Pieces begin at multiples of a cache line.
LINE_BYTES = 64
#: Nodes of more ranks look at all counters at once, and add the pieces of all ranks at once. Below,
#: a loop of Python is quicker than the call of NumPy that does it.
FEW_RANKS = 16
#: Bytes of a piece that is added where it lies.
IN_PLACE_BYTES = 128 << 10
#: Vectors whose slots, one per rank of the node, fit into this many bytes are reduced flat.
FLAT_BYTES = 128 << 10


def piece_bytes(size: int) -> int:
    """Bytes between two pieces in staging: one for all dtypes.

    So what lies where does not depend on the dtype, and two calls of different dtypes, one right
    after the other, share their places as two calls of one dtype do.
    """
    most = max(STAGING_BYTES, size * STAGING_BYTES_PER_RANK) // (2 * size * size)
    return max(LINE_BYTES, min(ROUND_BYTES // size, most) // LINE_BYTES * LINE_BYTES)


def staging_bytes(size: int) -> int:
    """Bytes of shared staging that `reduce_scatter`, `allgather` and `staged` need."""
    return staging_length(size, size, piece_bytes(size))


def in_place_length(itemsize: int) -> int:
    """Elements of a piece that is added where it lies."""
    return max(1, IN_PLACE_BYTES // itemsize)


def staging_length(size: int, lanes: int, piece: int) -> int:
    """Positions of staging for `lanes` owners: a row for each rank, two pieces in each."""
    return 2 * piece * lanes * size


def _sync(round: int) -> Step:
    return Step(round, NODE_SYNC, -1, NOTHING, NOTHING)


def _copy(round: int, source: Range, target: Range) -> Step:
    return Step(round, COPY, -1, source, target)


def _reduce(round: int, source: Range, target: Range) -> Step:
    return Step(round, REDUCE, -1, source, target)


def _shift(start: int, span: Range) -> Range:
    """Positions of a range of the vector when the vector begins at `start`."""
    return start + span[0], start + span[1]


def inbox_row(size: int, rank: int, owner: int) -> int:
    """Row of staging in which `rank` puts pieces for `owner`; those of one owner lie together.

    A row is two pieces, taken in turn. An owner has no row for itself.
    """
    return owner * (size - 1) + rank - (rank > owner)


def outbox_row(size: int, lanes: int, owner: int) -> int:
    """Row in which `owner` publishes its pieces; behind all of `inbox_row`."""
    return lanes * (size - 1) + owner


class _Staging:
    """Where pieces lie: ``in`` of every rank for every owner, ``out`` of every owner; two each."""

    def __init__(self, size: int, rank: int, n: int, piece: int, lanes: int, base: int):
        self.size, self.rank, self.piece, self.lanes, self.base = size, rank, piece, lanes, base
        self.parts = BlockPartition(n, lanes)
        self.rounds = -(-self.parts.size(0) // piece)  # the first part is the longest
        self.owner = rank < lanes

    def part(self, owner: int, t: int) -> Range:
        """Piece `t` of the part of `owner`, in the vector; empty beyond its end."""
        start, stop = self.parts.range(owner)
        return min(start + t * self.piece, stop), min(start + (t + 1) * self.piece, stop)

    def _place(self, row: int, t: int, span: Range) -> Range:
        start = self.base + (2 * row + t % 2) * self.piece
        return start, start + span[1] - span[0]

    def inbox(self, rank: int, owner: int, t: int) -> Range:
        """Where `rank` puts piece `t` for `owner`."""
        return self._place(inbox_row(self.size, rank, owner), t, self.part(owner, t))

    def outbox(self, owner: int, t: int) -> Range:
        """Where `owner` publishes its piece `t`."""
        return self._place(outbox_row(self.size, self.lanes, owner), t, self.part(owner, t))

    def stage(self, round: int, t: int) -> list[Step]:
        """Copy piece t of every other rank's part to where that rank reads it."""
        others = [owner for owner in range(self.lanes) if owner != self.rank]
        return [_copy(round, self.part(o, t), self.inbox(self.rank, o, t)) for o in others]

    def add(self, round: int, t: int) -> list[Step]:
        """Add piece t of my part: mine first, then the others' in rank order."""
        if not self.owner:
            return []
        others = [rank for rank in range(self.size) if rank != self.rank]
        mine = self.part(self.rank, t)
        rows = [self.inbox(rank, self.rank, t) for rank in others]
        if self.size <= max(FEW_RANKS, 1):
            return [_reduce(round, row, mine) for row in rows]
        # All rows at once: mine is added to the first, for that is where a sum of rows begins.
        return [
            Step(round, REDUCE_LEFT, -1, mine, rows[0]),
            *(_reduce(round, row, rows[0]) for row in rows[1:]),
            _copy(round, rows[0], mine),
        ]

    def publish(self, round: int, t: int) -> list[Step]:
        """Finish piece t of my part and show it to all."""
        if not self.owner:
            return []
        mine = self.part(self.rank, t)
        return [
            Step(round, FINISH, -1, NOTHING, mine),
            _copy(round, mine, self.outbox(self.rank, t)),
        ]

    def fetch(self, round: int, t: int) -> list[Step]:
        """Take piece t of all other parts."""
        others = [owner for owner in range(self.lanes) if owner != self.rank]
        return [_copy(round, self.outbox(o, t), self.part(o, t)) for o in others]


def staged(size: int, rank: int, n: int, piece: int, base: int) -> list[Step]:
    """Allreduce of private vectors through shared staging at `base`."""
    staging = _Staging(size, rank, n, piece, size, base)
    steps: list[Step] = []
    # Two buffers are enough: when a rank writes one for the second time it has passed the sync
    # after which everybody had read it.
    for t in range(staging.rounds + 1 if n else 0):
        if t < staging.rounds:
            steps += staging.stage(t, t)
        if t:
            steps += staging.add(t, t - 1) + staging.publish(t, t - 1)
        steps.append(_sync(t))
        if t:
            steps += staging.fetch(t, t - 1)
    return steps


def reduce_scatter(size: int, rank: int, n: int, piece: int, lanes: int, base: int) -> list[Step]:
    """First half: owner r ends with part r of the sum in its vector; `lanes` parts."""
    staging = _Staging(size, rank, n, piece, lanes, base)
    steps: list[Step] = []
    for t in range(staging.rounds if n else 0):
        steps += staging.stage(t, t)
        steps.append(_sync(t))
        steps += staging.add(t, t)
    return steps


def allgather(size: int, rank: int, n: int, piece: int, lanes: int, base: int) -> list[Step]:
    """Second half: owner r finishes part r and all take it."""
    staging = _Staging(size, rank, n, piece, lanes, base)
    steps: list[Step] = []
    for t in range(staging.rounds if n else 0):
        steps += staging.publish(t, t)
        steps.append(_sync(t))
        steps += staging.fetch(t, t)
    return steps


def flat(size: int, rank: int, n: int, base: int) -> list[Step]:
    """Allreduce of short vectors; `base` is where this call's set of slots lies, one per rank."""
    slots = [(base + r * n, base + (r + 1) * n) for r in range(size)]
    return [
        _copy(0, (0, n), slots[rank]),
        _sync(0),
        _copy(1, slots[0], (0, n)),
        *(_reduce(1, slots[r], (0, n)) for r in range(1, size)),
        Step(1, FINISH, -1, NOTHING, (0, n)),
    ]


def in_place(size: int, rank: int, n: int, piece: int, stride: int) -> list[Step]:
    """Allreduce of vectors that lie in shared memory: rank r's at ``r * stride``."""
    steps = [_sync(0)]
    for t, mine in _pieces(BlockPartition(n, size).range(rank), piece):
        steps += _add_slots(t, size, rank, mine, stride)
        steps += _show(t, size, rank, mine, stride)
    return [*steps, _sync(0)]


def in_place_reduce_scatter(
    size: int, rank: int, n: int, piece: int, lanes: int, stride: int
) -> list[Step]:
    """First half of `in_place` for `lanes` owners."""
    steps = [_sync(0)]
    if rank < lanes:
        for t, mine in _pieces(BlockPartition(n, lanes).range(rank), piece):
            steps += _add_slots(t, size, rank, mine, stride)
    return steps


def in_place_allgather(
    size: int, rank: int, n: int, piece: int, lanes: int, stride: int
) -> list[Step]:
    """Second half of `in_place`: each owner writes its part into all slots."""
    steps: list[Step] = []
    if rank < lanes:
        for t, mine in _pieces(BlockPartition(n, lanes).range(rank), piece):
            steps += _show(t, size, rank, mine, stride)
    return [*steps, _sync(0)]


def _pieces(part: Range, piece: int):
    starts = range(part[0], part[1], piece)
    return enumerate((start, min(start + piece, part[1])) for start in starts)


def _add_slots(t: int, size: int, rank: int, mine: Range, stride: int) -> list[Step]:
    own = _shift(rank * stride, mine)
    return [_reduce(t, _shift(r * stride, mine), own) for r in range(size) if r != rank]


def _show(t: int, size: int, rank: int, mine: Range, stride: int) -> list[Step]:
    own = _shift(rank * stride, mine)
    targets = [_shift(r * stride, mine) for r in range(size) if r != rank]
    return [Step(t, FINISH, -1, NOTHING, own), *(_copy(t, own, target) for target in targets)]
