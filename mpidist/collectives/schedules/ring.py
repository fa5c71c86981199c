"""Ring: every rank talks to two neighbours, and every byte crosses the wire as rarely as it can.

The vector is cut into p chunks. In p-1 rounds each rank passes a partial sum to the right and adds
what comes from the left; then the finished chunks go once around.

    4 ranks, chunks a b c d; rank r owns chunk r at the end of the reduce-scatter
    round 0    0 -d-> 1 -a-> 2 -b-> 3 -c-> 0
    round 1    0 -c-> 1 -d-> 2 -a-> 3 -b-> 0
    round 2    0 -b-> 1 -c-> 2 -d-> 3 -a-> 0      now rank r holds the sum of chunk r
    round 3-5  the same walk with finished chunks (allgather)

Cost: 2(p-1) alpha + 2(p-1)/p N beta + (p-1)/p N gamma: the lower bound in bytes, any p.
Chunks travel in segments, so that the wire is busy while a segment is being added.
Patarasuk and Yuan, JPDC 69(2), 2009, doi 10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...partition import BlockPartition, bounds_of
from .schedule import Step, combine, cut, length, recv, send


def reduce_scatter(size: int, rank: int, counts: Sequence[int], *, segments: int = 1) -> list[Step]:
    """Rank r ends with the sum of block r of uneven blocks `counts`, in place in the vector."""
    blocks = list(itertools.pairwise(bounds_of(counts)))
    scratch = blocks[-1][1]
    right, left = (rank + 1) % size, (rank - 1) % size
    steps: list[Step] = []
    for round in range(size - 1):
        outgoing = blocks[(rank - round - 1) % size]
        incoming = blocks[(rank - round - 2) % size]
        steps += [send(round, right, part) for part in cut(outgoing, segments)]
        for part in cut(incoming, segments):
            # Every round receives into scratch of its own: all receives can be posted at once.
            slot = (scratch, scratch + length(part))
            scratch = slot[1]
            steps.append(recv(round, left, slot))
            steps.append(combine(round, rank, left, slot, part))
    return steps


def allgather(
    size: int, rank: int, counts: Sequence[int], *, segments: int = 1, first_round: int = 0
) -> list[Step]:
    """Every rank ends with all blocks; rank r begins with block r in its place."""
    blocks = list(itertools.pairwise(bounds_of(counts)))
    right, left = (rank + 1) % size, (rank - 1) % size
    steps: list[Step] = []
    for round in range(size - 1):
        outgoing = blocks[(rank - round) % size]
        incoming = blocks[(rank - round - 1) % size]
        steps += [send(first_round + round, right, part) for part in cut(outgoing, segments)]
        steps += [recv(first_round + round, left, part) for part in cut(incoming, segments)]
    return steps


def allreduce(size: int, rank: int, n: int, *, segments: int = 1) -> list[Step]:
    """Reduce-scatter, then allgather, over p nearly equal chunks."""
    counts = BlockPartition(n, size).counts()
    return reduce_scatter(size, rank, counts, segments=segments) + allgather(
        size, rank, counts, segments=segments, first_round=size - 1
    )
