"""What a reader is asked for: ranges of bytes of shard files, and where they go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import prod

import numpy as np

from mpidist.checkpoint.manifest import Tensor
from mpidist.checkpoint.regions import Region, boxes_of, intersection, rows

_counting = threading.Lock()


class Want:
    """Bytes ``offset : offset + count`` of a file, for `target`, or only to be checked. Local.

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


class Rows(Want):
    """Whole rows of an array, of which `target` gets the part `cut`. Local."""

    target: np.ndarray

    def __init__(self, file: int, offset: int, shape: tuple[int, ...], cut: tuple, target):
        super().__init__(file, offset, prod(shape) * target.itemsize, target)
        self._shape, self._cut = shape, cut
        self._lock, self._missing = threading.Lock(), self.count
        self._rows: np.ndarray | None = None

    def take(self, at: int, data: np.ndarray) -> None:
        """As that of a `Want`; the target is filled when all rows are there."""
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


def wants_of(tensor: Tensor, region: Region, itemsize: int, target, block: int) -> Iterator[Want]:
    """Say what `region` of a tensor takes, in the pieces in which it was saved. Local.

    `target` is a host array of the region's shape and the tensor's dtype, with any strides. Parts
    of rows are cut out of groups of whole rows of up to a `block`.
    """
    for position, box in boxes_of(region, tensor.shape):
        part = target
        if target.shape != box.extent:
            # A flat range, seen as the box. A one-dimensional array of any stride can be.
            part = target[position : position + box.size].reshape(box.extent)
        for piece in tensor.pieces:
            for held, other in boxes_of(piece.region, tensor.shape):
                common = intersection(box, other)
                if common is None:
                    continue
                low = tuple(a - b for a, b in zip(common.start, other.start, strict=True))
                high = tuple(a + n for a, n in zip(low, common.extent, strict=True))
                view = part[(*_slices(common.start, common.extent, box.start), ...)]
                source = (piece.file, piece.offset + held * itemsize, other.extent)
                yield from _cut(source, low, high, itemsize, view, block)


def _slices(start, extent, origin) -> tuple[slice, ...]:
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, extent, origin, strict=True))


def _cut(source, low, high, itemsize: int, target, block: int) -> Iterator[Want]:
    """Want the box low:high of an array stored in C order at `source` (file, offset, shape).

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
        yield Want(file, offset + first * row, (last - first) * row, place)
        return
    if row > block and len(shape) > 1:
        for i in range(first, last):
            inner = (file, offset + i * row, shape[1:])
            yield from _cut(inner, low[1:], high[1:], itemsize, target[i - first], block)
        return
    cut = (slice(None), *(slice(a, b) for a, b in zip(low[1:], high[1:], strict=True)))
    for start, stop in rows(last - first, row, block):
        begin = offset + (first + start) * row
        yield Rows(file, begin, (stop - start, *shape[1:]), cut, target[start:stop])
