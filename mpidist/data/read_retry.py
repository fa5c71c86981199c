"""Runs of bytes out of files, few of which are open, into memory that is used again.

runs         5 | 9..12 | 40    the system is told of the next ones before they are read
in order     9..12 | 13..16    the disk goes on while what came is decoded

Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

#: Files that are open at a time, of a data set that may have thousands.
_OPEN = 32
#: Runs that the system is told of before they are read.
_TOLD = _OPEN - 1
#: Bytes that a reader in order is ahead of itself.
_AHEAD = 4 << 20
#: Arrays below this are left to malloc; and what is kept of larger ones.
_SMALL, _KEPT = 64 << 10, 64 << 20


class Descriptors:
    """Opens files when they are asked for, and keeps `most` of them open. Not locked.

    A number that was given is good until the next call: that may close its file.

    Parameters
    ----------
    opening : callable
        Returns the descriptor of the file of a key; what it raises goes up.
    most : int
    """

    def __init__(self, opening: Callable[..., int], most: int = _OPEN):
        self._opening, self._most = opening, most
        self._open: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __getitem__(self, key: Hashable) -> int:
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        if len(self._open) >= self._most:
            os.close(self._open.popitem(last=False)[1])
        self._open[key] = self._opening(key)
        return self._open[key]

    def close(self) -> None:
        """Close all; they are opened again when they are asked for."""
        while self._open:
            os.close(self._open.popitem()[1])


class ByteRun(NamedTuple):
    """Bytes of a file that go to one place."""

    file: int
    begin: int
    target: memoryview


class RunReader:
    """Reads runs of files, whose descriptors `descriptor(file)` returns. Not locked."""

    def __init__(self, descriptor):
        self._descriptor = descriptor
        self._next, self._told = (-1, -1), 0

    def read(self, runs: Sequence[ByteRun]) -> int:
        """Read all; returns how many were read whole before the first that is cut short.

        What a file has no bytes for, because it has become shorter, is zero.
        """
        whole = len(runs)
        for number, run in enumerate(runs):
            # As many as this are always on their way, and the next one is the oldest of them.
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
        """Tell the system of what a reader in order will want next, in large pieces."""
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
            with suppress(OSError):  # advice only: reading will tell what is wrong
                os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_WILLNEED)


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of an array whose elements lie one after the other."""
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
    """Memory for large arrays, which the system would take back and give anew, page by page.

    What an array of `empty` lies in is used again when that array, and all that was cut out of
    it, are gone, in whatever thread. `empty` is called by one thread at a time.
    """

    def __init__(self) -> None:
        self._lent: dict[int, tuple[weakref.ref, np.ndarray]] = {}
        self._returned: deque[np.ndarray] = deque()
        self._free: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Return an array of anything."""
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
        # Every array that is cut out of `seen` holds on to it: NumPy does not look behind a
        # memoryview for whose the memory is.
        seen = np.frombuffer(bytes_of(room), dtype, nbytes // dtype.itemsize)
        reference = weakref.ref(seen, self._back)
        self._lent[id(reference)] = reference, room
        return seen.reshape(shape)

    def _back(self, seen: weakref.ref) -> None:
        # In the thread that let go last, and maybe amid `empty`: two steps that nothing can part.
        self._returned.append(self._lent.pop(id(seen))[1])
