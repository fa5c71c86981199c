"""One order of additions for any number of ranks: the fixed tree over V pieces.

The tree is cut where binary numbers are: a node of more than one piece is split at the largest
power of two below its length. It knows V and nothing of ranks.

    V = 6      ((0 + 1) + (2 + 3)) + (4 + 5)
               3 ranks hold  0 1 | 2 3 | 4 5        one node each: three partial sums
               4 ranks hold  0 1 | 2 3 | 4 | 5      four
               2 ranks hold  0 1 2 | 3 4 5          (0 + 1), 2 | 3, (4 + 5): four

A rank holds a contiguous range of pieces and adds up, alone, every node that lies wholly in it:
at most 2 log2 V partial sums are left, one or two for a sensible V. Then the ranks

    direct    each owns a block of the elements, is given that block of all partial sums, adds
              them in the order of the tree, and gives the total to everyone:
              two rounds; k (p-1)/p N sent for k partial sums, plus (p-1)/p N; 2(p-1) messages
              where each rank has one partial sum, which is then the traffic of the ring;
    halving   where the ranks' partial sums are a whole binary tree themselves, neighbours first:
              2 log2 p messages, 2(p-1)/p N. Short vectors are exchanged whole, log2 p messages;
    on_slots  where all ranks are on one node and keep their partial sums in memory they share:
              each owner adds its block of them where they lie, and writes the total to everyone;
    reduce    one piece per rank, for one root: up the tree itself, log2 p rounds of a whole vector.

All forms compute ``left op right`` for the same nodes, so they give the same bits, and so does
one process that adds up all pieces. With one piece per rank this is an ordinary allreduce whose
bits depend on p alone: not on the algorithm, the vector's length or the nodes.

Demmel and Nguyen, Parallel Reproducible Summation, IEEE Trans. Comput. 64(7), 2015, make sums
independent of the tree as well, at several times the additions; here the tree is what is fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...partition import BlockPartition
from . import butterfly
from .protocol_limits import SHORT
from .schedule import (
    NODE_SYNC,
    NOTHING,
    REDUCE,
    Range,
    Step,
    combine,
    copy,
    cut,
    length,
    recv,
    send,
)


def cuts(pieces: int, ranks: int) -> list[int]:
    """Return the ``ranks + 1`` bounds of the ranks' ranges of pieces.

    No rank has more than it must, ``ceil(pieces / ranks)``, for the slowest one makes the pace.
    Within that, ranges end where the tree is cut most deeply, so that few partial sums are left;
    the last ranks may have fewer pieces than the others, or none.
    """
    most = -(-pieces // ranks)
    bounds = [0]
    for later in range(ranks - 1, -1, -1):
        low, high = max(bounds[-1] + 1, pieces - later * most), bounds[-1] + most
        choice = range(min(low, pieces), min(high, pieces) + 1)
        bounds.append(max(choice, key=lambda bound: bound & -bound))
    return bounds


def push(stack: list[Range], node: Range, pieces: int) -> int:
    """Put the next node on a stack of adjacent ones and join what the tree joins.

    Returns the number of joins: each makes the two topmost nodes one. Whoever pushes all pieces,
    or ranks' partial sums one rank after the other, ends with the root alone.
    """
    stack.append(node)
    joins = 0
    while len(stack) > 1:
        start, middle = stack[-2]
        width = middle - start
        if start % (2 * width) or stack[-1][1] != min(start + 2 * width, pieces):
            break
        stack[-2:] = [(start, stack[-1][1])]
        joins += 1
    return joins


def partials(start: int, stop: int, pieces: int) -> list[Range]:
    """Return the nodes that a rank with the pieces [start, stop) is left with."""
    stack: list[Range] = []
    for piece in range(start, stop):
        push(stack, (piece, piece + 1), pieces)
    return stack


def vectors_held(start: int, stop: int, pieces: int) -> int:
    """Return how many vectors such a rank holds at most while it adds them up; 1 for none."""
    stack: list[Range] = []
    most = 1
    for piece in range(start, stop):
        most = max(most, len(stack) + 1)
        push(stack, (piece, piece + 1), pieces)
    return most


def reduce(size: int, rank: int, n: int, *, root: int = 0) -> list[Step]:
    """The root gets the sum over the ranks in the order of the tree over `size` pieces.

    The root holds each node that it is in, the lowest rank every other; so which rank is the root
    changes who adds, never what is added. Costs as much as the binomial tree.
    """
    steps: list[Step] = []
    scratch = n
    for round in range(max(size - 1, 0).bit_length()):
        start = rank >> (round + 1) << (round + 1)
        middle, stop = start + (1 << round), min(start + (2 << round), size)
        if middle >= size:
            continue  # the node is its left half
        left = root if start <= root < middle else start
        right = root if middle <= root < stop else middle
        holder, other = (right, left) if root == right else (left, right)
        if rank == other:
            steps.append(send(round, holder, (0, n)))
            break
        slot = (scratch, scratch + n)
        scratch += n
        # `combine` puts the lower rank's operand on the left, and that is the left half's.
        steps += [recv(round, other, slot), combine(round, rank, other, slot, (0, n))]
    return steps


def allreduce(size: int, rank: int, n: int, *, segments: int = 1, itemsize: int = 4) -> list[Step]:
    """Everyone gets the sum over the ranks in the order of the tree over `size` pieces."""
    return piecewise(size, rank, n, size, segments=segments, itemsize=itemsize)


def piecewise(
    size: int,
    rank: int,
    n: int,
    pieces: int,
    *,
    votes: int = 0,
    segments: int = 1,
    itemsize: int = 4,
) -> list[Step]:
    """Everyone gets the sum over all pieces in ``[0, n)``.

    A rank with k partial sums holds them one after the other in ``[0, k n)``. The last `votes`
    elements also count a rank that has no pieces: its numbers there, in ``[n - votes, n)``, are
    added to the total. `segments` cuts blocks, so that adding overlaps the wire.
    """
    if size == 1:
        return []
    bounds = cuts(pieces, size)
    nodes = [partials(*span, pieces) for span in itertools.pairwise(bounds)]
    if _is_binary_tree(nodes, pieces):
        everyone = list(range(size))
        if n * itemsize < SHORT or n < size:
            return butterfly.doubling(size, rank, n, everyone, n, 0)
        return butterfly.halving(
            size, rank, n, everyone, n, 0, neighbours_first=True, itemsize=itemsize
        )
    return _direct(size, rank, n, pieces, nodes, votes, segments)


def _is_binary_tree(nodes: Sequence[Sequence[Range]], pieces: int) -> bool:
    """Whether each rank has one partial sum, and they are joined as 2^k pieces would be."""
    size = len(nodes)
    if size & (size - 1) or any(len(held) != 1 for held in nodes):
        return False
    stack: list[Range] = []
    ranks: list[Range] = []
    return all(
        push(stack, held[0], pieces) == push(ranks, (rank, rank + 1), size)
        for rank, held in enumerate(nodes)
    )


def _direct(size, rank, n, pieces, nodes, votes, segments) -> list[Step]:
    blocks = [
        cut(block, segments) for block in itertools.pairwise(BlockPartition(n, size).bounds())
    ]
    others = [(rank + k) % size for k in range(1, size)]
    counted: Range = (n - votes, n)
    steps: list[Step] = []
    # Round 0: blocks of partial sums to their owners. Both ends go through the segments first and
    # the partial sums second, so messages between two ranks match in posting order.
    for q in others:
        for a, b in blocks[q]:
            if nodes[rank]:
                held = range(len(nodes[rank]))
                steps += [send(0, q, (row * n + a, row * n + b)) for row in held]
            else:
                steps.append(send(0, q, _common((a, b), counted)))
    scratch = n * max(len(nodes[rank]), 1)
    for home in blocks[rank]:
        width = length(home)
        slots: dict[int, list[Range]] = {}
        for q in reversed(others):
            slots[q] = []
            for _ in nodes[q] or [None]:
                arriving = width if nodes[q] else length(_common(home, counted))
                slots[q].append((scratch, scratch + arriving))
                steps.append(recv(0, q, slots[q][-1]))
                scratch += arriving
        slots[rank] = _places(nodes[rank], n, home, counted)
        added, total = _add_up(pieces, nodes, slots, home, counted)
        steps += added if total == home else [*added, copy(0, total, home)]
    # Round 1: the total of each block from its owner to everyone.
    steps += [send(1, q, home) for home in blocks[rank] for q in others]
    steps += [recv(1, q, block) for q in reversed(others) for block in blocks[q]]
    return steps


def on_slots(
    size: int, rank: int, n: int, pieces: int, stride: int, piece: int, *, votes: int = 0
) -> list[Step]:
    """`piecewise` in memory of the node: rank r's partial sums lie from ``r * stride`` on.

    The total replaces the first of every rank's. Between the two syncs a block is its owner's on
    all slots, so nobody else reads or writes it; before and after, a slot is its rank's.
    """
    nodes = [partials(*span, pieces) for span in itertools.pairwise(cuts(pieces, size))]
    counted: Range = (n - votes, n)
    start, stop = BlockPartition(n, size).range(rank)
    steps = [Step(0, NODE_SYNC, -1, NOTHING, NOTHING)]
    for first in range(start, stop, piece):
        home = first, min(first + piece, stop)
        slots = {q: _places(nodes[q], n, home, counted, q * stride) for q in range(size)}
        added, total = _add_up(pieces, nodes, slots, home, counted)
        everyone = [(q * stride + home[0], q * stride + home[1]) for q in range(size)]
        steps += [*added, *(copy(0, total, place) for place in everyone if place != total)]
    return [*steps, Step(0, NODE_SYNC, -1, NOTHING, NOTHING)]


def _places(held, n: int, home: Range, counted: Range, start: int = 0) -> list[Range]:
    """Return where `home` lies in each partial sum of a rank, or in its votes where it has none."""
    if not held:
        home = _common(home, counted)
    rows = range(max(len(held), 1))
    return [(start + row * n + home[0], start + row * n + home[1]) for row in rows]


def _add_up(pieces, nodes, slots, home, counted) -> tuple[list[Step], Range]:
    """Add the partial sums of one range in the order of the tree, each node into its left half.

    Returns the steps, and where the total then lies.
    """
    steps: list[Step] = []
    stack: list[Range] = []
    places: list[Range] = []
    for q, held in enumerate(nodes):
        for node, place in zip(held, slots[q], strict=False):
            places.append(place)
            for _ in range(push(stack, node, pieces)):
                right = places.pop()
                steps.append(Step(0, REDUCE, q, right, places[-1]))
    total = places[0]
    here = _common(home, counted)
    for q, held in enumerate(nodes):
        if not held and length(here):
            shifted = (total[0] + here[0] - home[0], total[0] + here[1] - home[0])
            steps.append(Step(0, REDUCE, q, slots[q][0], shifted))
    return steps, total


def _common(a: Range, b: Range) -> Range:
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))
