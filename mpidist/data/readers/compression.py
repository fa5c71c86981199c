"""Read any part of the uncompressed data of files that gzip or zlib has compressed.

    data       | block 0 | block 1 | block 2 | block 3 | block 4 |
    points     ^                   ^                   ^            decompression can begin here
    block 3                        -----------########              ---: dropped, ###: returned

A point is a copy of the decompressor's state, from which decompression can begin. A file has a
limited number of points, so the time to read a block grows with the size of the files.

References: J.-L. Gailly, M. Adler, zran.c in zlib's examples; RFC 1950 to 1952.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from typing import Any

from ..byte_runs import LRUCache

#: The bytes of a block, and of the compressed data that zlib gets at once. A point (saved state)
#: may keep such compressed data in memory.
_BLOCK, _CALL = 256 << 10, 16 << 10
#: The largest number of points and of blocks, of all files together: 28 and 32 MiB.
_POINTS, _BLOCKS = 512, 128
#: With this value, zlib finds out by the first bytes whether a file is gzip or zlib.
_EITHER = 32 + zlib.MAX_WBITS


def is_compressed(head: bytes) -> bool:
    """Return whether `head`, the first bytes of a file, looks like gzip or zlib."""
    zlib_head = len(head) > 1 and head[0] & 143 == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return head.startswith(b"\x1f\x8b") or zlib_head


class _Cursor:
    """A decompressor at some position of a file; ``pread(at, count)`` reads the file."""

    def __init__(self, pread: Callable[[int, int], bytes]):
        self._pread, self._at, self.place = pread, 0, 0
        self._stream: Any = None  # a file may have several streams; None between two of them

    def copy(self) -> _Cursor:
        other = copy(self)
        other._stream = self._stream and self._stream.copy()
        return other

    def take(self, count: int) -> bytes:
        """Return the next 1 to `count` decompressed bytes, or no bytes at the end of the file.

        Raises EOFError if the file is truncated.
        """
        while True:
            packed = self._pread(self._at, _CALL)
            if self._stream is None:
                # Another stream may follow after zeros, with which programs that write to tapes
                # fill up a block.
                zeros = len(packed) - len(packed.lstrip(b"\0"))
                if zeros:
                    self._at += zeros
                    continue
                if not packed:
                    return b""
                self._stream = zlib.decompressobj(_EITHER)
            stream = self._stream
            data = stream.decompress(packed, count)
            rest = stream.unused_data if stream.eof else stream.unconsumed_tail
            self._at += len(packed) - len(rest)
            if stream.eof:
                self._stream = None
            if data:
                self.place += len(data)
                return data
            if not packed:
                raise EOFError("it is cut off")


class DecompressionCache:
    """A cache of decompressed blocks, which all compressed files of a data set share.

    `files` is the number of files of the data set.
    """

    def __init__(self, files: int):
        self.points = max(1, _POINTS // files)  # of each file
        self.blocks = LRUCache(lambda key: key[0].unpack(key[1]), _BLOCKS)
        self.cursor: tuple[Compressed, _Cursor] | None = None


class Compressed:
    """A compressed file, of which any part of the uncompressed data can be read.

    Before the first call of `read`, the caller must iterate over all that `pieces` yields. Only one
    thread at a time may use this object.

    Parameters
    ----------
    pread : callable
        ``pread(at, count)`` returns bytes of the compressed file.
    cache : DecompressionCache
        The cache of all files of a data set.

    Attributes
    ----------
    size : int
        Number of bytes that could be decompressed.
    whole : bool
        False if the file is truncated.
    """

    def __init__(self, pread: Callable[[int, int], bytes], cache: DecompressionCache):
        self._pread, self._cache = pread, cache
        self.size, self.whole = 0, True
        self._points: dict[int, _Cursor] = {}
        self._spacing = _BLOCK

    def pieces(self) -> Iterator[bytes]:
        """Yield all decompressed data in order; store points at which `read` can begin."""
        cursor = _Cursor(self._pread)
        try:
            self._note(cursor)
            while data := cursor.take(_BLOCK - cursor.place % _BLOCK):
                yield data
                if cursor.place % self._spacing == 0:
                    self._note(cursor)
        except EOFError:
            self.whole = False
        self.size = cursor.place

    def _note(self, cursor: _Cursor) -> None:
        self._points[cursor.place] = cursor.copy()
        while len(self._points) > self._cache.points:
            self._spacing *= 2
            some = self._points.items()
            self._points = {at: point for at, point in some if at % self._spacing == 0}

    def read(self, begin: int, target: memoryview) -> None:
        """Fill `target` with decompressed data from byte `begin` on, then with zeros."""
        while target:
            number, within = divmod(begin, _BLOCK)
            data = self._block(number)[within : within + len(target)]
            if not data:
                target[:] = bytes(len(target))
                return
            target[: len(data)] = data
            target, begin = target[len(data) :], begin + len(data)

    def _block(self, number: int) -> bytes:
        block = self._cache.blocks[self, number]
        if len(block) < min(_BLOCK, self.size - number * _BLOCK):
            self._cache.blocks.drop((self, number))
        return block

    def unpack(self, number: int) -> bytes:
        """Return block `number` of the decompressed data.

        If the file has changed since `pieces` read it, the result may be shorter than the block.
        """
        start = number * _BLOCK
        stop = min(start + _BLOCK, self.size)
        point = start - start % self._spacing
        # Decompression begins where the last block ended, or at the nearest point (saved state)
        # before `start`.
        owner, cursor = self._cache.cursor or (self, self._points[point])
        self._cache.cursor = None
        if owner is not self or not point <= cursor.place <= start or cursor.place == point:
            cursor = self._points[point].copy()
        parts: list[bytes] = []
        with suppress(EOFError, zlib.error):
            while cursor.place < stop:
                wanted = cursor.place >= start
                data = cursor.take(min(_BLOCK, (stop if wanted else start) - cursor.place))
                if not data:
                    break
                parts += [data] * wanted
            else:
                self._cache.cursor = self, cursor  # the next block may begin here
        return b"".join(parts)
