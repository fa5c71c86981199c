"""Add V pieces (vectors) in the order of one fixed binary tree, on any number of ranks.

A tree node that covers k > 1 pieces has two children, and the left child covers as many pieces as
the largest power of two below k.

    V = 6      ((0 + 1) + (2 + 3)) + (4 + 5)
               3 ranks hold  0 1 | 2 3 | 4 5        one node each: three partial sums
               4 ranks hold  0 1 | 2 3 | 4 | 5      four partial sums
               2 ranks hold  0 1 2 | 3 4 5          (0 + 1), 2 | 3, (4 + 5): four partial sums

Each rank has a contiguous range of the V pieces. For every tree node whose pieces are all on one
rank, this rank computes the sum without messages. The ranks then add their partial sums in one of
these ways, all of which give the same bits:

    direct:   The owner of a block of elements receives this block of all partial sums, adds these,
              and sends the total to all ranks. A rank with k partial sums of N bytes sends
              (k + 1) (p-1)/p N bytes in two rounds.

    halving:  If each rank has one partial sum and p is a power of two, the ranks exchange halves
              of the vector, neighbours first. Each rank sends 2(p-1)/p N bytes in 2 log2 p
              messages. Short vectors are exchanged whole, in log2 p messages.

    on_slots: If all ranks are on one node, each rank adds its block of all partial sums in shared
              memory, and copies the total to every rank.

    reduce:   If only one root needs the sum and each rank has one piece, the ranks send whole
              vectors up the tree, in log2 p rounds.

Demmel and Nguyen ("Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), 2015)
describe sums that have the same bits for every order of the additions, but need several times as
many additions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...partition import BlockPartition
from . import butterfly
from .protocol_limits import SHORT
from .schedule import REDUCE, Range, Step, combine, copy, length, node_sync, recv, send, split_range


def cuts(pieces: int, ranks: int) -> list[int]:
    """Return ``ranks + 1`` bounds; rank r gets the vectors from bound r up to bound r + 1.

    No rank gets more than ``ceil(pieces / ranks)`` pieces (vectors).
    """
    most = -(-pieces // ranks)
    bounds = [0]
    for later in range(ranks - 1, -1, -1):
        low, high = max(bounds[-1] + 1, pieces - later * most), bounds[-1] + most
        choice = range(min(low, pieces), min(high, pieces) + 1)
        bounds.append(max(choice, key=lambda bound: bound & -bound))
    return bounds


def push(stack: list[Range], node: Range, pieces: int) -> int:
    """Push a tree node on a stack; while the two topmost nodes have the same parent, merge them.

    Returns the number of merges; each merge replaces the two topmost nodes by their parent.
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
    """Return the sums that a rank can form from its own pieces (vectors), without messages.

    The pieces have the numbers `start` to ``stop - 1``. Each sum is given as its range of pieces.
    """
    stack: list[Range] = []
    for piece in range(start, stop):
        push(stack, (piece, piece + 1), pieces)
    return stack


def vectors_held(start: int, stop: int, pieces: int) -> int:
    """Return how many vectors a rank must keep in memory at one time while it adds vectors.

    It adds the vectors `start` to ``stop - 1`` of `pieces` vectors, in the order of a binary tree.
    """
    stack: list[Range] = []
    most = 1
    for piece in range(start, stop):
        most = max(most, len(stack) + 1)
        push(stack, (piece, piece + 1), pieces)
    return most


def reduce(size: int, rank: int, n: int, *, root: int = 0) -> list[Step]:
    """Return steps that give the root the sum of all ranks' vectors, added in a fixed order.

    The order is that of a binary tree whose leaves are the ranks' vectors. It does not depend on
    the root.
    """
    steps: list[Step] = []
    scratch = n
    for round in range(max(size - 1, 0).bit_length()):
        start = rank >> (round + 1) << (round + 1)
        middle, stop = start + (1 << round), min(start + (2 << round), size)
        if middle >= size:
            continue  # this node has no right half
        left = root if start <= root < middle else start
        right = root if middle <= root < stop else middle
        holder, other = (right, left) if root == right else (left, right)
        if rank == other:
            steps.append(send(round, holder, (0, n)))
            break
        slot = (scratch, scratch + n)
        scratch += n
        # `combine` puts the lower rank's operand on the left, and the left half has lower ranks.
        steps += [recv(round, other, slot), combine(round, rank, other, slot, (0, n))]
    return steps


def allreduce(size: int, rank: int, n: int, *, segments: int = 1, itemsize: int = 4) -> list[Step]:
    """Return steps that give every rank the sum of all ranks' vectors, added in a fixed order.

    The order is that of a binary tree whose leaves are the ranks' vectors.
    """
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
    """Return steps that give every rank the sum over all pieces (vectors), at positions ``[0, n)``.

    A rank with k partial sums holds them one after the other at the positions ``[0, k n)``. The
    last `votes` of the n elements are not parts of pieces: each rank passes its own numbers there,
    which are added over all ranks. A rank without pieces has only these numbers.
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
    """Whether 2^k ranks have one partial sum each, which the tree adds as a perfect binary tree."""
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
        split_range(block, segments)
        for block in itertools.pairwise(BlockPartition(n, size).bounds())
    ]
    others = [(rank + k) % size for k in range(1, size)]
    counted: Range = (n - votes, n)
    steps: list[Step] = []
    # In round 0, the ranks send blocks of their partial sums to the owners of the blocks. Sender
    # and receiver both loop over segments first and over partial sums second, so the messages
    # between two ranks match in the order in which they are posted.
    for q in others:
        for block in blocks[q]:
            steps += [send(0, q, place) for place in _places(nodes[rank], n, block, counted)]
    scratch = n * max(len(nodes[rank]), 1)
    for home in blocks[rank]:
        slots = {rank: _places(nodes[rank], n, home, counted)}
        for q in reversed(others):
            slots[q] = []
            for place in _places(nodes[q], n, home, counted):
                slots[q].append((scratch, scratch + length(place)))
                steps.append(recv(0, q, slots[q][-1]))
                scratch += length(place)
        added, total = _add_up(pieces, nodes, slots, home, counted)
        steps += added if total == home else [*added, copy(0, total, home)]
    # In round 1, the owner of each block sends the total of the block to all ranks.
    steps += [send(1, q, home) for home in blocks[rank] for q in others]
    steps += [recv(1, q, block) for q in reversed(others) for block in blocks[q]]
    return steps


def on_slots(
    size: int, rank: int, n: int, pieces: int, stride: int, piece: int, *, votes: int = 0
) -> list[Step]:
    """Return steps that add all ranks' partial sums in the memory that the ranks of a node share.

    The partial sums of rank r begin at position ``r * stride``, and `piece` is the largest number
    of elements that are added at a time. The total replaces the first partial sum of every rank.
    """
    nodes = [partials(*span, pieces) for span in itertools.pairwise(cuts(pieces, size))]
    counted: Range = (n - votes, n)
    start, stop = BlockPartition(n, size).range(rank)
    steps = [node_sync(0)]
    for first in range(start, stop, piece):
        home = first, min(first + piece, stop)
        slots = {q: _places(nodes[q], n, home, counted, q * stride) for q in range(size)}
        added, total = _add_up(pieces, nodes, slots, home, counted)
        targets = [(q * stride + home[0], q * stride + home[1]) for q in range(size)]
        steps += [*added, *(copy(0, total, target) for target in targets if target != total)]
    return [*steps, node_sync(0)]


def _places(held, n: int, home: Range, counted: Range, start: int = 0) -> list[Range]:
    """Return where the range `home` of elements lies in each partial sum (`held`) of a rank."""
    if not held:
        home = _common(home, counted)
    rows = range(max(len(held), 1))
    return [(start + row * n + home[0], start + row * n + home[1]) for row in rows]


def _add_up(pieces, nodes, slots, home, counted) -> tuple[list[Step], Range]:
    """Return steps that add the partial sums of the elements `home`, and the place of the total.

    `nodes` are the tree nodes whose sums each rank has, and `slots` the positions of these sums.
    The elements `counted` are numbers of every rank, even of a rank without partial sums.
    """
    steps: list[Step] = []
    stack: list[Range] = []
    places: list[Range] = []
    for q, held in enumerate(nodes):
        for node, place in zip(held, slots[q], strict=False):
            places.append(place)
            for _ in range(push(stack, node, pieces)):
                steps.append(Step(0, REDUCE, q, places.pop(), places[-1]))
    total = places[0]
    here = _common(home, counted)
    for q, held in enumerate(nodes):
        if not held and length(here):
            shifted = (total[0] + here[0] - home[0], total[0] + here[1] - home[0])
            steps.append(Step(0, REDUCE, q, slots[q][0], shifted))
    return steps, total


def _common(a: Range, b: Range) -> Range:
    """Return the range of positions that lie in both `a` and `b`; it may be empty."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))
