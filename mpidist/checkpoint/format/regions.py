"""Which part of a global array a piece is: boxes and flat ranges, and the proof that they tile.

A *box* is what a block of rows or a tile is; a *flat range* is what a parameter server holds, or
what is left when all replicated arrays are laid end to end and cut between the writers. A flat
range is a few boxes (below: elements 2 to 13 of a 4 x 4 array), so everything after that
decomposition knows boxes only.

    . . a a
    b b b b       flat range 2:14  =  boxes a, b, c; never more than 2 ndim - 1 of them
    b b b b
    c c . .

Pure arithmetic, no MPI, no arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """The part ``start[k] : start[k] + extent[k]`` on every axis of a global array."""

    start: Shape
    extent: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.extent)

    @property
    def shape(self) -> Shape:
        """Shape of an array that holds this part."""
        return self.extent

    def __str__(self) -> str:
        parts = zip(self.start, self.extent, strict=True)
        return "[" + ", ".join(f"{start}:{start + n}" for start, n in parts) + "]"


class Flat(NamedTuple):
    """Elements ``start : start + size`` of a global array flattened in C order."""

    start: int
    size: int

    @property
    def shape(self) -> Shape:
        """Shape of an array that holds this part."""
        return (self.size,)

    def __str__(self) -> str:
        return f"flat [{self.start}:{self.start + self.size}]"


Region = Box | Flat


def whole(shape: Shape) -> Box:
    """Return the box that is all of an array of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def fits(region: Region, shape: Shape) -> bool:
    """Whether `region` lies inside an array of `shape`."""
    if isinstance(region, Flat):
        return region.start >= 0 and 0 <= region.size <= prod(shape) - region.start
    return len(region.start) == len(region.extent) == len(shape) and all(
        start >= 0 and 0 <= extent <= size - start
        for start, extent, size in zip(region.start, region.extent, shape, strict=True)
    )


def boxes_of(region: Region, shape: Shape) -> list[tuple[int, Box]]:
    """Cut `region` of an array of `shape` into boxes.

    Returns (element offset inside the region, box) pairs. Each box's elements follow one another
    in the region in C order, so an array of the region's elements can be viewed box by box.
    """
    if isinstance(region, Box):
        return [(0, region)] if region.size else []
    found: list[tuple[int, Box]] = []
    if region.size:
        _split(region.start, region.start + region.size, shape, (), region.start, found)
    return found


def _split(start: int, stop: int, shape: Shape, prefix: Shape, origin: int, found: list) -> None:
    """Append the boxes of flat range start:stop of the sub-array at index `prefix`.

    `start` and `stop` count from the beginning of that sub-array, `origin` is what `start` of
    the outermost call was, seen from there.
    """
    axis = len(prefix)
    ones = (1,) * axis
    if axis == len(shape):
        found.append((start - origin, Box(prefix, ones)))
        return
    row = prod(shape[axis + 1 :])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):  # inside one row, and not all of it
        begin = first * row
        _split(start - begin, stop - begin, shape, (*prefix, first), origin - begin, found)
        return
    if start % row:  # the end of a first row
        begin = first * row
        _split(start - begin, row, shape, (*prefix, first), origin - begin, found)
        first += 1
    full = stop // row
    if first < full:  # whole rows in the middle
        rest = shape[axis + 1 :]
        box = Box((*prefix, first, *(0,) * len(rest)), (*ones, full - first, *rest))
        found.append((first * row - origin, box))
    if stop % row:  # the beginning of a last row
        begin = full * row
        _split(0, stop - begin, shape, (*prefix, full), origin - begin, found)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box common to both, or None where they share no element."""
    start = tuple(map(max, one.start, other.start))
    ends = (
        min(a + n, b + m)
        for a, n, b, m in zip(one.start, one.extent, other.start, other.extent, strict=True)
    )
    extent = tuple(end - begin for end, begin in zip(ends, start, strict=True))
    return Box(start, extent) if all(n > 0 for n in extent) else None


def untiled(shape: Shape, regions: Sequence[Region]) -> str | None:
    """Say why `regions` do not tile an array of `shape` exactly, or None where they do.

    No region outside, no element twice, and as many elements as the array has: together these
    say that every element is there exactly once.
    """
    for region in regions:
        if not fits(region, shape):
            return f"{region} lies outside shape {shape}"
    both = _overlap(shape, regions)
    if both is not None:
        return f"{regions[both[0]]} and {regions[both[1]]} overlap"
    covered = sum(region.size for region in regions)
    if covered != prod(shape):
        return f"{covered} of {prod(shape)} elements are covered"
    return None


def _overlap(shape: Shape, regions: Sequence[Region]) -> tuple[int, int] | None:
    """Return two regions that share an element, or None."""
    flat = [(r.start, r.start + r.size, i) for i, r in enumerate(regions) if isinstance(r, Flat)]
    if len(flat) == len(regions):
        spans = sorted(span for span in flat if span[0] < span[1])
        for (_, end, i), (start, _, j) in pairwise(spans):
            if start < end:
                return i, j
        return None
    boxes = [(box, i) for i, region in enumerate(regions) for _, box in boxes_of(region, shape)]
    if not shape or not boxes:
        return (boxes[0][1], boxes[1][1]) if len(boxes) > 1 else None
    # Sweep along the axis that tells the boxes apart best: only those that meet on that axis
    # are compared, so slabs and tiles cost about n, not n squared.
    axis = max(range(len(shape)), key=lambda k: len({box.start[k] for box, _ in boxes}))
    boxes.sort(key=lambda item: item[0].start[axis])
    open_boxes: list[tuple[Box, int]] = []
    for box, i in boxes:
        begin = box.start[axis]
        open_boxes = [o for o in open_boxes if o[0].start[axis] + o[0].extent[axis] > begin]
        for other, j in open_boxes:
            if intersection(box, other) is not None:
                return j, i
        open_boxes.append((box, i))
    return None


def rows(count: int, row_bytes: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut `count` rows into groups of at most `limit` bytes, at least one row each."""
    step = max(1, limit // max(1, row_bytes))
    for start in range(0, count, step):
        yield start, min(start + step, count)
