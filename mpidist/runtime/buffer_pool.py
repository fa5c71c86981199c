"""A pool of host buffers for operations, with a limit in bytes.

A buffer is idle while no operation uses it. Any operation may take an idle buffer.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from .. import events
from ..arrays import host_empty, is_device

#: The largest number of bytes that the pool of one communicator keeps while no operation runs.
LIMIT = 256 << 20

_LEAST = 256


def rounded(nbytes: int) -> int:
    """Return the size of a buffer for `nbytes` bytes: 4, 5, 6 or 7 times a power of two."""
    if nbytes <= _LEAST:
        return _LEAST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class BufferPool:
    """The idle buffers of one communicator.

    Attributes
    ----------
    limit : int
        The largest number of bytes that idle buffers may have. Beyond it, the buffers that were
        unused for the longest time are freed.
    kept : int
        The bytes of all idle buffers.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit, self.kept = limit, 0
        self._idle: OrderedDict[tuple[bool, int], list[np.ndarray]] = OrderedDict()
        self._told = False

    def take(self, count: int, dtype, like=None) -> np.ndarray:
        """Return an uninitialised 1-D host array of `count` elements, from the pool if possible.

        The array is in pinned memory if `like` is a device array.
        """
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        key = is_device(like), rounded(nbytes)
        if idle := self._idle.get(key):
            raw = idle.pop()
            self.kept -= raw.size
        else:
            raw = host_empty(key[1], np.uint8, like)
        return raw[:nbytes].view(dtype)

    def give(self, vector: np.ndarray, like=None) -> None:
        """Put an array from `take` back into the pool; pass the same `like` as to `take`."""
        raw = vector.base
        assert isinstance(raw, np.ndarray)  # `take` returns a view
        if raw.size > self.limit:
            self._tell(raw.size)
            return
        key = is_device(like), raw.size
        self._idle.setdefault(key, []).append(raw)
        self._idle.move_to_end(key)
        self.kept += raw.size
        while self.kept > self.limit:
            self._tell(self.kept)
            oldest, idle = next(iter(self._idle.items()))
            if idle:
                self.kept -= idle.pop(0).size
            else:
                del self._idle[oldest]

    def close(self) -> None:
        """Free the memory of all idle buffers."""
        self._idle.clear()
        self.kept = 0

    def _tell(self, nbytes: int) -> None:
        """Log once that the pool is full, so that operations have to allocate new buffers."""
        if not self._told:
            self._told = True
            events.emit("buffer_pool_full", bytes=nbytes, limit=self.limit)
