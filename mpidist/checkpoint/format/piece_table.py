"""A table of all pieces of a checkpoint: one array of integers, handled by a few NumPy calls.

    tensor  file  offset  flat  start  extent        w is 4 x 6, in two boxes; b in two flat ranges
         0     0     512     0   0  0    2  6
         0     1     512     0   2  0    2  6
         1     0     640     1   0  0    5  1        elements 0 to 4
         1     1     640     1   5  0    4  1

Each row describes one piece: a part of a tensor that is stored without gaps in one file. If the
column `flat` is 0, the piece is a box, with a start and an extent on each axis. If it is 1, the
piece is a range of the tensor flattened in C order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import zip_longest
from math import prod

import numpy as np

from ...arrays import unique_numbers
from .digested_json import BIG
from .regions import Box, Flat, Region, Shape, untiled

#: The largest number of pairs (a wanted region and a piece) that one group of NumPy calls compares.
_PAIRS = 1 << 20

#: The columns of a table. `START` is the first column of the starts; the extents follow the starts.
TENSOR, FILE, OFFSET, FLAT, START = range(5)


def blank(count: int, dims: int) -> np.ndarray:
    """Return a new table of `count` rows for tensors with `dims` axes; all extents are 1."""
    rows = np.zeros((count, START + 2 * dims), np.int64)
    rows[:, START + dims :] = 1
    return rows


def axes(rows: np.ndarray) -> int:
    """Return the number of axes in the table: each has one column `start` and one `extent`."""
    return (rows.shape[1] - START) // 2


def joined(tables: Sequence[np.ndarray], dims: int = 1) -> np.ndarray:
    """Return one table with all rows of `tables`.

    It describes tensors of up to `dims` axes, or of more axes if one of `tables` does so.
    """
    dims = max([dims, *map(axes, tables)])
    out = blank(sum(map(len, tables)), dims)
    at = 0
    for rows in tables:
        here, there = axes(rows), out[at : at + len(rows)]
        there[:, : START + here] = rows[:, : START + here]
        there[:, START + dims : START + dims + here] = rows[:, START + here :]
        at += len(rows)
    return out


def of_regions(regions: Sequence[tuple[int, Region]], file: int = 0) -> np.ndarray:
    """Return a table with a row for each (tensor number, region) pair, all in file `file`."""
    dims = max((len(r.start) for _, r in regions if isinstance(r, Box)), default=0) or 1
    zeros, ones = (0,) * dims, (1,) * dims
    listed = []
    for tensor, region in regions:
        flat = isinstance(region, Flat)
        start = (region.start,) if isinstance(region, Flat) else region.start
        rest = dims - len(start)
        listed.append((tensor, file, 0, flat, *start, *zeros[:rest], *region.shape, *ones[:rest]))
    return np.array(listed, np.int64).reshape(len(listed), START + 2 * dims)


def region_of_row(row: Sequence[int], ndim: int) -> Region:
    """Return the region that `row` of a piece table describes, in a tensor of `ndim` axes."""
    extent = START + (len(row) - START) // 2
    if row[FLAT]:
        return Flat(row[START], row[extent])
    return Box(tuple(row[START : START + ndim]), tuple(row[extent : extent + ndim]))


def sizes(rows: np.ndarray) -> np.ndarray:
    """Return the number of elements of each piece (part of a tensor) in the table `rows`."""
    return np.multiply.reduce(rows[:, START + axes(rows) :], axis=1)


class Grid:
    """The shapes of all tensors as one array of integers: a row per tensor, `dims` columns.

    A shape with fewer axes is filled up with ones.
    """

    def __init__(self, shapes: Sequence[Shape], dims: int):
        self.shapes, self.dims = shapes, dims
        columns = np.array([*zip_longest(*shapes, fillvalue=1)], np.int64)
        self.shape = np.ones((len(shapes), dims), np.int64)
        self.shape[:, : len(columns)] = columns.T
        self.count = np.multiply.reduce(self.shape, axis=1)
        self.stride = np.ones_like(self.shape)
        self.stride[:, -2::-1] = np.multiply.accumulate(self.shape[:, :0:-1], axis=1)
        #: The position of the first element of each tensor, if all tensors are flattened and laid
        #: end to end.
        self.base = np.add.accumulate(self.count) - self.count
        #: Whether all positions in this end-to-end order fit in 64 bits.
        self.exact = sum(map(prod, shapes)) < BIG


class Geometry:
    """The positions of pieces (parts of tensors) in their tensors.

    All tensors are flattened and laid end to end; a position is an index into the result. In a
    damaged checkpoint, a piece may lie outside its tensor, and then has no valid position.
    """

    def __init__(self, grid: Grid, rows: np.ndarray):
        dims = grid.dims
        self.grid, self.rows = grid, rows
        self.tensor, self.flat = rows[:, TENSOR], rows[:, FLAT] != 0
        self.start, self.extent = rows[:, START : START + dims], rows[:, START + dims :]
        self.full = grid.shape[self.tensor]

    @cached_property
    def inside(self) -> np.ndarray:
        """For each part of a tensor, whether it lies inside its tensor."""
        start, extent, full, flat = self.start, self.extent, self.full, self.flat
        good = ((start >= 0) & (extent >= 0) & (extent <= full - start)).all(axis=1)
        if flat.any():
            first, count = start[flat, 0], extent[flat, 0]
            left = self.grid.count[self.tensor[flat]] - first
            alone = (start[flat, 1:] == 0).all(axis=1) & (extent[flat, 1:] == 1).all(axis=1)
            good[flat] = alone & (first >= 0) & (count >= 0) & (count <= left)
        return good

    @cached_property
    def size(self) -> np.ndarray:
        """For each part of a tensor, its number of elements."""
        return np.multiply.reduce(self.extent, axis=1)

    @cached_property
    def low(self) -> np.ndarray:
        """For each part of a tensor, its first element's index if all tensors lie end to end."""
        inner = np.einsum("ij,ij->i", self.start, self.grid.stride[self.tensor])
        return self.grid.base[self.tensor] + np.where(self.flat, self.start[:, 0], inner)

    @cached_property
    def last(self) -> np.ndarray:
        """For each part of a tensor, its last element's index + 1 if all tensors lie end to end."""
        inner = np.einsum("ij,ij->i", self.extent - 1, self.grid.stride[self.tensor])
        return self.low + np.where(self.flat, self.extent[:, 0], inner + 1)

    @cached_property
    def together(self) -> np.ndarray:
        """For each part of a tensor, whether it is contiguous in the flattened tensor."""
        good, partial = np.ones(len(self.rows), bool), np.zeros(len(self.rows), bool)
        for axis in range(self.grid.dims - 1, -1, -1):
            good &= ~partial | (self.extent[:, axis] == 1)
            partial |= self.extent[:, axis] != self.full[:, axis]
        return good | self.flat


def untiled_tensor(shapes: Sequence[Shape], rows: np.ndarray) -> tuple[int, str] | None:
    """Find a tensor whose stored parts overlap or leave a hole; return (number, text), or None."""
    # Two quick tests prove most tensors; the slower `untiled` decides about the others.
    for tensor in _unproved(Grid(shapes, axes(rows)), rows):
        mine, shape = rows[rows[:, TENSOR] == tensor].tolist(), shapes[tensor]
        if reason := untiled(shape, [region_of_row(row, len(shape)) for row in mine]):
            return tensor, reason
    return None


def _unproved(grid: Grid, rows: np.ndarray) -> list[int]:
    """Return the tensors of which two quick tests do not prove that their pieces tile them."""
    if not grid.exact:
        return list(range(len(grid.shapes)))
    it = Geometry(grid, rows)
    suspect = np.zeros(len(grid.shapes), bool)
    suspect[it.tensor[~it.inside]] = True
    if suspect.any():  # sums over suspect pieces could overflow
        it = Geometry(grid, rows[~suspect[it.tensor]])
    filled = it.size > 0
    mixed = np.zeros(len(suspect), bool)
    mixed[it.tensor[filled & ~it.together]] = True
    simple = np.flatnonzero(filled & ~mixed[it.tensor])
    order = simple[np.argsort(it.low[simple], kind="stable")]
    shared = it.low[order[1:]] < it.last[order[:-1]]
    suspect[it.tensor[order[1:][shared]]] = True
    suspect[_unseparated(it, np.flatnonzero(filled & mixed[it.tensor]))] = True
    covered = np.zeros(len(suspect), np.int64)
    np.add.at(covered, it.tensor, it.size)
    return np.flatnonzero(suspect | (covered != grid.count)).tolist()


def _unseparated(it: Geometry, which: np.ndarray) -> np.ndarray:
    """Return the tensors whose stored boxes cannot all be separated by cuts along the axes."""
    # At first all boxes of a tensor are one group. A group is cut into smaller ones on an axis on
    # which the intervals of its boxes are equal or disjoint.
    group = it.tensor[which]
    while len(which):
        before = len(unique_numbers(group))
        for axis in range(it.grid.dims):
            start, extent = it.start[which, axis], it.extent[which, axis]
            order = np.lexsort((start, group))
            one, other = order[:-1], order[1:]
            same = group[one] == group[other]
            equal = (start[one] == start[other]) & (extent[one] == extent[other])
            apart = start[one] + extent[one] <= start[other]
            whole = np.zeros(group.max() + 1, bool)
            whole[group[other[same & ~equal & ~apart]]] = True
            cut = ~same | (apart & ~whole[group[other]])
            group[order] = np.concatenate([[0], np.cumsum(cut)])
        number, count = np.unique(group, return_counts=True)
        alone = np.zeros(group.max() + 1, bool)
        alone[number[count == 1]] = True
        left = ~alone[group] | it.flat[which]
        if len(number) == before or not left.any():
            return unique_numbers(it.tensor[which[left]])
        which, group = which[left], group[left]
    return which


def distinct(grid: Grid, rows: np.ndarray) -> np.ndarray:
    """Return the `rows` of a piece table without empty pieces and repeated regions."""
    filled = sizes(rows) > 0
    low = Geometry(grid, rows).low
    order = np.argsort(low, kind="stable")
    order = order[filled[order]]
    # Two different pieces that begin at the same position overlap, which other checks report as an
    # error. So it does not matter here whether a different piece stands between two equal ones.
    twin = np.flatnonzero(np.diff(low[order]) == 0) + 1
    filled[order[twin[_equal(rows, order[twin], rows, order[twin - 1])]]] = False
    return rows if filled.all() else rows[filled]


def _equal(rows: np.ndarray, which: np.ndarray, others: np.ndarray, than: np.ndarray) -> np.ndarray:
    """Return, for each i, whether rows[which[i]] and others[than[i]] have equal regions."""
    equal = np.ones(len(which), bool)
    for column in (TENSOR, *range(FLAT, rows.shape[1])):
        equal &= rows[which, column] == others[than, column]
    return equal


def overlapping(grid: Grid, wants: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of a region in `wants` and a region in `rows` that have common elements.

    Returns two arrays of row numbers, in no particular order. The regions in `rows` must cover each
    tensor exactly once.
    """
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    want, piece = Geometry(grid, wants), Geometry(grid, rows)
    # Most ranks want the regions that they have saved, so equal regions are looked up first.
    order = np.argsort(piece.low, kind="stable")
    near = order[np.searchsorted(piece.low[order], want.low).clip(max=len(rows) - 1)]
    equal = _equal(wants, np.arange(len(wants)), rows, near)
    rest = np.flatnonzero(~equal & (want.size > 0))
    found = [(np.flatnonzero(equal), near[equal])]
    if len(rest):
        found += _searched(grid, wants, rest, piece)
    one, other = (np.concatenate(side) for side in zip(*found, strict=True))
    return one, other


def _searched(grid: Grid, wants: np.ndarray, rest: np.ndarray, piece: Geometry):
    """Yield, part by part, the pairs that `overlapping` returns for the rows `rest` of `wants`."""
    axis = _axis(grid, piece)
    low, high = _interval(grid, piece, axis)
    order = np.argsort(low, kind="stable")
    # The running maximum of the pieces' ends is sorted, so a binary search in it finds the first
    # piece that can reach a region.
    ends = np.maximum.accumulate(high[order])
    low = low[order]
    begin, end = _interval(grid, Geometry(grid, wants[rest]), axis)
    first, behind = np.searchsorted(ends, begin, "right"), np.searchsorted(low, end, "left")
    counts = np.maximum(behind - first, 0)
    cuts = np.flatnonzero(np.diff(np.add.accumulate(counts) // _PAIRS)) + 1
    for part in np.split(np.arange(len(rest)), cuts):
        number, count = np.repeat(part, counts[part]), counts[part]
        place = np.arange(len(number)) - np.repeat(np.add.accumulate(count) - count, count)
        other = order[first[number] + place]
        one, two = Geometry(grid, wants[rest[number]]), Geometry(grid, piece.rows[other])
        meet = (one.start < two.start + two.extent) & (two.start < one.start + one.extent)
        keep = meet.all(axis=1) | one.flat | two.flat
        keep &= (one.low < two.last) & (two.low < one.last)
        yield rest[number[keep]], other[keep]


def _axis(grid: Grid, piece: Geometry) -> np.ndarray:
    """Return the axis on which `_searched` compares each tensor's parts; -1 for flat positions."""
    split = np.zeros(len(grid.shapes), bool)
    split[piece.tensor[~piece.together]] = True
    best, most = np.full(len(split), -1), np.zeros(len(split), np.int64)
    boxes = np.flatnonzero(split[piece.tensor] & ~piece.flat)
    for axis in range(grid.dims):
        different = unique_numbers(grid.base[piece.tensor[boxes]] + piece.start[boxes, axis])
        starts = np.diff(np.searchsorted(different, np.append(grid.base, BIG)))
        better = split & (starts > most)
        best[better], most[better] = axis, starts[better]
    return best


def _interval(grid: Grid, it: Geometry, axis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each piece begins and ends on its tensor's `axis`, plus the tensor's base."""
    low, high = it.low.copy(), it.last.copy()
    cut = np.flatnonzero(axis[it.tensor] >= 0)
    on, tensor = axis[it.tensor[cut]], it.tensor[cut]
    begin = it.start[cut, on]
    end = begin + it.extent[cut, on]
    flat = it.flat[cut]
    begin[flat], end[flat] = 0, it.full[cut, on][flat]
    low[cut], high[cut] = grid.base[tensor] + begin, grid.base[tensor] + end
    return low, high
