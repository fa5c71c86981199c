"""The face that a shard shows to h5ls and h5py, made without letting HDF5 touch the disk.

h5py writes into an object that only remembers: every dataset is contiguous, its space is given
out early and never filled, so all that HDF5 "writes" is a few kilobytes of metadata, whatever the
size of the data. What comes back is the file's plan: those bytes with their places, and the
offset of each dataset, where the store then writes the data itself. The reasons: after a failed
write HDF5's own flush and close report success; its bytes could not be checksummed before they
are written; and every write of ours goes through one module that tests can interrupt.

Dataset names are numbers, so no text of the user becomes a path; the attribute ``name`` says what
it is. Types that HDF5 has no name for (bfloat16) are there as bytes, one axis longer.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.checkpoint.layout import Path, dtype_of, show
from mpidist.checkpoint.regions import Box, Region

#: Every data set begins on such a byte: elements are aligned for those who map the file, and
#: HDF5 does not gather small data sets elsewhere, so that the data lie in the order of the parts.
_ALIGNMENT = 64


class Part(NamedTuple):
    """One dataset of a shard file: a region of a tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    region: Region

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.region.size * dtype_of(self.dtype).itemsize


class Plan(NamedTuple):
    """Where everything lies in a shard file.

    size : bytes of the file.
    metadata : (offset, bytes) of all that HDF5 itself wrote, ascending, without overlaps.
    offsets : byte offset of each part's data.
    """

    size: int
    metadata: list[tuple[int, bytes]]
    offsets: list[int]


def plan(parts: Sequence[Part]) -> Plan:
    """Lay out a file that holds `parts`, in their order. Local; nothing is written anywhere.

    The same parts give the same bytes: there is no time, host or name of a run inside.
    """
    import h5py

    memory = _Remembering()
    offsets = []
    with h5py.File(
        memory,
        "w",
        libver=("earliest", "v108"),
        alignment_threshold=1,
        alignment_interval=_ALIGNMENT,
    ) as file:
        for number, part in enumerate(parts):
            offsets.append(_add(file, str(number), part))
    return Plan(memory.size, memory.segments(), offsets)


def _add(file, name: str, part: Part) -> int:
    """Make one dataset without data and return its byte offset."""
    import h5py

    dtype, inner = face(part.dtype)
    shape = (*part.region.shape, *inner)
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    settings.set_obj_track_times(False)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    kind = h5py.h5t.py_create(dtype, logical=True)
    dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, settings))
    # Lone surrogates and NUL are legal in keys, not in text of HDF5. The manifest is exact.
    text = show(part.path).encode("utf-8", "replace").decode()[:1024]
    dataset.attrs["name"] = text.replace("\0", "?")
    dataset.attrs["dtype"] = part.dtype
    dataset.attrs["global_shape"] = np.array(part.shape, np.int64)
    box = isinstance(part.region, Box)
    dataset.attrs["start" if box else "flat_start"] = np.array(part.region.start, np.int64)
    return dataset.id.get_offset()


def face(name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the dtype that HDF5 is told for elements of dtype `name`, and their shape. Local."""
    dtype = dtype_of(name)
    known = name[0] in "<>|" and dtype.kind in "biufc"
    if known and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return dtype, ()
    return np.dtype(np.uint8), (dtype.itemsize,)


class _Remembering(io.RawIOBase):
    """A file for h5py that keeps what is written to it, by place, and has no other bytes."""

    def __init__(self):
        super().__init__()
        self.size = 0
        self._at = 0
        self._writes: list[tuple[int, bytes]] = []

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size=None) -> int:
        self.size = self._at if size is None else size
        return self.size

    def write(self, data) -> int:
        self._writes.append((self._at, bytes(data)))
        self._at += len(self._writes[-1][1])
        self.size = max(self.size, self._at)
        return len(self._writes[-1][1])

    def readinto(self, buffer) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = bytes(len(view))
        for offset, data in self._writes:
            low, high = max(offset, self._at), min(offset + len(data), self._at + len(view))
            if low < high:
                view[low - self._at : high - self._at] = data[low - offset : high - offset]
        self._at += len(view)
        return len(view)

    def segments(self) -> list[tuple[int, bytes]]:
        """Return what was written last at each place, ascending, neighbours joined."""
        joined: list[tuple[int, bytearray]] = []
        for start, stop in _union((at, at + len(data)) for at, data in self._writes):
            joined.append((start, bytearray(stop - start)))
        for at, data in self._writes:  # in the order of writing, so the newest bytes win
            for start, buffer in joined:
                if start <= at < start + len(buffer):
                    buffer[at - start : at - start + len(data)] = data
        return [(start, bytes(buffer)) for start, buffer in joined]


def _union(spans) -> list[tuple[int, int]]:
    """Join spans that touch or overlap."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result
