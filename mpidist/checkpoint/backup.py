"""What a restore overwrites, kept until it is known to be good.

A restore that finds nothing good leaves the caller's arrays as they were. It could read everything
twice, once to check and once to fill; copying the arrays first takes a third of that time, where
the memory is there for it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.arrays import copy_into
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
    """Copies of arrays, all of them in host memory, which `fits` has counted. Local."""

    def __init__(self, arrays: Sequence[Any]):
        self._pairs = []
        for array in arrays:
            copy = np.empty(array.shape, array.dtype)
            copy_into(copy, array)
            self._pairs.append((array, copy))

    def put_back(self) -> None:
        """Give the arrays the values that they had."""
        for array, copy in self._pairs:
            copy_into(array, copy)
