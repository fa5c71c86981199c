"""Regions (boxes or flat ranges) of a global array, and a check that regions tile the array.

A *box* is a range of indices on each axis, as in a block of rows or a tile. A *flat range* is a
range of positions in the array flattened in C order. To compare the two, a flat range is cut into a
few boxes, here of a 4 x 4 array:

    . . a a
    b b b b       flat range 2:14  =  boxes a, b, c; never more than 2 ndim - 1 of them
    b b b b
    c c . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """The part ``start[k] : start[k] + extent[k]`` on every axis of a global array."""

    start: Shape
    extent: Shape

    @property
    def size(self) -> int:
        """Number of elements of this box."""
        return prod(self.extent)

    @property
    def shape(self) -> Shape:
        """Shape of an array that holds the elements of this region."""
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
        """Shape of an array that holds the elements of this region."""
        return (self.size,)

    def __str__(self) -> str:
        return f"flat [{self.start}:{self.start + self.size}]"


Region = Box | Flat


def whole(shape: Shape) -> Box:
    """Return the box that covers an array of `shape`."""
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
    """Cut a region of an array of shape `shape` into boxes; return (offset, box) pairs.

    A region is a box or a range of the flattened array. The offset is the number of elements of the
    region that come before the box.
    """
    if not region.size:
        return []
    if isinstance(region, Box):
        return [(0, region)]
    boxes = list(_boxes(region.start, region.start + region.size, shape))
    return [*zip(accumulate((box.size for box in boxes), initial=0), boxes, strict=False)]


def _boxes(start: int, stop: int, shape: Shape, prefix: Shape = ()) -> Iterator[Box]:
    """Cut the flat range ``start:stop`` of a sub-array into boxes, and yield them in order."""
    axis = len(prefix)
    if axis == len(shape):
        yield Box(prefix, (1,) * axis)
        return
    rest = shape[axis + 1 :]
    row = prod(rest)
    first, full = -(-start // row), stop // row  # the range has the whole rows first:full
    if first > full:  # the range begins and ends inside one row
        yield from _boxes(start % row, stop % row, shape, (*prefix, full))
        return
    if start % row:  # the end of a row, before the whole rows
        yield from _boxes(start % row, row, shape, (*prefix, first - 1))
    if first < full:
        yield Box((*prefix, first, *(0,) * len(rest)), (*(1,) * axis, full - first, *rest))
    if stop % row:  # the beginning of a row, behind the whole rows
        yield from _boxes(0, stop % row, shape, (*prefix, full))


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box of the elements that are in both boxes, or None if there are none."""
    start = tuple(map(max, one.start, other.start))
    ends = (
        min(a + n, b + m)
        for a, n, b, m in zip(one.start, one.extent, other.start, other.extent, strict=True)
    )
    extent = tuple(end - begin for end, begin in zip(ends, start, strict=True))
    return Box(start, extent) if all(n > 0 for n in extent) else None


def untiled(shape: Shape, regions: Sequence[Region]) -> str | None:
    """Return why `regions` do not cover an array of `shape` exactly once; None if they do."""
    for region in regions:
        if not fits(region, shape):
            return f"{region} lies outside shape {shape}"
    if all(isinstance(region, Flat) for region in regions):
        shape = (prod(shape),)  # every flat range is one box of the flattened array
    boxes = [(box, region) for region in regions for _, box in boxes_of(region, shape)]
    # The boxes are sorted along the axis on which they have the most different starts, and only
    # boxes that overlap on this axis are compared. For n slabs or tiles, about n pairs are
    # compared, not n squared.
    axis = max(range(len(shape)), key=lambda k: len({box.start[k] for box, _ in boxes}), default=0)
    boxes.sort(key=lambda item: item[0].start[axis:])
    reached: list[tuple[Box, Region]] = []
    for box, region in boxes:
        if shape:
            begin = box.start[axis]
            reached = [one for one in reached if one[0].start[axis] + one[0].extent[axis] > begin]
        for other, earlier in reached:
            if intersection(box, other) is not None:
                return f"{earlier} and {region} overlap"
        reached.append((box, region))
    covered = sum(region.size for region in regions)
    if covered != prod(shape):
        return f"{covered} of {prod(shape)} elements are covered"
    return None


def rows(count: int, row_bytes: int, limit: int) -> Iterator[tuple[int, int]]:
    """Divide rows into groups of at most `limit` bytes; yield (start, stop) for each group."""
    step = max(1, limit // max(1, row_bytes))
    for start in range(0, count, step):
        yield start, min(start + step, count)
