"""Write a file with two threads: one fills a buffer while the other writes the previous buffer.

    caller    copy, checksum   copy, checksum   copy, checksum
    thread                     write            write            write

Each buffer begins at a page boundary, so that it can be written to the disk without the cache of
the operating system.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from queue import SimpleQueue

import numpy as np

from ..storage import files
from ..storage.worker_thread import Worker

#: Number of buffers: the caller fills one, the thread writes one, and one waits for the thread.
_BUFFERS = 3


def write(
    descriptor: int, runs: Iterable[np.ndarray], size: int, direct: bool, digest=None
) -> list[int]:
    """Write the byte arrays `runs` to a file, one after the other; `size` is their total size.

    Returns the CRC-32 of each block of 1 MiB, and updates the hashlib object `digest`.
    """
    block, group = files.BLOCK, files.GROUP * files.BLOCK
    direct = direct and block % files.PAGE == 0 and files.set_direct_io(descriptor, True)
    with DoubleBufferedWriter(descriptor, min(group, size), direct) as writer:
        checksums: list[int] = []
        buffer, filled, at = writer.buffer(), 0, 0
        for run in runs:
            while len(run):
                count = min(len(run), group - filled)
                # After this copy, a change of the state does not change the checksum or the file.
                np.copyto(buffer[filled : filled + count], run[:count])
                run, filled = run[count:], filled + count
                if filled == group or at + filled == size:
                    done = buffer[:filled]
                    checksums += [zlib.crc32(done[k : k + block]) for k in range(0, filled, block)]
                    if digest is not None:
                        digest.update(done)
                    writer.put(buffer, filled, at)
                    buffer, filled, at = writer.buffer(), 0, at + filled
    return checksums


class DoubleBufferedWriter:
    """A thread that writes buffers to a file, in order, while the caller fills other buffers."""

    def __init__(self, descriptor: int, count: int, direct: bool):
        self._descriptor, self._direct = descriptor, direct
        self._error: BaseException | None = None
        self._full: SimpleQueue = SimpleQueue()
        self._free: SimpleQueue = SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(files.paged(count))
        self._thread: Worker | None = Worker(self._run, "mpidist-write")
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
        except BaseException:
            self._full.put(None)  # end the thread, which may already run
            raise

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self._thread is not None:
            self._full.put(None)
            # The thread must end first, because the caller then closes the file, and another file
            # may get the same descriptor.
            self._thread.end()
        if kind is None:
            self._check()

    def buffer(self) -> np.ndarray:
        """Wait for a free buffer and return it, or raise the error of an earlier write."""
        buffer = self._free.get()
        self._check()
        return buffer

    def put(self, buffer: np.ndarray, count: int, offset: int) -> None:
        """Tell the thread to write the first `count` bytes of `buffer` to the file, at `offset`."""
        if self._thread is not None:
            self._full.put((buffer, count, offset))
        else:
            self._write(buffer, count, offset)

    def _run(self) -> None:
        while (given := self._full.get()) is not None:
            self._write(*given)

    def _write(self, buffer: np.ndarray, count: int, offset: int) -> None:
        """Write `count` bytes of `buffer`, unless an earlier write failed, and free the buffer."""
        try:
            if self._error is None:
                if self._direct and count % files.PAGE:  # the last bytes of the file
                    self._direct = files.set_direct_io(self._descriptor, False)
                files.write_at(self._descriptor, buffer[:count], offset)
                if not self._direct:
                    # The disk writes these bytes while the caller fills the next buffer.
                    files.begin_sync(self._descriptor, offset, count)
        except BaseException as error:
            self._error = error
        self._free.put(buffer)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
