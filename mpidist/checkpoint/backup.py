"""What a restore overwrites, kept until it is known to be good.

A restore that finds nothing good leaves the caller's arrays as they were. It could read everything
twice, once to check and once to fill; keeping what each block overwrites takes a fraction of that
time, beside the disk's, where the memory is there for it.
"""

from __future__ import annotations

import socket
import threading

import numpy as np

from mpidist.checkpoint.together import together
from mpidist.memory import available_memory


def fits(comm, nbytes: int) -> bool:
    """Whether every host has twice the memory that copies of `nbytes` per rank take. Collective."""

    def enough(answers: list) -> bool:
        wanted: dict[str, int] = {}
        for host, count, _ in answers:
            wanted[host] = wanted.get(host, 0) + count
        return all(2 * wanted[host] <= free for host, _, free in answers)

    def local() -> tuple[str, int, int]:
        return socket.gethostname(), nbytes, available_memory() or 0  # 0 where unknown

    return together(comm, "restore", local, enough)


class Backup:
    """Copies of parts of host arrays, in memory for all of them. Local, from any thread."""

    def __init__(self, memory: np.ndarray):
        self._memory, self._used, self._lock = memory, 0, threading.Lock()
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []

    def keep(self, part: np.ndarray) -> None:
        """Copy what `part` holds, which is not kept yet."""
        with self._lock:
            start, self._used = self._used, self._used + part.nbytes
        # Where it begins is no matter of the dtype: NumPy copies from and to any byte.
        copy = self._memory[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
        np.copyto(copy, part)
        self._kept.append((part, copy))

    def put_back(self) -> None:
        """Give all parts the values that they had, and forget them.

        The last first: of arrays that overlap, such as two names of one, only what was kept first
        is what the caller had.
        """
        for part, copy in reversed(self._kept):
            np.copyto(part, copy)
        self._kept, self._used = [], 0
