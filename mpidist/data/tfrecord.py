"""TFRecord files: records of any bytes, each with its length and two checksums.

    length (8 bytes)  crc of it (4)  |  data  |  crc of the data (4)         little-endian

The checksums are CRC-32C, rotated and with a constant added ("masked"). An index of all records is
made by reading the lengths alone, so that a record is reached without reading another's data.

TensorFlow, "TFRecord and tf.train.Example" and tensorflow/core/lib/hash/crc32c.h.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from mpidist.errors import BadRecord, ConfigError

_HEAD, _FOOT = 12, 4
_DELTA = 0xA282EAD8
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
    return (crc >> 15 | crc << 17) + _DELTA & 0xFFFFFFFF


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
        try:
            for number in range(len(self.paths)):
                self._starts.append(self._index(number))
                self.bounds.append(self.bounds[-1] + len(self._starts[-1]) - 1)
        except BaseException:
            self.close()
            raise

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

    def read(self, indices: Sequence[int] | np.ndarray) -> list[bytes]:
        """Return the data of the records at `indices`; BadRecord for one that is damaged."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise ConfigError(f"tfrecord: record {indices.max()} of {len(self)}")
        found: list = [None] * len(indices)
        order = np.argsort(indices, kind="stable")
        files = np.searchsorted(self.bounds, indices[order], side="right") - 1
        with self._lock:
            for number in np.unique(files).tolist():
                mine = order[files == number]
                rows = indices[mine] - self.bounds[number]
                starts, stops = self._starts[number][rows], self._starts[number][rows + 1]
                # Neighbours are read at once.
                cuts = np.flatnonzero(starts[1:] > stops[:-1]) + 1
                for first, last in itertools.pairwise([0, *cuts.tolist(), len(mine)]):
                    low = int(starts[first])
                    block = self._pread(number, low, int(stops[last - 1]))
                    places = mine[first:last].tolist()
                    begins, ends = starts[first:last] - low, stops[first:last] - low
                    for place, begin, end in zip(
                        places, begins.tolist(), ends.tolist(), strict=True
                    ):
                        data = block[begin + _HEAD : end - _FOOT]
                        if not self._good(block, begin, end, data):
                            raise self._bad(int(indices[place]), number, block, begin, end, low)
                        found[place] = data
        return found

    def _good(self, block: bytes, begin: int, end: int, data: bytes) -> bool:
        crc = self._crc(data)
        stored = (crc >> 15 | crc << 17) + _DELTA & 0xFFFFFFFF  # `masked`, without the call
        return (
            int.from_bytes(block[begin : begin + 8], "little") == end - begin - _HEAD - _FOOT
            and int.from_bytes(block[end - _FOOT : end], "little") == stored
        )

    def _bad(self, index, number, block, begin, end, low) -> BadRecord:
        where = f"at byte {begin + low} of {self.paths[number]}"
        length = int.from_bytes(block[begin : begin + 8], "little") + _HEAD + _FOOT
        if length != end - begin or end > len(block):
            return BadRecord(index, f"it is cut off, {where}")
        return BadRecord(index, f"its checksum is wrong, {where}")

    def _pread(self, number: int, low: int, high: int) -> bytes:
        file = self._file(number)
        block = os.pread(file, high - low, low)
        while len(block) < high - low:
            more = os.pread(file, high - low - len(block), low + len(block))
            if not more:
                break  # the file has become shorter: its records will not be whole
            block += more
        return block

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
