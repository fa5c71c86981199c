"""Bytes out of shard files: only those that are asked for, and none that was not checked.

Nothing here parses HDF5. The manifest says at which offset each piece of a tensor lies, so a
reader takes its own box or range with ``pread``, in the blocks that the checksums cover.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod

import numpy as np

from mpidist.checkpoint import files
from mpidist.checkpoint.manifest import Damaged, Manifest, Tensor
from mpidist.checkpoint.regions import Region, boxes_of, intersection, rows
from mpidist.checkpoint.steps import Entry, open_shard

_MAX_OPEN = 32
#: Bytes that the system is asked for before they are needed.
_AHEAD = 16 << 20


class Reader:
    """The shard files of one checkpoint, in an open folder that the caller keeps open. Local.

    Use it with ``with``, or close it.
    """

    def __init__(self, folder: int, manifest: Manifest):
        self._folder = folder
        self._manifest = manifest
        self._open: OrderedDict[int, int] = OrderedDict()
        self._checked: set[tuple[int, int]] = set()
        self._buffer = bytearray(0)
        self._held: tuple[int, int] | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        while self._open:
            files.close(self._open.popitem()[1])

    @property
    def block(self) -> int:
        """Bytes that one checksum covers."""
        return self._manifest.block

    def into(self, file: int, offset: int, count: int, out: memoryview | None) -> None:
        """Put bytes ``offset : offset + count`` of a file into `out`, or only check them.

        Raises Damaged when a block that they touch fails its checksum.
        """
        size = self._manifest.files[file].size
        at, end = offset, offset + count
        if count > self.block:
            self._begin(file, at, min(count, _AHEAD))
        while at < end:
            if end - at > _AHEAD:  # a block is read while the one before it is checked
                self._begin(file, at + _AHEAD, min(self.block, end - at - _AHEAD))
            number = at // self.block
            begin = number * self.block
            stop = min(end, begin + self.block)
            if out is None:
                if (file, number) not in self._checked:
                    self._load(file, number)
                    self._checked.add((file, number))
            elif at == begin and stop == min(begin + self.block, size):
                # A whole block is wanted: read it where it belongs, then check it there.
                self._read(file, number, out[at - offset : stop - offset])
            else:
                block = self._load(file, number)
                out[at - offset : stop - offset] = block[at - begin : stop - begin]
            at = stop

    def check_file(self, file: int, digest) -> None:
        """Check every block of a file, and feed it to `digest` (an object of hashlib)."""
        for number in range(len(self._manifest.files[file].crc32)):
            digest.update(self._load(file, number))

    def _begin(self, file: int, offset: int, count: int) -> None:
        files.begin_read(self._descriptor(file), offset, count)

    def _load(self, file: int, number: int) -> memoryview:
        """Return a checked block; the last one is kept, for small tensors lie side by side."""
        begin = number * self.block
        length = min(self.block, self._manifest.files[file].size - begin)
        if len(self._buffer) < length:
            self._buffer, self._held = bytearray(length), None
        view = memoryview(self._buffer)[:length]
        if self._held != (file, number):
            self._held = None
            self._read(file, number, view)
            self._held = (file, number)
        return view

    def _read(self, file: int, number: int, view: memoryview) -> None:
        listed = self._manifest.files[file]
        begin = number * self.block
        where = f"{listed.name}, bytes {begin}:{begin + len(view)}"
        try:
            found = files.read_at(self._descriptor(file), view, begin)
        except OSError as error:
            raise Damaged(f"{where} cannot be read: {error.strerror}") from error
        if found != len(view):
            raise Damaged(f"{where} are cut short: {found} are there")
        if zlib.crc32(view) != listed.crc32[number]:
            raise Damaged(f"{where} fail their checksum")

    def _descriptor(self, file: int) -> int:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= _MAX_OPEN:
            files.close(self._open.popitem(last=False)[1])
        descriptor, _ = open_shard(self._folder, self._manifest.files[file].name)
        self._open[file] = descriptor
        return descriptor


@contextmanager
def opened(path: str, entry: Entry, manifest: Manifest) -> Iterator[Reader]:
    """Hold the shard files of an entry of the store at `path` open. Local. Raises Damaged."""
    with ExitStack() as stack:
        try:
            root = stack.enter_context(files.folder(path))
            folder = stack.enter_context(files.folder(entry.name, root))
        except OSError as error:
            raise Damaged(f"{entry.name} cannot be opened: {error.strerror}") from error
        yield stack.enter_context(Reader(folder, manifest))


def fill(reader: Reader, tensor: Tensor, region: Region, itemsize: int, target) -> None:
    """Copy `region` of a tensor into the host array `target`, or only check its bytes. Local.

    `target` has the region's shape and the tensor's dtype, with any strides; None only checks.
    """
    for position, box in boxes_of(region, tensor.shape):
        part = target
        if target is not None and target.shape != box.extent:
            # A flat range, seen as the box. A one-dimensional array of any stride can be.
            part = target[position : position + box.size].reshape(box.extent)
        for piece in tensor.pieces:
            for held, other in boxes_of(piece.region, tensor.shape):
                common = intersection(box, other)
                if common is None:
                    continue
                low = tuple(a - b for a, b in zip(common.start, other.start, strict=True))
                high = tuple(a + n for a, n in zip(low, common.extent, strict=True))
                view = None
                if part is not None:
                    view = part[(*_slices(common.start, common.extent, box.start), ...)]
                source = (piece.file, piece.offset + held * itemsize, other.extent)
                _copy(reader, source, low, high, itemsize, view)


def _slices(start, extent, origin) -> tuple[slice, ...]:
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, extent, origin, strict=True))


def _copy(reader: Reader, source, low, high, itemsize: int, target) -> None:
    """Copy the box low:high of an array stored in C order at `source` (file, offset, shape).

    Rows are the sub-arrays along the first axis. Full rows are one range of bytes. Parts of rows
    shorter than a block are cut out of whole rows, since their blocks must be read anyway; a
    longer row is an array of its own.
    """
    file, offset, shape = source
    first, last = (low[0], high[0]) if shape else (0, 1)
    row = prod(shape[1:]) * itemsize
    full = all(a == 0 and b == n for a, b, n in zip(low[1:], high[1:], shape[1:], strict=True))
    if full and (target is None or target.flags.c_contiguous):
        reader.into(file, offset + first * row, (last - first) * row, _bytes(target))
        return
    if row > reader.block and len(shape) > 1:
        for i in range(first, last):
            inner = (file, offset + i * row, shape[1:])
            part = None if target is None else target[i - first]
            _copy(reader, inner, low[1:], high[1:], itemsize, part)
        return
    cut = tuple(slice(a, b) for a, b in zip(low[1:], high[1:], strict=True))
    for start, stop in rows(last - first, row, reader.block):
        begin, count = offset + (first + start) * row, (stop - start) * row
        if target is None:
            reader.into(file, begin, count, None)
            continue
        buffer = np.empty((stop - start, *shape[1:]), target.dtype)
        reader.into(file, begin, count, _bytes(buffer))
        target[start:stop] = buffer[(slice(None), *cut)]


def _bytes(array) -> memoryview | None:
    return None if array is None else memoryview(array.reshape(-1).view(np.uint8))
