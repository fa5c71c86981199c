"""Ring: each rank sends only to its right neighbour.

The vector is cut into p chunks, one for each of the p ranks. In the first p-1 rounds, each rank
sends a partial sum of one chunk to its right neighbour, and adds its own values to the partial sum
that comes from the left. In the last p-1 rounds, the finished chunks travel once around the ring.

    4 ranks, chunks a b c d; rank r owns chunk r at the end of the reduce-scatter
    round 0    0 -d-> 1 -a-> 2 -b-> 3 -c-> 0
    round 1    0 -c-> 1 -d-> 2 -a-> 3 -b-> 0
    round 2    0 -b-> 1 -c-> 2 -d-> 3 -a-> 0      now rank r holds the sum of chunk r
    round 3-5  the finished chunks move on in the same way (allgather)

For vectors of N bytes on p ranks, the cost is 2(p-1) alpha + 2(p-1)/p N beta + (p-1)/p N gamma. In
this formula, alpha is the latency of a message, beta the time to send a byte, and gamma the time to
add a byte. No allreduce algorithm can send fewer bytes per rank than the ring. Patarasuk and Yuan,
JPDC 69(2), 2009, doi 10.1016/j.jpdc.2008.09.002.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...partition import BlockPartition, bounds_of
from .schedule import Step, combine, length, recv, send, split_range


def reduce_scatter(size: int, rank: int, counts: Sequence[int], *, segments: int = 1) -> list[Step]:
    """Return steps that give rank r the sum of block r; `counts` are the lengths of the blocks.

    Each block is sent in `segments` messages, so that one is sent while another is added.
    """
    blocks = list(itertools.pairwise(bounds_of(counts)))
    scratch = blocks[-1][1]
    right, left = (rank + 1) % size, (rank - 1) % size
    steps: list[Step] = []
    for round in range(size - 1):
        outgoing = split_range(blocks[(rank - round - 1) % size], segments)
        steps += [send(round, right, part) for part in outgoing]
        for part in split_range(blocks[(rank - round - 2) % size], segments):
            # Every round receives into its own scratch memory, so all receives can be posted at the
            # start.
            slot = (scratch, scratch + length(part))
            scratch = slot[1]
            steps += [recv(round, left, slot), combine(round, rank, left, slot, part)]
    return steps


def allgather(
    size: int, rank: int, counts: Sequence[int], *, segments: int = 1, first_round: int = 0
) -> list[Step]:
    """Return steps that give every rank all blocks; at the start, rank r has only block r.

    `counts` are the lengths of the blocks, each of which is sent in `segments` messages.
    """
    blocks = [split_range(block, segments) for block in itertools.pairwise(bounds_of(counts))]
    right, left = (rank + 1) % size, (rank - 1) % size
    steps: list[Step] = []
    for k in range(size - 1):
        steps += [send(first_round + k, right, part) for part in blocks[(rank - k) % size]]
        steps += [recv(first_round + k, left, part) for part in blocks[(rank - k - 1) % size]]
    return steps


def allreduce(size: int, rank: int, n: int, *, segments: int = 1) -> list[Step]:
    """Return the steps of a reduce-scatter and an allgather over p nearly equal chunks."""
    counts = BlockPartition(n, size).counts()
    return reduce_scatter(size, rank, counts, segments=segments) + allgather(
        size, rank, counts, segments=segments, first_round=size - 1
    )
