"""Partitions of an index range into contiguous blocks, computed without MPI.

    elements 0 1 2 3 4 5 6 7 8 9      BlockPartition(10, 4)
    block    |  0  |  1  | 2 | 3 |    bounds 0 3 6 8 10

The first ``count % parts`` blocks are one element longer than the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class BlockPartition(NamedTuple):
    """A partition of `count` elements into `parts` contiguous blocks of nearly equal length.

    If `count` is less than `parts`, the last blocks are empty.
    """

    count: int  # type: ignore[assignment]  # hides the method tuple.count
    parts: int

    def start(self, part: int) -> int:
        """Return the index of the first element of block `part`; ``start(parts)`` is `count`."""
        base, extra = divmod(self.count, self.parts)
        return part * base + min(part, extra)

    def size(self, part: int) -> int:
        """Return the number of elements of block `part`."""
        return self.start(part + 1) - self.start(part)

    def range(self, part: int) -> tuple[int, int]:
        """Return (start, stop) of block `part`."""
        return self.start(part), self.start(part + 1)

    def bounds(self) -> list[int]:
        """Return the ``parts + 1`` bounds: the start of each block, and the end of the last."""
        base, extra = divmod(self.count, self.parts)
        long = extra * (base + 1)
        # Blocks of equal length have equally spaced bounds. All empty blocks begin and end at
        # `count`.
        rest = range(long, self.count + 1, base) if base else [long] * (self.parts - extra + 1)
        return [*range(0, long, base + 1), *rest]

    def counts(self) -> list[int]:
        """Return the lengths of all blocks."""
        base, extra = divmod(self.count, self.parts)
        return [base + 1] * extra + [base] * (self.parts - extra)

    def owner(self, element: int) -> int:
        """Return the number of the block that contains the element with index `element`."""
        base, extra = divmod(self.count, self.parts)
        long = extra * (base + 1)
        if element < long:
            return element // (base + 1)
        return extra + (element - long) // base


def bounds_of(counts: Sequence[int]) -> list[int]:
    """Return the bounds of blocks with the lengths `counts`: running sums that begin with 0."""
    return list(itertools.accumulate(map(int, counts), initial=0))  # sums of int32 could overflow


def overlaps(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (old block, new block, start, stop) of every non-empty overlap of two partitions."""
    i = j = 0
    while i < len(old) - 1 and j < len(new) - 1:
        start, stop = max(old[i], new[j]), min(old[i + 1], new[j + 1])
        if start < stop:
            yield i, j, start, stop
        if old[i + 1] <= new[j + 1]:
            i += 1
        else:
            j += 1


def pieces(start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive pieces of a range, each of at most `limit` elements."""
    while start < stop:
        end = min(start + limit, stop)
        yield start, end
        start = end
