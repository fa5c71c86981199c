"""Host memory that operations need while they run, kept for the next one: bounded in bytes.

Plans of many shapes would each keep a work vector and scratch of their own, though only one of
them runs at a time. Here they share buffers: between two operations a buffer is free for any of
them. Sizes are rounded up to one of four steps per power of two, so that nearly equal shapes find
the same buffer, and at most a fifth is wasted.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from .. import events
from ..arrays import host_empty, is_device

#: Bytes that the pool of one communicator keeps at most while nothing runs.
LIMIT = 256 << 20

_LEAST = 256


def rounded(nbytes: int) -> int:
    """Return the size of the buffer for so many bytes: 4, 5, 6 or 7 times a power of two. Pure."""
    if nbytes <= _LEAST:
        return _LEAST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class BufferPool:
    """Idle buffers of one communicator.

    Attributes
    ----------
    limit : int
        Bytes to keep; what comes back beyond it is freed, the longest unused first.
    kept : int
        Bytes that are idle now.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit, self.kept = limit, 0
        self._idle: OrderedDict[tuple[bool, int], list[np.ndarray]] = OrderedDict()
        self._told = False

    def take(self, count: int, dtype, like=None) -> np.ndarray:
        """Return a flat vector, pinned where `like` is a device array; any values are in it."""
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        key = is_device(like), rounded(nbytes)
        idle = self._idle.get(key)
        if idle:
            raw = idle.pop()
            self.kept -= raw.size
        else:
            raw = host_empty(key[1], np.uint8, like)
        return raw[:nbytes].view(dtype)

    def give(self, vector: np.ndarray, like=None) -> None:
        """Take back what `take` returned for the same `like`; nobody may use it any more."""
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
        """Free all that is idle."""
        self._idle.clear()
        self.kept = 0

    def _tell(self, nbytes: int) -> None:
        """Say once that buffers are made anew again and again, which costs time."""
        if not self._told:
            self._told = True
            events.emit("buffer_pool_full", bytes=nbytes, limit=self.limit)
