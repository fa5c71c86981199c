"""Without clever routes: everyone to everyone, or everyone to one root.

direct     every rank sends its whole vector to every other: k(k-1) G bytes in total, one round.
           Alpha + (p-1) N beta: fine for a handful of ranks and a few bytes, ruinous otherwise.
two_hop    reduce_scatter and allgather, each of them direct: 2(p-1)/p N bytes as the ring, in two
           rounds of p-1 messages instead of 2(p-1) rounds of one. 2 alpha + 2(p-1)/p N beta, where
           the network takes p-1 messages at once; least waiting where progress is rare (overlap).
naive      reduce to rank 0 in rank order, rank 0 sends the result to each: the definition of
           allreduce and the oracle for all others; 2(p-1) N bytes through one rank.

    direct, 4 ranks:   0<->1  0<->2  0<->3  1<->2  1<->3  2<->3     all in round 0
    naive,  4 ranks:   1->0  2->0  3->0                  then 0->1  0->2  0->3

The rooted and blockwise forms (gather, scatter, allgather, reduce_scatter) are here as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...partition import BlockPartition, bounds_of
from .schedule import REDUCE, Range, Step, copy, length, recv, send


def allreduce(size: int, rank: int, n: int) -> list[Step]:
    """Everyone gets every vector and adds them in rank order, so all get the same bits."""
    if size == 1:
        return []
    whole: Range = (0, n)
    return _exchange(size, rank, [whole] * size, whole, n)


def reduce_scatter(size: int, rank: int, counts: Sequence[int]) -> list[Step]:
    """Rank r gets everyone's block r and adds them in rank order."""
    if size == 1:
        return []
    bounds = bounds_of(counts)
    blocks = list(itertools.pairwise(bounds))
    return _exchange(size, rank, blocks, blocks[rank], bounds[-1])


def _exchange(size: int, rank: int, outgoing: list[Range], home: Range, n: int) -> list[Step]:
    width = length(home)
    slots = [(n + q * width, n + (q + 1) * width) for q in range(size)]
    others = [(rank + k) % size for k in range(1, size)]
    steps = [send(0, q, outgoing[q]) for q in others]
    steps += [recv(0, q, slots[q]) for q in reversed(others)]
    # x0 + x1 + x2 + ... whoever adds: the sum grows in slot 0 (or at home on rank 0).
    total = home if rank == 0 else slots[0]
    for q in range(1, size):
        steps.append(Step(0, REDUCE, q, home if q == rank else slots[q], total))
    if rank:
        steps.append(copy(0, total, home))
    return steps


def allgather(size: int, rank: int, counts: Sequence[int], *, first_round: int = 0) -> list[Step]:
    """Everyone sends its block to everyone."""
    blocks = list(itertools.pairwise(bounds_of(counts)))
    others = [(rank + k) % size for k in range(1, size)]
    steps = [send(first_round, q, blocks[rank]) for q in others]
    return steps + [recv(first_round, q, blocks[q]) for q in reversed(others)]


def two_hop(size: int, rank: int, n: int) -> list[Step]:
    """Everyone adds one block and sends it to everyone: two rounds, and the bytes of a ring."""
    counts = BlockPartition(n, size).counts()
    scattered = reduce_scatter(size, rank, counts)
    return scattered + allgather(size, rank, counts, first_round=1)


def reduce(size: int, rank: int, n: int, *, root: int = 0) -> list[Step]:
    """Everyone sends to the root, which adds in rank order."""
    if rank != root:
        return [send(0, root, (0, n))]
    steps: list[Step] = []
    slots = {q: (n + q * n, n + (q + 1) * n) for q in range(size) if q != root}
    steps += [recv(0, q, slot) for q, slot in slots.items()]
    total = (0, n) if root == 0 else slots[0]
    for q in range(1, size):
        steps.append(Step(0, REDUCE, q, (0, n) if q == root else slots[q], total))
    if root != 0:
        steps.append(copy(0, total, (0, n)))
    return steps


def broadcast(size: int, rank: int, n: int, *, root: int = 0, first_round: int = 0) -> list[Step]:
    """The root sends to everyone."""
    if rank == root:
        return [send(first_round, q, (0, n)) for q in range(size) if q != root]
    return [recv(first_round, root, (0, n))]


def naive(size: int, rank: int, n: int) -> list[Step]:
    """Allreduce as it is defined: reduce to rank 0, then broadcast from rank 0."""
    return reduce(size, rank, n) + broadcast(size, rank, n, first_round=1)


def gather(size: int, rank: int, counts: Sequence[int], *, root: int = 0) -> list[Step]:
    """The root ends with all blocks; rank r begins with block r in its place in the vector."""
    bounds = bounds_of(counts)
    if rank != root:
        return [send(0, root, (bounds[rank], bounds[rank + 1]))]
    return [recv(0, q, (bounds[q], bounds[q + 1])) for q in range(size) if q != root]


def scatter(size: int, rank: int, counts: Sequence[int], *, root: int = 0) -> list[Step]:
    """Rank r ends with block r of the root's vector, in its place."""
    bounds = bounds_of(counts)
    if rank == root:
        return [send(0, q, (bounds[q], bounds[q + 1])) for q in range(size) if q != root]
    return [recv(0, root, (bounds[rank], bounds[rank + 1]))]
