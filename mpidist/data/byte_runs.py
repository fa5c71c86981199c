"""Read ranges of bytes ("runs") from files into reused memory, with few files open at a time.

    runs         5 | 9..12 | 40    the system is asked to read the next runs ahead
    in order     9..12 | 13..16    the disk reads ahead while the last bytes are decoded

The code in this module works for any file format.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

#: The largest number of files that are open at a time; a data set may have thousands of files.
OPEN_FILES = 32
#: Number of runs that the system reads ahead.
_TOLD = OPEN_FILES - 1
#: Bytes that the system reads ahead of a reader that reads a file in order.
_AHEAD = 4 << 20
#: Two limits of `Rooms` in bytes. `Rooms` keeps the memory of arrays that have at least the first
#: number of bytes, because malloc is fast for smaller arrays. `Rooms` keeps at most the second
#: number of free bytes.
_SMALL, _KEPT = 64 << 10, 64 << 20


class LRUCache:
    """A cache of at most `most` values by key, which drops the least recently used value.

    ``make(key)`` makes a value, and ``dispose(value)`` is called with each value that is dropped. A
    value is valid until the next use of the cache, which only one thread at a time may use.
    """

    def __init__(self, make: Callable, most: int, dispose: Callable = lambda value: None):
        self._make, self._most, self._dispose = make, most, dispose
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def __getitem__(self, key: Hashable):
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        if len(self._values) >= self._most:
            self._dispose(self._values.popitem(last=False)[1])
        self._values[key] = self._make(key)
        return self._values[key]

    def drop(self, key: Hashable) -> None:
        """Drop the value of `key`."""
        self._dispose(self._values.pop(key))

    def close(self) -> None:
        """Drop all values."""
        while self._values:
            self._dispose(self._values.popitem()[1])


class ByteRun(NamedTuple):
    """A range of bytes of file number `file` from byte `begin` on, and the memory for it."""

    file: int
    begin: int
    target: memoryview


class RunReader:
    """Reads runs (ranges of bytes) of files, from one thread at a time."""

    def __init__(self, descriptor):
        self._descriptor = descriptor
        self._next, self._told = (-1, -1), 0

    def read(self, runs: Sequence[ByteRun]) -> int:
        """Read all `runs` (byte ranges of files); return the number of the first incomplete run.

        If a file ends before the end of a run, the missing bytes are set to zero.
        """
        whole = len(runs)
        for number, run in enumerate(runs):
            # Before the first run is read, the next `_TOLD` runs are announced to the system.
            # Before each later run, one more run is announced. So the system always reads `_TOLD`
            # runs ahead.
            for soon in (
                runs[number + _TOLD : number + _TOLD + 1] if number else runs[1 : 1 + _TOLD]
            ):
                self._expect(soon.file, soon.begin, len(soon.target))
            if not _fill(self._descriptor(run.file), run.begin, run.target):
                whole = min(whole, number)
        if runs:
            self._go_ahead(runs[0], runs[-1])
        return whole

    def _go_ahead(self, first: ByteRun, last: ByteRun) -> None:
        """If run `first` begins where the last `read` ended, ask the system to read far ahead."""
        end = last.begin + len(last.target)
        if (first.file, first.begin) != self._next:
            self._told = 0
        elif end + _AHEAD // 2 > self._told:
            start = max(end, self._told)
            self._told = end + _AHEAD
            self._expect(last.file, start, self._told - start)
        self._next = last.file, end

    def _expect(self, file: int, begin: int, count: int) -> None:
        descriptor = self._descriptor(file)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # posix_fadvise is only a hint; the read reports errors
                os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_WILLNEED)


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array as a memoryview, without a copy."""
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _fill(descriptor: int, begin: int, target: memoryview) -> bool:
    while target:
        count = os.preadv(descriptor, [target], begin)
        if not count:
            target[:] = bytes(len(target))
            return False
        target, begin = target[count:], begin + count
    return True


class Rooms:
    """Memory for large arrays, used again when neither the array nor a view of it exists any more.

    Only one thread at a time may call `empty`.
    """

    def __init__(self) -> None:
        self._lent: dict[int, tuple[weakref.ref, np.ndarray]] = {}
        self._returned: deque[np.ndarray] = deque()
        self._free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Return an uninitialised array, in memory that was used before if possible."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if nbytes < _SMALL:
            return np.empty(shape, dtype)
        while self._returned:
            self._free.append(self._returned.popleft())
        while sum(map(len, self._free)) > _KEPT:
            self._free.pop(0)
        fitting = [k for k, room in enumerate(self._free) if nbytes <= len(room) <= 2 * nbytes]
        room = self._free.pop(fitting[-1]) if fitting else np.empty(nbytes, np.uint8)
        # Every view of `seen` keeps `seen` alive, because NumPy looks for the owner of the memory,
        # and this search ends at a memoryview.
        seen = np.frombuffer(bytes_of(room), dtype, nbytes // dtype.itemsize)
        reference = weakref.ref(seen, self._back)
        self._lent[id(reference)] = reference, room
        return seen.reshape(shape)

    def _back(self, seen: weakref.ref) -> None:
        # May run in any thread, and in the middle of `empty`; both steps are atomic.
        self._returned.append(self._lent.pop(id(seen))[1])
