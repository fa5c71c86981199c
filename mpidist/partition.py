"""Who owns which part: pure arithmetic, no MPI.

    elements 0 1 2 3 4 5 6 7 8 9      BlockPartition(10, 4)
    block    |  0  |  1  | 2 | 3 |    bounds 0 3 6 8 10

The first ``count % parts`` blocks are one element longer, so blocks differ by one at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class BlockPartition(NamedTuple):
    """Cut `count` elements into `parts` contiguous blocks whose lengths differ by one at most.

    `count` may be smaller than `parts`; the last blocks are then empty.
    """

    count: int  # type: ignore[assignment]  # tuple.count is not missed
    parts: int

    def start(self, part: int) -> int:
        """First element of block `part`; ``start(parts)`` is `count`."""
        base, extra = divmod(self.count, self.parts)
        return part * base + min(part, extra)

    def size(self, part: int) -> int:
        """Number of elements of block `part`."""
        return self.start(part + 1) - self.start(part)

    def range(self, part: int) -> tuple[int, int]:
        """(start, stop) of block `part`."""
        return self.start(part), self.start(part + 1)

    def bounds(self) -> list[int]:
        """All ``parts + 1`` block bounds."""
        base, extra = divmod(self.count, self.parts)
        long = extra * (base + 1)
        # Both kinds of blocks are strides; those of no elements all begin, and end, at `count`.
        rest = range(long, self.count + 1, base) if base else [long] * (self.parts - extra + 1)
        return [*range(0, long, base + 1), *rest]

    def counts(self) -> list[int]:
        """All block lengths."""
        base, extra = divmod(self.count, self.parts)
        return [base + 1] * extra + [base] * (self.parts - extra)

    def owner(self, element: int) -> int:
        """Block that holds `element`."""
        base, extra = divmod(self.count, self.parts)
        long = extra * (base + 1)
        if element < long:
            return element // (base + 1)
        return extra + (element - long) // base


def bounds_of(counts: Sequence[int]) -> list[int]:
    """Running sum of `counts`, beginning with 0: the bounds of uneven blocks."""
    return list(itertools.accumulate(counts, initial=0))


def overlaps(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (old block, new block, start, stop) of every non-empty overlap of two partitions.

    `old` and `new` are bounds of the same range, ascending; the cost is the number of
    blocks, not of elements.
    """
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
    """Cut a range into consecutive pieces of at most `limit` elements."""
    while start < stop:
        end = min(start + limit, stop)
        yield start, end
        start = end
