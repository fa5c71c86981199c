"""An allreduce over two trees at once, with few rounds, and about as many bytes as a ring.

In a binary tree half of the ranks are leaves, which send less than the inner ranks. To give all
ranks equal work, the vector is cut into two halves, and each half has its own tree. No rank is an
inner rank in both trees, so every rank sends at most 2N bytes for a vector of N bytes.

    4 ranks    tree of the first half       tree of the second half
                       3                            0
                     1                                2
                    0 2                              3 1

Each half of the vector is cut into S segments, which follow each other up the tree and down again.
If a message of b bytes takes alpha + b beta seconds, and an addition gamma per byte, then p ranks
need at most (2D + S - 1) (alpha + 2N/S beta) + N gamma, with D = floor(log2 p). Sanders, Speck,
Traeff, Parallel Computing 35(12), 2009, doi 10.1016/j.parco.2009.09.001.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .schedule import REDUCE, Range, Step, length, recv, send, split_range


class TreePlace(NamedTuple):
    """The position of a rank in one tree: its parent (None at the root), children and depth."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


def depth(size: int) -> int:
    """Return the depth of the deepest rank in a tree of p ranks: floor(log2 p)."""
    return size.bit_length() - 1


def tree_place(size: int, rank: int, tree: int) -> TreePlace:
    """Return the position of `rank` in the first (0) or the second (1) tree."""
    x = _number(size, rank, tree)
    above = [y for y in _ancestors(x, size) if y <= size]
    return TreePlace(
        _rank(size, above[0], tree) if above else None,
        tuple(_rank(size, y, tree) for y in _children(x, size)),
        len(above),
    )


def _number(size: int, rank: int, tree: int) -> int:
    if tree == 0:
        return rank + 1
    return size - rank if size % 2 == 0 else (rank + 1) % size + 1


def _rank(size: int, x: int, tree: int) -> int:
    if tree == 0:
        return x - 1
    return size - x if size % 2 == 0 else (x - 2) % size


def _ancestors(x: int, size: int) -> list[int]:
    """Return the numbers of the ancestors of tree node x, nearest first, even above `size`."""
    result = []
    low = x & -x
    while low < 1 << depth(size):
        # The parent of x: its lowest set bit is cleared, and the next higher bit is set.
        x = (x & ~low) | (2 * low)
        low *= 2
        result.append(x)
    return result


def _children(x: int, size: int) -> list[int]:
    low = x & -x
    if low == 1:
        return []
    right = x + low // 2
    # A number above `size` has no rank, so the left child of this number takes its place in the
    # tree.
    while right > size and right > x + 1:
        right = x + (right - x) // 2
    return [x - low // 2] + ([right] if right <= size else [])


def allreduce(size: int, rank: int, n: int, *, segments: int = 1) -> list[Step]:
    """Return steps that reduce each half of the vector up its tree and send the sum back down.

    Each half is cut into `segments` parts, which follow each other through the tree.
    """
    return steps(size, [tree_place(size, rank, tree) for tree in (0, 1)], n, segments)


def steps(size: int, places: Sequence[TreePlace], n: int, segments: int) -> list[Step]:
    """Return the steps of a rank, given its positions in the two trees (`places`)."""
    result: list[Step] = []
    scratch = n
    for (parent, children, level), half in zip(places, ((0, n // 2), (n // 2, n)), strict=True):
        for k, part in enumerate(split_range(half, segments)):
            up, down = depth(size) - level + k, depth(size) + level + k
            for child in children:
                slot: Range = (scratch, scratch + length(part))
                scratch = slot[1]
                result.append(recv(up - 1, child, slot))
                result.append(Step(up - 1, REDUCE, child, slot, part))
            if parent is not None:
                result += [send(up, parent, part), recv(down - 1, parent, part)]
            result += [send(down, child, part) for child in children]
    # The sender and the receiver of a message give the message the same round number. In each round
    # and tree, a rank sends at most one message to another rank. So if steps are sorted by round,
    # both ranks post their messages in the same order. A step depends only on steps of earlier
    # rounds.
    return sorted(result, key=lambda step: step.round)
