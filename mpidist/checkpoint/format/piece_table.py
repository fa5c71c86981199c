"""All pieces of a checkpoint as one table of integers: a million of them are a few NumPy calls.

    tensor  file  offset  flat  start  extent        w is 4 x 6, in two boxes; b in two flat ranges
         0     0     512     0   0  0    2  6
         0     1     512     0   2  0    2  6
         1     0     640     1   0  0    5  1        elements 0 to 4
         1     1     640     1   5  0    4  1

A box has one start and one extent on each axis. Shapes of fewer axes than the table has get axes of
length 1 behind, which changes neither a size nor the order of the elements. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np

from .digested_json import BIG
from .regions import Box, Flat, Region, Shape, untiled

#: Pairs of a want and a piece that are compared at once.
_PAIRS = 1 << 20

TENSOR, FILE, OFFSET, FLAT, START = range(5)


def blank(count: int, dims: int) -> np.ndarray:
    """Return a table of `count` pieces of up to `dims` axes; extents are 1, all other numbers 0."""
    rows = np.zeros((count, START + 2 * dims), np.int64)
    rows[:, START + dims :] = 1
    return rows


def axes(rows: np.ndarray) -> int:
    """Return the number of axes that a table has room for."""
    return (rows.shape[1] - START) // 2


def joined(tables: Sequence[np.ndarray], dims: int = 1) -> np.ndarray:
    """Return the rows of all tables, one behind the other, with room for `dims` axes."""
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
    """Return a table of (tensor, region) pairs."""
    dims = max((len(r.start) for _, r in regions if isinstance(r, Box)), default=0) or 1
    zeros, ones = (0,) * dims, (1,) * dims
    listed = []
    for tensor, region in regions:
        flat = isinstance(region, Flat)
        start = (region.start,) if isinstance(region, Flat) else region.start
        extent, rest = region.shape, dims - len(start)
        listed.append((tensor, file, 0, flat, *start, *zeros[:rest], *extent, *ones[:rest]))
    return np.array(listed, np.int64).reshape(len(listed), START + 2 * dims)


def region_of(row: Sequence[int], ndim: int) -> Region:
    """Return the region of a row, a list of plain integers, of a tensor of `ndim` axes."""
    if row[FLAT]:
        dims = (len(row) - START) // 2
        return Flat(row[START], row[START + dims])
    extent = START + (len(row) - START) // 2
    return Box(tuple(row[START : START + ndim]), tuple(row[extent : extent + ndim]))


def sizes(rows: np.ndarray) -> np.ndarray:
    """Return the number of elements of each piece."""
    return np.multiply.reduce(rows[:, START + axes(rows) :], axis=1)


class Grid:
    """The shapes of tensors, as arrays with room for `dims` axes."""

    def __init__(self, shapes: Sequence[Shape], dims: int):
        self.shapes, self.dims = shapes, dims
        self.ndim = np.fromiter(map(len, shapes), np.int64, len(shapes))
        self.shape = np.ones((len(shapes), dims), np.int64)
        for n in np.unique(self.ndim).tolist():
            which = np.flatnonzero(self.ndim == n)
            self.shape[which, :n] = np.array([shapes[i] for i in which.tolist()], np.int64)
        self.count = np.multiply.reduce(self.shape, axis=1)
        self.stride = np.ones_like(self.shape)
        for axis in range(dims - 2, -1, -1):
            self.stride[:, axis] = self.stride[:, axis + 1] * self.shape[:, axis + 1]
        ends = np.add.accumulate(self.count)
        #: Where each tensor begins if all are flattened and laid end to end.
        self.base = ends - self.count
        #: Whether these positions are exact.
        self.exact = sum(map(prod, shapes)) < BIG


class Geometry:
    """Where the pieces of a table lie in the tensors of a grid.

    All but `inside` holds for those that are inside.
    """

    def __init__(self, grid: Grid, rows: np.ndarray):
        dims = grid.dims
        self.grid, self.rows = grid, rows
        self.tensor, self.flat = rows[:, TENSOR], rows[:, FLAT] != 0
        self.start, self.extent = rows[:, START : START + dims], rows[:, START + dims :]
        self.full = grid.shape[self.tensor]

    @cached_property
    def inside(self) -> np.ndarray:
        """Whether each piece lies inside its tensor."""
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
        """Number of elements."""
        return np.multiply.reduce(self.extent, axis=1)

    @cached_property
    def low(self) -> np.ndarray:
        """Position of the first element, counted over all tensors."""
        inner = np.einsum("ij,ij->i", self.start, self.grid.stride[self.tensor])
        return self.grid.base[self.tensor] + np.where(self.flat, self.start[:, 0], inner)

    @cached_property
    def last(self) -> np.ndarray:
        """Position behind the last element; of an empty piece, anything."""
        inner = np.einsum("ij,ij->i", self.extent - 1, self.grid.stride[self.tensor])
        return self.low + np.where(self.flat, self.extent[:, 0], inner + 1)

    @cached_property
    def together(self) -> np.ndarray:
        """Whether the elements follow one another in the flattened tensor."""
        good, partial = np.ones(len(self.rows), bool), np.zeros(len(self.rows), bool)
        for axis in range(self.grid.dims - 1, -1, -1):
            good &= ~partial | (self.extent[:, axis] == 1)
            partial |= self.extent[:, axis] != self.full[:, axis]
        return good | self.flat


def untiled_tensor(shapes: Sequence[Shape], rows: np.ndarray) -> tuple[int, str] | None:
    """Say which tensor its pieces do not tile exactly, and why; None where all are.

    Pieces that follow one another are sorted and compared with their neighbours; grids of boxes
    are taken apart axis by axis. What that leaves open, `untiled` decides for one tensor.
    """
    for tensor in _open(Grid(shapes, axes(rows)), rows):
        mine = rows[rows[:, TENSOR] == tensor].tolist()
        reason = untiled(shapes[tensor], [region_of(row, len(shapes[tensor])) for row in mine])
        if reason:
            return tensor, reason
    return None


def _open(grid: Grid, rows: np.ndarray) -> list[int]:
    """Return the tensors that are not yet proved to be tiled, a superset of those that are not."""
    if not grid.exact:
        return list(range(len(grid.shapes)))
    it = Geometry(grid, rows)
    suspect = np.zeros(len(grid.shapes), bool)
    suspect[it.tensor[~it.inside]] = True
    if suspect.any():  # its pieces are left out: sums of the others are exact
        it = Geometry(grid, rows[~suspect[it.tensor]])
    filled = it.size > 0
    mixed = np.zeros(len(suspect), bool)
    mixed[it.tensor[filled & ~it.together]] = True
    simple = np.flatnonzero(filled & ~mixed[it.tensor])
    order = simple[np.argsort(it.low[simple], kind="stable")]
    shared = it.low[order[1:]] < it.last[order[:-1]]
    suspect[it.tensor[order[1:][shared]]] = True
    boxes = np.flatnonzero(filled & mixed[it.tensor])
    suspect[_unseparated(it, boxes)] = True
    covered = np.zeros(len(suspect), np.int64)
    np.add.at(covered, it.tensor, it.size)
    return np.flatnonzero(suspect | (covered != grid.count)).tolist()


def _unseparated(it: Geometry, which: np.ndarray) -> np.ndarray:
    """Return the tensors of the boxes `which` that cutting along the axes does not keep apart.

    Boxes are in one group until an axis separates them: if the intervals of a group on an axis
    are equal or disjoint, it falls apart into those with equal ones.
    """
    group = it.tensor[which]
    while len(which):
        before = len(np.unique(group))
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
            return np.unique(it.tensor[which[left]])
        which, group = which[left], group[left]
    return which


def distinct(grid: Grid, rows: np.ndarray) -> np.ndarray:
    """Return `rows` that lie inside, without empty ones, each region of a tensor once.

    The first of equal ones stays.
    """
    filled = sizes(rows) > 0
    low = Geometry(grid, rows).low
    order = np.argsort(low, kind="stable")
    order = order[filled[order]]
    # Two different pieces with one beginning overlap: what stands between them does not matter.
    twin = np.flatnonzero(np.diff(low[order]) == 0) + 1
    filled[order[twin[_equal(rows, order[twin], rows, order[twin - 1])]]] = False
    return rows if filled.all() else rows[filled]


def _equal(rows: np.ndarray, which: np.ndarray, others: np.ndarray, than: np.ndarray) -> np.ndarray:
    """Whether the rows `which` are of the same regions as the rows `than` of `others`."""
    equal = np.ones(len(which), bool)
    for column in (TENSOR, *range(FLAT, rows.shape[1])):
        equal &= rows[which, column] == others[than, column]
    return equal


def overlapping(grid: Grid, wants: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (number of a want, number of a piece) of those that share elements, in any order.

    All lie inside, and `rows` tile their tensors. Flat ranges may come with boxes that they
    miss.
    """
    want, piece = Geometry(grid, wants), Geometry(grid, rows)
    # Most want what they have saved.
    order = np.argsort(piece.low, kind="stable")
    near = np.searchsorted(piece.low[order], want.low).clip(max=max(0, len(rows) - 1))
    near, equal = order[near] if len(rows) else near, np.zeros(len(wants), bool)
    if len(rows):
        equal = _equal(wants, np.arange(len(wants)), rows, near)
    rest = np.flatnonzero(~equal & (want.size > 0))
    found = [(np.flatnonzero(equal), near[equal])]
    if len(rest) and len(rows):
        found += _searched(grid, wants, rest, piece)
    one, other = (np.concatenate(side) for side in zip(*found, strict=True))
    return one, other


def _searched(grid: Grid, wants: np.ndarray, rest: np.ndarray, piece: Geometry):
    """Yield pairs of `overlapping`, some at a time: neighbours on one axis, then compared."""
    axis = _axis(grid, piece)
    low, high = _interval(grid, piece, axis)
    order = np.argsort(low, kind="stable")
    # No piece before the first one whose interval, or that of one before it, reaches so far.
    ends = np.maximum.accumulate(high[order])
    low = low[order]
    begin, end = _interval(grid, Geometry(grid, wants[rest]), axis)
    first, behind = np.searchsorted(ends, begin, "right"), np.searchsorted(low, end, "left")
    counts = np.maximum(behind - first, 0)
    cuts = np.flatnonzero(np.diff(np.add.accumulate(counts) // _PAIRS)) + 1
    for part in np.split(np.arange(len(rest)), cuts):
        number = np.repeat(part, counts[part])
        place = np.arange(len(number)) - np.repeat(
            np.add.accumulate(counts[part]) - counts[part], counts[part]
        )
        other = order[first[number] + place]
        one, two = Geometry(grid, wants[rest[number]]), Geometry(grid, piece.rows[other])
        meet = (one.start < two.start + two.extent) & (two.start < one.start + one.extent)
        keep = meet.all(axis=1) | one.flat | two.flat
        keep &= (one.low < two.last) & (two.low < one.last)
        yield rest[number[keep]], other[keep]


def _axis(grid: Grid, piece: Geometry) -> np.ndarray:
    """Return the axis on which the pieces of each tensor are looked up; -1: the flattened one."""
    split = np.zeros(len(grid.shapes), bool)
    split[piece.tensor[~piece.together]] = True
    best, most = np.full(len(split), -1), np.zeros(len(split), np.int64)
    boxes = np.flatnonzero(split[piece.tensor] & ~piece.flat)
    for axis in range(grid.dims):
        different = np.unique(grid.base[piece.tensor[boxes]] + piece.start[boxes, axis])
        starts = np.diff(np.searchsorted(different, np.append(grid.base, BIG)))
        better = split & (starts > most)
        best[better], most[better] = axis, starts[better]
    return best


def _interval(grid: Grid, it: Geometry, axis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each piece begins and ends on the axis of its tensor, tensors end to end."""
    low, high = it.low.copy(), it.last.copy()
    cut = np.flatnonzero(axis[it.tensor] >= 0)
    on, tensor = axis[it.tensor[cut]], it.tensor[cut]
    begin = it.start[cut, on]
    end = begin + it.extent[cut, on]
    flat = it.flat[cut]
    begin[flat], end[flat] = 0, it.full[cut, on][flat]
    low[cut], high[cut] = grid.base[tensor] + begin, grid.base[tensor] + end
    return low, high
