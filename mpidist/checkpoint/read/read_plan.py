"""What a reader is asked for: ranges of bytes of shard files, and where they go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import prod

import numpy as np

from ..format import piece_table
from ..format.regions import Flat, Region, boxes_of, intersection
from ..format.regions import rows as groups_of

_counting = threading.Lock()


class ReadItem:
    """Bytes ``offset : offset + count`` of a file, for `target`, or only to be checked.

    `target` is one-dimensional, contiguous and made of bytes. `left` bytes have not come yet.
    """

    def __init__(self, file: int, offset: int, count: int, target: np.ndarray | None = None):
        self.file, self.offset, self.count, self.target = file, offset, count, target
        self.left = count

    def take(self, at: int, data: np.ndarray) -> None:
        """Take bytes from position `at` of the range on. From any thread."""
        if self.target is not None:
            np.copyto(self.target[at : at + len(data)], data)
        with _counting:
            self.left -= len(data)


class RowReadItem(ReadItem):
    """Whole rows of an array, of which `target` gets the part `cut`."""

    target: np.ndarray

    def __init__(self, file: int, offset: int, shape: tuple[int, ...], cut: tuple, target):
        super().__init__(file, offset, prod(shape) * target.itemsize, target)
        self._shape, self._cut = shape, cut
        self._lock, self._missing = threading.Lock(), self.count
        self._rows: np.ndarray | None = None

    def take(self, at: int, data: np.ndarray) -> None:
        """Like `ReadItem.take`; the target is filled when all rows are there."""
        with self._lock:
            if self._rows is None:
                self._rows = np.empty(self.count, np.uint8)
            self._rows[at : at + len(data)] = data
            self._missing -= len(data)
            if self._missing:
                return
            whole = self._rows.view(self.target.dtype).reshape(self._shape)
            self.target[...] = whole[self._cut]
            self._rows, self.left = None, 0


class Places:
    """Where the pieces of a checkpoint lie, by tensor, for who wants some of them.

    Parameters
    ----------
    found : Manifest or Layout
    """

    def __init__(self, found):
        self._found, rows = found, found.rows
        shapes = [tensor.shape for tensor in found.tensors]
        grid = piece_table.Grid(shapes, piece_table.axes(rows))
        it = piece_table.Geometry(grid, rows)
        low = it.low - grid.base[it.tensor]
        columns = (
            rows[:, piece_table.FILE],
            rows[:, piece_table.OFFSET],
            low,
            low + it.size,
            it.together,
        )
        # Plain numbers: most tensors have few pieces, and a call of NumPy would cost more.
        self._runs = [*zip(*(column.tolist() for column in columns), strict=True)]
        bounds = np.searchsorted(it.tensor, np.arange(len(shapes) + 1))
        self._bounds = bounds.tolist()

    def wants(self, number: int, region: Region, target) -> Iterator[ReadItem]:
        """Say what `region` of a tensor takes, in the pieces in which it was saved.

        `target` is a host array of the region's shape and the tensor's dtype, with any strides.
        Parts of rows are cut out of groups of whole rows of up to a block.
        """
        start, stop = self._bounds[number : number + 2]
        shape, itemsize = self._found.tensors[number].shape, target.itemsize
        span = span_of(region, shape) if target.flags.c_contiguous else None
        if span is None or not all(run[4] for run in self._runs[start:stop]):
            rows = self._found.rows[start:stop].tolist()
            yield from _boxes(shape, rows, region, target, self._found.block)
            return
        first, last = span
        place = target.reshape(-1).view(np.uint8)
        for file, offset, low, high, _ in self._runs[start:stop]:
            begin, end = max(first, low), min(last, high)
            if begin < end:
                part = place[(begin - first) * itemsize : (end - first) * itemsize]
                yield ReadItem(file, offset + (begin - low) * itemsize, part.size, part)


def span_of(region: Region, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the range that a region is of the flattened array, or None if it is not one range."""
    if isinstance(region, Flat):
        return region.start, region.start + region.size
    if region.extent == shape:
        return 0, prod(shape)
    axis = max(k for k, (n, m) in enumerate(zip(region.extent, shape, strict=True)) if n != m)
    if any(n != 1 for n in region.extent[:axis]):
        return None
    first = 0
    for start, n in zip(region.start, shape, strict=True):
        first = first * n + start
    return first, first + region.size


def _boxes(shape, rows, region: Region, target, block: int) -> Iterator[ReadItem]:
    for position, box in boxes_of(region, shape):
        part = target
        if target.shape != box.extent:
            # A flat range, seen as the box. A one-dimensional array of any stride can be.
            part = target[position : position + box.size].reshape(box.extent)
        for row in rows:
            for held, other in boxes_of(piece_table.region_of(row, len(shape)), shape):
                common = intersection(box, other)
                if common is None:
                    continue
                low = tuple(a - b for a, b in zip(common.start, other.start, strict=True))
                high = tuple(a + n for a, n in zip(low, common.extent, strict=True))
                view = part[(*_slices(common.start, common.extent, box.start), ...)]
                offset = row[piece_table.OFFSET] + held * target.itemsize
                source = (row[piece_table.FILE], offset, other.extent)
                yield from _cut(source, low, high, target.itemsize, view, block)


def _slices(start, extent, origin) -> tuple[slice, ...]:
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, extent, origin, strict=True))


def _cut(source, low, high, itemsize: int, target, block: int) -> Iterator[ReadItem]:
    """Yield what reads the box low:high of an array that lies in C order at `source`.

    `source` is (file, offset, shape).
    Rows are the sub-arrays along the first axis. Full rows are one range of bytes. Parts of rows
    shorter than a block are cut out of whole rows, since their blocks must be read anyway; a
    longer row is an array of its own.
    """
    file, offset, shape = source
    first, last = (low[0], high[0]) if shape else (0, 1)
    row = prod(shape[1:]) * itemsize
    full = all(a == 0 and b == n for a, b, n in zip(low[1:], high[1:], shape[1:], strict=True))
    if full and target.flags.c_contiguous:
        place = target.reshape(-1).view(np.uint8)
        yield ReadItem(file, offset + first * row, (last - first) * row, place)
        return
    if row > block and len(shape) > 1:
        for i in range(first, last):
            inner = (file, offset + i * row, shape[1:])
            yield from _cut(inner, low[1:], high[1:], itemsize, target[i - first], block)
        return
    cut = (slice(None), *(slice(a, b) for a, b in zip(low[1:], high[1:], strict=True)))
    for start, stop in groups_of(last - first, row, block):
        begin = offset + (first + start) * row
        yield RowReadItem(file, begin, (stop - start, *shape[1:]), cut, target[start:stop])
