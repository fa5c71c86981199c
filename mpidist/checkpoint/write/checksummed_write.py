"""Blocks on their way to a file: one is written while the next is copied and checksummed.

    caller    copy, checksum   copy, checksum   copy, checksum
    thread                     write            write            write

The copy begins with a page, so that the disk can take it from there: the system's cache would be
one more copy, and would be written out only when it is full, or at the end.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from queue import SimpleQueue

import numpy as np

from ..storage import files
from ..storage.worker_thread import Worker

#: Groups of blocks that are there at once: one is filled, one waits, one is written.
_ROOMS = 3


def write(
    descriptor: int, runs: Iterable[np.ndarray], size: int, direct: bool, digest=None
) -> list[int]:
    """Write `runs` of bytes, `size` in all, from the beginning of a file.

    Returns the checksum of each block, computed of the very bytes that are written; so is `digest`,
    an object of hashlib.
    """
    block, group = files.BLOCK, files.GROUP * files.BLOCK
    direct = direct and block % files.PAGE == 0 and files.set_direct(descriptor, True)
    with DoubleBufferedWriter(descriptor, min(group, size), direct) as behind:
        checksums: list[int] = []
        room, filled, at = behind.room(), 0, 0
        for run in runs:
            start = 0
            while start < len(run):
                count = min(len(run) - start, group - filled)
                # Whoever still changes the state changes neither the checksum nor what is written.
                np.copyto(room[filled : filled + count], run[start : start + count])
                start, filled = start + count, filled + count
                if filled == group or at + filled == size:
                    done = room[:filled]
                    checksums += [zlib.crc32(done[k : k + block]) for k in range(0, filled, block)]
                    if digest is not None:
                        digest.update(done)
                    behind.put(room, filled, at)
                    at, filled = at + filled, 0
                    room = behind.room()
    return checksums


class DoubleBufferedWriter:
    """A thread that writes what it is given, in order. Its rooms are used in turn.

    Where there are no more threads, the caller's own writes.
    """

    def __init__(self, descriptor: int, count: int, direct: bool):
        self._descriptor, self._direct = descriptor, direct
        self._error: BaseException | None = None
        self._full: SimpleQueue = SimpleQueue()
        self._free: SimpleQueue = SimpleQueue()
        for _ in range(_ROOMS):
            self._free.put(files.paged(count))
        self._thread: Worker | None = Worker(self._run, "mpidist-write")
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
        except BaseException:
            self._full.put(None)  # it may have begun, and nobody else would end it
            raise

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self._thread is not None:
            self._full.put(None)
            # The caller closes the file now, and its number may soon be that of another one.
            self._thread.end()
        if kind is None:
            self._told()

    def room(self) -> np.ndarray:
        """Return memory that is not being written. Raises the error of an earlier write."""
        room = self._free.get()
        self._told()
        return room

    def put(self, room: np.ndarray, count: int, offset: int) -> None:
        """Have the first `count` bytes of a room written at `offset`."""
        if self._thread is not None:
            self._full.put((room, count, offset))
        else:
            self._do(room, count, offset)

    def _run(self) -> None:
        while (given := self._full.get()) is not None:
            self._do(*given)

    def _do(self, room: np.ndarray, count: int, offset: int) -> None:
        if self._error is None:
            try:
                self._write(room[:count], offset)
            except BaseException as error:
                self._error = error
        self._free.put(room)

    def _write(self, data: np.ndarray, offset: int) -> None:
        if self._direct and len(data) % files.PAGE:  # the end of the file
            self._direct = files.set_direct(self._descriptor, False)
        files.write_at(self._descriptor, data, offset)
        if not self._direct:
            # The disk works on these while the next ones are made.
            files.begin_sync(self._descriptor, offset, len(data))

    def _told(self) -> None:
        if self._error is not None:
            raise self._error
