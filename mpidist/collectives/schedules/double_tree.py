"""Two binary trees at once: the bytes of a pipeline in the depth of a tree.

In a binary tree half of the ranks are leaves, which send the vector once and receive it once while
the inner ranks do that three times. So the vector is halved and each half has a tree of its own,
such that no rank is an inner one of both: together every rank sends, and receives, at most 2N.

    4 ranks    tree of the first half       tree of the second half
                       3                            0
                     1                                2
                    0 2                              3 1

Ranks stand in the tree in order, numbered from 1: an odd number is a leaf, the parent of x is
found by its lowest set bit. The second tree is the mirror image (p even) or shifted by one (p
odd), which makes inner ranks of leaves. A half travels in segments, up (added on the way) and,
from the root, down again, so that all levels of both trees are busy at the same time.

Cost with S segments in a half, D = floor(log2 p): at most (2D + S - 1) (alpha + 2N/S beta) + N
gamma; with many segments 2N beta for any p, where the ring's latency would grow with p.
Sanders, Speck, Traeff, Parallel Computing 35(12), 2009, doi 10.1016/j.parco.2009.09.001; NCCL
uses such trees since version 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .schedule import REDUCE, Range, Step, cut, length, recv, send


class TreePlace(NamedTuple):
    """Where a rank stands in one tree: ranks above (None at the root) and below, and its depth."""

    parent: int | None
    children: tuple[int, ...]
    depth: int


def depth(size: int) -> int:
    """Depth of the deepest rank: floor(log2 p)."""
    return size.bit_length() - 1


def tree_place(size: int, rank: int, tree: int) -> TreePlace:
    """Return the place of `rank` in tree 0 or 1."""
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
    # Nearest first, in the full tree of which the tree of `size` is a part.
    result = []
    low = x & -x
    while low < 1 << depth(size):
        # Clear the lowest bit and set the next one.
        x = (x & ~low) | (2 * low)
        low *= 2
        result.append(x)
    return result


def _children(x: int, size: int) -> list[int]:
    low = x & -x
    if low == 1:
        return []
    right = x + low // 2
    # What is missing on the way down to the right is skipped: its left child takes its place.
    while right > size and right > x + 1:
        right = x + (right - x) // 2
    return [x - low // 2] + ([right] if right <= size else [])


def allreduce(size: int, rank: int, n: int, *, segments: int = 1) -> list[Step]:
    """Reduce each half up its tree and send it down again, in `segments` segments."""
    return steps(size, [tree_place(size, rank, tree) for tree in (0, 1)], n, segments)


def steps(size: int, places: Sequence[TreePlace], n: int, segments: int) -> list[Step]:
    """Return the steps of a rank that has these places in the two trees."""
    result: list[Step] = []
    scratch = n
    for (parent, children, level), half in zip(places, ((0, n // 2), (n // 2, n)), strict=True):
        for k, part in enumerate(cut(half, segments)):
            up, down = depth(size) - level + k, depth(size) + level + k
            for child in children:
                slot: Range = (scratch, scratch + length(part))
                scratch = slot[1]
                result.append(recv(up - 1, child, slot))
                result.append(Step(up - 1, REDUCE, child, slot, part))
            if parent is not None:
                result += [send(up, parent, part), recv(down - 1, parent, part)]
            result += [send(down, child, part) for child in children]
    # Both ends give a message the same round, and two ranks have at most one message each way per
    # round and tree, so by round they post in the same order; a step needs earlier rounds only.
    return sorted(result, key=lambda step: step.round)
