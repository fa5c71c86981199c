"""Files packed by gzip or zlib, read at any place of what they unpack to.

    unpacked   | block 0 | block 1 | block 2 | block 3 | block 4 |
    points     ^                   ^                   ^            unpacking can begin here
    block 3                        -----------########              unpacked; only this is kept

A point is the state of the unpacking there: the 32 KiB before it and tables, 40 to 56 KiB in all.
They are noted while the file is gone through once, each block at first; where they become too many
every second one goes. So memory is bounded, and what a block costs grows with the files instead.

J.-L. Gailly, M. Adler, zran.c in zlib's examples; RFC 1950 to 1952.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

#: Bytes of a block, and of what is given to zlib at a time: a point may hold on to the latter.
_BLOCK, _CALL = 256 << 10, 16 << 10
#: Points and blocks that are kept of all files together: 28 and 32 MiB.
_POINTS, _BLOCKS = 512, 128
#: For zlib: whether it is gzip or zlib is seen by its head.
_EITHER = 32 + zlib.MAX_WBITS


def is_compressed(head: bytes) -> bool:
    """Whether a file with these first bytes may be gzip or zlib; some other files pass too."""
    zlib_head = len(head) > 1 and head[0] & 143 == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return head.startswith(b"\x1f\x8b") or zlib_head


class _Cursor:
    """A place in a file that is unpacked in order. ``pread(at, count)`` reads the file."""

    def __init__(self, pread: Callable[[int, int], bytes]):
        self._pread, self._at, self.place = pread, 0, 0
        self._stream: Any = None  # none between two that follow each other

    def copy(self) -> _Cursor:
        other = _Cursor(self._pread)
        other._at, other.place = self._at, self.place
        other._stream = self._stream and self._stream.copy()
        return other

    def take(self, count: int) -> bytes:
        """Return up to so many bytes; none at the end. EOFError if the file is cut off."""
        while True:
            packed = self._pread(self._at, _CALL)
            if self._stream is None:
                # Another stream may follow, after zeros that fill up a block of a tape.
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


class Kept:
    """What is kept of several compressed files together. Not locked."""

    def __init__(self, files: int):
        self.points = max(1, _POINTS // files)
        self._blocks: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self.cursor: tuple[Compressed, _Cursor] | None = None

    def get(self, key: tuple[int, int]) -> bytes | None:
        """Return a block that is here, and remember that it was wanted."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def put(self, key: tuple[int, int], block: bytes) -> None:
        """Keep a block, in place of the one that was not wanted for longest."""
        self._blocks[key] = block
        if len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)


class Compressed:
    """One such file. Not locked. `pieces` has to be gone through before `read`.

    Parameters
    ----------
    pread : callable
        ``pread(at, count)`` returns bytes of the file as it is stored.
    kept : Kept
        Of all files of a data set.

    Attributes
    ----------
    size : int
        Bytes that could be unpacked.
    whole : bool
        False where the file ends before what was packed does.
    """

    def __init__(self, pread: Callable[[int, int], bytes], kept: Kept):
        self._pread, self._kept = pread, kept
        self.size, self.whole = 0, True
        self._points: dict[int, _Cursor] = {}
        self._spacing = _BLOCK

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes in order, note points and the size. Raises zlib.error where damaged."""
        cursor = _Cursor(self._pread)
        try:
            while True:
                if cursor.place % self._spacing == 0:
                    self._note(cursor)
                data = cursor.take(_BLOCK - cursor.place % _BLOCK)
                if not data:
                    break
                yield data
        except EOFError:
            self.whole = False
        self.size = cursor.place

    def _note(self, cursor: _Cursor) -> None:
        self._points[cursor.place] = cursor.copy()
        while len(self._points) > self._kept.points:
            self._spacing *= 2
            some = self._points.items()
            self._points = {at: point for at, point in some if at % self._spacing == 0}

    def read(self, begin: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `begin` on; past the end of the data with zeros."""
        while target:
            number, within = divmod(begin, _BLOCK)
            data = self._block(number)[within : within + len(target)]
            if not data:
                target[:] = bytes(len(target))
                return
            target[: len(data)] = data
            target, begin = target[len(data) :], begin + len(data)

    def _block(self, number: int) -> bytes:
        key, start = (id(self), number), number * _BLOCK
        block = self._kept.get(key)
        if block is None:
            count = min(_BLOCK, self.size - start)
            block = self._unpack(start, count)
            if len(block) == count:
                self._kept.put(key, block)
        return block

    def _unpack(self, start: int, count: int) -> bytes:
        """Return `count` bytes from `start`; fewer where the file is not what it was any more."""
        point = start - start % self._spacing
        # Where the last block ended, or a point that is nearer.
        owner, cursor = self._kept.cursor or (self, self._points[point])
        self._kept.cursor = None
        if owner is not self or not point <= cursor.place <= start or cursor.place == point:
            cursor = self._points[point].copy()
        parts: list[bytes] = []
        try:
            while cursor.place < start + count:
                wanted = cursor.place >= start
                data = cursor.take(min(_BLOCK, start + wanted * count - cursor.place))
                if not data:
                    return b"".join(parts)
                parts += [data] * wanted
        except (EOFError, zlib.error):
            return b"".join(parts)
        # The next block, if that is wanted next, goes on from here.
        self._kept.cursor = self, cursor
        return b"".join(parts)
