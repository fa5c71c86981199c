"""TFRecord files: records of any bytes, each with its length and two checksums.

    length (8 bytes)  crc of it (4)  |  data  |  crc of the data (4)         little-endian

The checksums are CRC-32C, rotated and with a constant added ("masked"). An index of all records is
made by reading the lengths alone, so that a record is reached without reading another's data.

TensorFlow, "TFRecord and tf.train.Example" and tensorflow/core/lib/hash/crc32c.h.
"""

from __future__ import annotations

import bisect
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from mpidist.errors import BadRecord, ConfigError

_HEAD, _FOOT = 12, 4
#: Bytes per look at a file while its index is made; and records closer together are read at once.
_LOOK = 1 << 16
#: Open files at a time, of a data set that may have thousands.
_OPEN = 32


def _checksum():
    """CRC-32C of bytes, or ConfigError with the cure."""
    try:
        from google_crc32c import value
    except ImportError:
        raise ConfigError(
            'TFRecord files are checked by google-crc32c, not here: pip install "mpidist[data]"'
        ) from None
    return value


def masked(crc: int) -> int:
    """Return a checksum as it is stored: rotated by 15 bits, plus a constant. Local."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class TFRecords:
    """Records of TFRecord files by number, through an index. Local; threads take turns.

    Parameters
    ----------
    paths : path-like, or sequence of them
        Files in their order: record numbers go through them one after the other.

    Raises ConfigError where a file is missing, or the length of a record is damaged: where the
    next one begins is then unknown, so what follows is lost.
    """

    def __init__(self, paths: str | os.PathLike | Sequence):
        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        self.paths = [os.fspath(path) for path in given]
        if not self.paths:
            raise ConfigError("tfrecord: no files are given; give at least one")
        self._crc = _checksum()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, int] = OrderedDict()
        self._starts: list[np.ndarray] = []
        self.bounds = [0]
        for number in range(len(self.paths)):
            self._starts.append(self._index(number))
            self.bounds.append(self.bounds[-1] + len(self._starts[-1]) - 1)

    def __len__(self) -> int:
        return self.bounds[-1]

    def _file(self, number: int) -> int:
        """Return the descriptor of a file; the one used longest ago makes room."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= _OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            self._open[number] = os.open(self.paths[number], os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                f"tfrecord: cannot read {self.paths[number]}: {error.strerror}"
            ) from None
        return self._open[number]

    def _index(self, number: int) -> np.ndarray:
        """Where each record of a file begins, and where the last one ends."""
        file, path = self._file(number), self.paths[number]
        size = os.fstat(file).st_size
        starts, at, begin, seen = [0], 0, 0, b""
        while at < size:
            if not begin <= at <= begin + len(seen) - _HEAD:
                begin, seen = at, os.pread(file, _LOOK if at == begin + len(seen) else _HEAD, at)
            head = seen[at - begin : at - begin + _HEAD]
            if len(head) < _HEAD:
                starts.append(size)  # cut off in its head: a bad record
                break
            length, crc = struct.unpack("<QI", head)
            if masked(self._crc(head[:8])) != crc:
                raise ConfigError(
                    f"{path}: the length of record {len(starts) - 1}, at byte {at}, is damaged or "
                    "this is no TFRecord file; fetch it again"
                )
            at += _HEAD + length + _FOOT
            starts.append(min(at, size))
        return np.array(starts, np.int64)

    def read(self, indices: Iterable[int]) -> list[bytes]:
        """Return the data of the records at `indices`; BadRecord for one that is damaged."""
        indices = [int(index) for index in indices]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        found: list = [None] * len(indices)
        with self._lock:
            k = 0
            while k < len(order):
                first = k
                number, row = self._place(indices[order[k]])
                starts = self._starts[number]
                low, high = int(starts[row]), int(starts[row + 1])
                # Neighbours of one file are read at once.
                while k + 1 < len(order):
                    other, next_row = self._place(indices[order[k + 1]])
                    if other != number or starts[next_row] > high:
                        break
                    k, high = k + 1, int(starts[next_row + 1])
                block = self._pread(number, low, high)
                for place in order[first : k + 1]:
                    found[place] = self._checked(indices[place], block, low)
                k += 1
        return found

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise ConfigError(f"tfrecord: record {index} of {len(self)}")
        number = bisect.bisect_right(self.bounds, index) - 1
        return number, index - self.bounds[number]

    def _pread(self, number: int, low: int, high: int) -> bytes:
        file = self._file(number)
        block = os.pread(file, high - low, low)
        while len(block) < high - low:
            more = os.pread(file, high - low - len(block), low + len(block))
            if not more:
                break  # the file has become shorter: its records will not be whole
            block += more
        return block

    def _checked(self, index: int, block: bytes, low: int) -> bytes:
        number, row = self._place(index)
        start, stop = (int(at) - low for at in self._starts[number][row : row + 2])
        where = f"at byte {start + low} of {self.paths[number]}"
        record = block[start:stop]
        length = struct.unpack_from("<Q", record)[0] if len(record) >= _HEAD else -1
        if length != len(record) - _HEAD - _FOOT:
            raise BadRecord(index, f"it is cut off, {where}")
        data = record[_HEAD:-_FOOT]
        if masked(self._crc(data)) != struct.unpack_from("<I", record, _HEAD + length)[0]:
            raise BadRecord(index, f"its checksum is wrong, {where}")
        return data

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])


def write(path: str | os.PathLike, records: Iterable[bytes]) -> None:
    """Write a TFRecord file: for tests, and to prepare data. Local."""
    crc = _checksum()
    with open(path, "wb") as file:  # noqa: PTH123
        for data in records:
            head = struct.pack("<Q", len(data))
            file.write(head + struct.pack("<I", masked(crc(head))))
            file.write(data + struct.pack("<I", masked(crc(data))))
