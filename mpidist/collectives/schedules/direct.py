"""Direct exchange: every rank sends to every other rank, or all ranks send to one root.

In the costs, alpha is the latency of a message, and beta the time to send a byte. In `direct`, each
of p ranks sends its whole vector of N bytes to every other rank, in one round, which costs alpha +
(p-1) N beta. `two_hop` is a direct reduce-scatter and then a direct allgather. If the network can
carry p-1 messages of a rank at the same time, `two_hop` costs 2 alpha + 2(p-1)/p N beta. In
`naive`, rank 0 adds all vectors in rank order and sends the result to each rank. Tests compare all
other algorithms with `naive`.

    direct, 4 ranks:   0<->1  0<->2  0<->3  1<->2  1<->3  2<->3     all in round 0
    naive,  4 ranks:   1->0  2->0  3->0                  then 0->1  0->2  0->3
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...partition import BlockPartition, bounds_of
from .schedule import REDUCE, Range, Step, copy, length, recv, send


def allreduce(size: int, rank: int, n: int) -> list[Step]:
    """Return steps in which every rank receives all vectors and adds them in rank order."""
    return _exchange(size, rank, [(0, n)] * size, (0, n), n)


def reduce_scatter(size: int, rank: int, counts: Sequence[int]) -> list[Step]:
    """Return steps in which rank r receives block r of every rank and adds these in rank order.

    `counts` are the lengths of the blocks of all ranks.
    """
    bounds = bounds_of(counts)
    blocks = list(itertools.pairwise(bounds))
    return _exchange(size, rank, blocks, blocks[rank], bounds[-1])


def _exchange(size: int, rank: int, outgoing: list[Range], home: Range, n: int) -> list[Step]:
    """Return steps that send ``outgoing[q]`` to each rank q and add received data in rank order.

    The sum is put into the range `home` of the vector.
    """
    slots = _slots(size, n, length(home))
    others = [(rank + k) % size for k in range(1, size)]
    steps = [send(0, q, outgoing[q]) for q in others]
    steps += [recv(0, q, slots[q]) for q in reversed(others)]
    return steps + _add_in_rank_order(size, rank, slots, home)


def _slots(size: int, n: int, width: int) -> list[Range]:
    """Return, for each rank q, the positions in scratch memory that receive the message of q."""
    return [(n + q * width, n + (q + 1) * width) for q in range(size)]


def _add_in_rank_order(size: int, rank: int, slots: list[Range], home: Range) -> list[Step]:
    """Return steps that add all ranks' data in rank order and put the sum into the range `home`."""
    total = home if rank == 0 else slots[0]
    places = [*slots[:rank], home, *slots[rank + 1 :]]
    steps = [Step(0, REDUCE, q, places[q], total) for q in range(1, size)]
    return [*steps, copy(0, total, home)] if rank else steps


def allgather(size: int, rank: int, counts: Sequence[int], *, first_round: int = 0) -> list[Step]:
    """Return steps in which every rank sends its block to every other rank.

    `counts` are the lengths of all blocks.
    """
    blocks = list(itertools.pairwise(bounds_of(counts)))
    others = [(rank + k) % size for k in range(1, size)]
    steps = [send(first_round, q, blocks[rank]) for q in others]
    return steps + [recv(first_round, q, blocks[q]) for q in reversed(others)]


def two_hop(size: int, rank: int, n: int) -> list[Step]:
    """Return steps in which every rank sums one block over all ranks, then sends the sum to all."""
    counts = BlockPartition(n, size).counts()
    scattered = reduce_scatter(size, rank, counts)
    return scattered + allgather(size, rank, counts, first_round=1)


def reduce(size: int, rank: int, n: int, *, root: int = 0) -> list[Step]:
    """Return steps in which all ranks send to the root, which adds in rank order."""
    if rank != root:
        return [send(0, root, (0, n))]
    slots = _slots(size, n, n)
    steps = [recv(0, q, slots[q]) for q in range(size) if q != root]
    return steps + _add_in_rank_order(size, root, slots, (0, n))


def broadcast(size: int, rank: int, n: int, *, root: int = 0, first_round: int = 0) -> list[Step]:
    """Return steps in which the root sends its vector to every other rank."""
    if rank == root:
        return [send(first_round, q, (0, n)) for q in range(size) if q != root]
    return [recv(first_round, root, (0, n))]


def naive(size: int, rank: int, n: int) -> list[Step]:
    """Return the steps of the simplest allreduce: reduce to rank 0, then broadcast from rank 0."""
    return reduce(size, rank, n) + broadcast(size, rank, n, first_round=1)


def gather(size: int, rank: int, counts: Sequence[int], *, root: int = 0) -> list[Step]:
    """Return steps that give the root all blocks; at the start, rank r has only block r."""
    bounds = bounds_of(counts)
    if rank != root:
        return [send(0, root, (bounds[rank], bounds[rank + 1]))]
    return [recv(0, q, (bounds[q], bounds[q + 1])) for q in range(size) if q != root]


def scatter(size: int, rank: int, counts: Sequence[int], *, root: int = 0) -> list[Step]:
    """Return steps that send each rank its block of the root's vector.

    The block has the same positions in the receiver's vector as in the root's vector. `counts` are
    the lengths of all blocks.
    """
    bounds = bounds_of(counts)
    if rank == root:
        return [send(0, q, (bounds[q], bounds[q + 1])) for q in range(size) if q != root]
    return [recv(0, root, (bounds[rank], bounds[rank + 1]))]
