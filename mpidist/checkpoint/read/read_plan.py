"""The plan of a read: which ranges of bytes of the shard files fill which arrays."""

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
    """A request to read the bytes ``offset : offset + count`` of a file.

    The bytes are copied to `target`, a contiguous one-dimensional array of bytes, or only checked
    if `target` is None.
    """

    def __init__(self, file: int, offset: int, count: int, target=None):
        self.file, self.offset, self.count, self.target = file, offset, count, target
        self.left = count

    def take(self, at: int, data: np.ndarray) -> None:
        """Copy `data`, which has some of the requested bytes, to ``target[at : at + len(data)]``.

        Any thread may call this method.
        """
        if self.target is not None:
            np.copyto(self.target[at : at + len(data)], data)
        with _counting:
            self.left -= len(data)


class RowReadItem(ReadItem):
    """A request to read whole rows of an array from a file, and to copy a part of them.

    The tuple of slices `cut` selects the part that is copied to `target`.
    """

    def __init__(self, file: int, offset: int, shape: tuple[int, ...], cut: tuple, target):
        super().__init__(file, offset, prod(shape) * target.itemsize, target)
        self._shape, self._cut = shape, cut
        self._lock, self._missing = threading.Lock(), self.count
        self._rows: np.ndarray | None = None

    def take(self, at: int, data: np.ndarray) -> None:
        """Store `data`, the bytes of the rows from byte `at` on.

        The target is filled as soon as all bytes of the rows are stored.
        """
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
    """The positions in the shard files of all stored parts of each tensor of a checkpoint."""

    def __init__(self, found):
        self._found, rows = found, found.rows
        shapes = [tensor.shape for tensor in found.tensors]
        grid = piece_table.Grid(shapes, piece_table.axes(rows))
        it = piece_table.Geometry(grid, rows)
        low = it.low - grid.base[it.tensor]
        places = rows[:, [piece_table.FILE, piece_table.OFFSET]]
        # The rows are lists of integers and not arrays, because most tensors have few pieces, and
        # for few pieces NumPy calls would take longer.
        self._runs = np.column_stack([places, low, low + it.size, it.together]).tolist()
        self._bounds = np.searchsorted(it.tensor, np.arange(len(shapes) + 1)).tolist()

    def wants(self, number: int, region: Region, target) -> Iterator[ReadItem]:
        """Yield the read items (byte requests) that fill `target` with a `region` of a tensor."""
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
    """Return `region` as a (start, stop) range of the flattened array, or None if it has gaps."""
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
            # This view of `target` has those elements of the flat range that are in the box, in
            # the shape of the box. Such a view exists whatever strides `target` has.
            part = target[position : position + box.size].reshape(box.extent)
        for row in rows:
            for held, other in boxes_of(piece_table.region_of_row(row, len(shape)), shape):
                if (common := intersection(box, other)) is None:
                    continue
                cut = _slices(common.start, common.extent, other.start)
                view = part[(*_slices(common.start, common.extent, box.start), ...)]
                offset = row[piece_table.OFFSET] + held * target.itemsize
                source = (row[piece_table.FILE], offset, other.extent)
                yield from _cut(source, cut, view, block)


def _slices(start, extent, origin) -> tuple[slice, ...]:
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, extent, origin, strict=True))


def _cut(source, cut: tuple[slice, ...], target, block: int) -> Iterator[ReadItem]:
    """Yield the read items (byte requests) for the box `cut` of an array in C order in a file."""
    file, offset, shape = source
    first, last = (cut[0].start, cut[0].stop) if shape else (0, 1)
    row = prod(shape[1:]) * target.itemsize
    full = all(part == slice(0, n) for part, n in zip(cut[1:], shape[1:], strict=True))
    if full and target.flags.c_contiguous:
        place = target.reshape(-1).view(np.uint8)
        yield ReadItem(file, offset + first * row, (last - first) * row, place)
    elif row > block and len(shape) > 1:
        for i in range(first, last):
            inner = (file, offset + i * row, shape[1:])
            yield from _cut(inner, cut[1:], target[i - first], block)
    # Whole rows are read: each block with a part of a row must be read whole anyway, to compare its
    # checksum.
    else:
        rows = (slice(None), *cut[1:])
        for start, stop in groups_of(last - first, row, block):
            begin = offset + (first + start) * row
            yield RowReadItem(file, begin, (stop - start, *shape[1:]), rows, target[start:stop])
