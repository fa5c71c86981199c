"""Read TFRecord files: a record is any sequence of bytes, with its length and two checksums.

    length (8 bytes)  crc of the length (4)  |  data  |  crc of the data (4)     little-endian

The checksums are "masked": a CRC-32C is rotated, and a constant is added. A file that is compressed
by gzip or zlib is decompressed once to find its records.

References: TensorFlow, "TFRecord and tf.train.Example"; tensorflow/core/lib/hash/crc32c.h.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ...errors import BadRecord, ConfigError
from ..byte_runs import OPEN_FILES, ByteRun, LRUCache, RunReader, bytes_of
from ..sources import check_indices
from .compression import Compressed, DecompressionCache, is_compressed

_HEAD, _FOOT = 12, 4
_DELTA = 0xA282EAD8
#: Bytes per read while the index of a file is made.
_LOOK = 1 << 16
#: The largest record, in bytes, that is decompressed. A few compressed bytes can stand for any
#: number of bytes.
_LONGEST = 1 << 30


def _checksum():
    """Return a function that computes CRC-32C. Raises ConfigError without google-crc32c."""
    try:
        from google_crc32c import implementation, value
    except ImportError:
        raise ConfigError(
            'TFRecord files need google-crc32c, which is missing: pip install "mpidist[data]"'
        ) from None
    return value if implementation == "c" else lambda data: value(bytes(data))


def masked(crc):
    """Return CRC-32C checksums `crc` as TFRecord files store them: rotated, plus a constant."""
    return (crc >> 15 | crc << 17) + _DELTA & 0xFFFFFFFF


class Laid(NamedTuple):
    """Records that were read into one array: record k is ``data[starts[k] : stops[k]]``."""

    data: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def gather(self, dtype, places: np.ndarray) -> np.ndarray:
        """Return one value of `dtype` from each byte position in `places`, aligned or not."""
        dtype = np.dtype(dtype)
        count = max(0, len(self.data) - dtype.itemsize + 1)
        return np.ndarray((count,), dtype, self.data, 0, (1,))[places]


class TFRecords:
    """The records of TFRecord files, read by their numbers, from any thread.

    Parameters
    ----------
    paths : path-like, or sequence of path-like
        The files, in the order in which their records are numbered, plain or compressed by gzip or
        zlib.

    Raises
    ------
    ConfigError
        A file is missing, or the length of a record or the compressed data are damaged.
    """

    def __init__(self, paths: str | os.PathLike | Sequence):
        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        self.paths = paths = [os.fspath(path) for path in given]
        if not self.paths:
            raise ConfigError("tfrecord: no files are given; give at least one")
        self._crc = _checksum()
        self._lock = threading.Lock()
        self._files = LRUCache(
            lambda number: os.open(paths[number], os.O_RDONLY), OPEN_FILES, os.close
        )
        self._runs = RunReader(self._files.__getitem__)
        self._packed: dict[int, Compressed] = {}
        self._cache = DecompressionCache(len(self.paths))
        try:
            bounds = [self._index(number) for number in range(len(self.paths))]
        except BaseException:
            self.close()
            raise
        self.bounds = [0, *itertools.accumulate(len(places) - 1 for places in bounds)]
        # For each record, with its head and foot: the offsets in its file at which it begins and
        # ends.
        self._begins = np.concatenate([places[:-1] for places in bounds])
        self._ends = np.concatenate([places[1:] for places in bounds])

    def __len__(self) -> int:
        return self.bounds[-1]

    @property
    def counts(self) -> list[int]:
        """Number of records in each file, as the argument `counts` of `sharding.shard`."""
        return [stop - start for start, stop in itertools.pairwise(self.bounds)]

    @property
    def nbytes(self) -> int:
        """Number of bytes of all records, including lengths and checksums."""
        return int((self._ends - self._begins).sum())

    def _index(self, number: int) -> np.ndarray:
        """Return the offset of each record of file `number`, and the end of the last record."""
        path = self.paths[number]
        try:
            file = self._files[number]
            look: Callable[[int, int], bytes] = partial(self._pread, number)
            head = look(0, _HEAD)  # fails for a folder, which can be opened
        except OSError as error:
            raise ConfigError(f"tfrecord: cannot read {path}: {error.strerror}") from None
        # The checksum of the first length decides whether the file is plain, because 2 of 65,536
        # lengths look like the first bytes of a compressed file.
        if is_compressed(head) and not self._is_head(head):
            self._packed[number] = Compressed(look, self._cache)
            look = _Forward(self._packed[number].pieces())
        starts, at, begin, seen = [0], 0, 0, b""
        while True:
            if not begin <= at <= begin + len(seen) - _HEAD:
                try:
                    begin, seen = at, look(at, _LOOK if at == begin + len(seen) else _HEAD)
                except zlib.error as error:
                    raise ConfigError(
                        f"{path}: its gzip or zlib is damaged or this is no TFRecord file "
                        f"({error}); fetch it again"
                    ) from None
            head = seen[at - begin : at - begin + _HEAD]
            if len(head) < _HEAD:
                break
            if not self._is_head(head):
                raise ConfigError(
                    f"{path}: the length of record {len(starts) - 1}, at byte {at}, is damaged or "
                    "this is no TFRecord file; fetch it again"
                )
            at += _HEAD + int.from_bytes(head[:8], "little") + _FOOT
            starts.append(at)
        packed = self._packed.get(number)
        size = packed.size if packed else os.fstat(file).st_size
        if at < size or (at == size and packed and not packed.whole):
            starts.append(size)  # the last record is truncated, which makes it a bad record
        starts[-1] = min(starts[-1], size)
        return np.array(starts, np.int64)

    def _pread(self, number: int, at: int, count: int) -> bytes:
        return os.pread(self._files[number], count, at)

    def _is_head(self, head: bytes) -> bool:
        crc = int.from_bytes(head[8:], "little")
        return len(head) == _HEAD and masked(self._crc(head[:8])) == crc

    def read(self, indices: Sequence[int] | np.ndarray) -> list[bytes]:
        """Return the data of the records at `indices`. Raises BadRecord for a damaged record."""
        data, starts, stops = self.lay(indices)
        bounds = zip(starts.tolist(), stops.tolist(), strict=True)
        return [data[start:stop].tobytes() for start, stop in bounds]

    def lay(self, indices: Sequence[int] | np.ndarray, room: np.ndarray | None = None) -> Laid:
        """Read and check the records at `indices`; return one array of bytes with all of them.

        The returned `Laid` also says where in the array the data of each record begin and end.
        Raises BadRecord for a damaged record.
        """
        indices = np.asarray(indices, np.int64)
        check_indices("tfrecord", indices, len(self))
        order = np.argsort(indices, kind="stable")
        rows = indices[order]
        begins, ends = self._begins[rows], self._ends[rows]
        files = np.searchsorted(self.bounds, rows, side="right") - 1
        for place in np.flatnonzero(ends - begins > _LONGEST):
            if files[place] in self._packed:
                reason = f"it unpacks to {ends[place] - begins[place]} bytes, more than {_LONGEST}"
                raise BadRecord(int(rows[place]), reason)
        bounds = np.concatenate([[0], np.cumsum(ends - begins)])
        if room is None or len(room) < bounds[-1]:
            room = np.empty(bounds[-1], np.uint8)
        data = room[: bounds[-1]]
        # Records that are next to each other in a file are read in one run.
        cuts = np.flatnonzero((begins[1:] != ends[:-1]) | (files[1:] != files[:-1])) + 1
        firsts = np.concatenate([[0], cuts])[: len(rows)]
        view = bytes_of(data)
        lows = [*bounds[firsts].tolist(), len(data)]
        where = zip(files[firsts].tolist(), begins[firsts].tolist(), lows, lows[1:], strict=False)
        runs = [ByteRun(file, at, view[low:high]) for file, at, low, high in where]
        with self._lock:
            self._runs.read([run for run in runs if run.file not in self._packed])
            for run in runs:
                if run.file in self._packed:
                    self._packed[run.file].read(run.begin, run.target)
        laid = Laid(data, bounds[:-1], bounds[1:])
        for place in self._broken(laid)[:1]:
            at = f"at byte {begins[place]} of {self.paths[files[place]]}"
            at += ", unpacked" * (files[place] in self._packed)
            raise BadRecord(int(rows[place]), f"{_reason(laid, place)}, {at}")
        starts, stops = np.empty((2, len(rows)), np.int64)
        starts[order], stops[order] = laid.starts + _HEAD, laid.stops - _FOOT
        return Laid(data, starts, stops)

    def _broken(self, laid: Laid) -> np.ndarray:
        """Return the numbers of those records of `laid` that have a wrong length or checksum."""
        data, starts, stops = laid
        short = np.flatnonzero(stops - starts < _HEAD + _FOOT)
        if len(short):  # too short for a head and a foot
            return short
        crc = self._crc
        bounds = zip((starts + _HEAD).tolist(), (stops - _FOOT).tolist(), strict=True)
        found = masked(np.array([crc(data[a:b]) for a, b in bounds], np.uint64))
        good = (laid.gather("<i8", starts) == stops - starts - _HEAD - _FOOT) & (
            laid.gather("<u4", stops - _FOOT) == found
        )
        return np.flatnonzero(~good)

    def close(self) -> None:
        """Close all files; they are opened again when a record is read."""
        with self._lock:
            self._files.close()


class _Forward:
    """Reads data from an iterator of byte strings, from the beginning to the end."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._begin, self._seen = pieces, 0, b""

    def __call__(self, at: int, count: int) -> bytes:
        """Return `count` bytes or more from `at`, which never decreases, or fewer at the end."""
        while at + count > self._begin + len(self._seen):
            gone = min(at - self._begin, len(self._seen))
            self._begin, self._seen = self._begin + gone, self._seen[gone:]
            piece = next(self._pieces, b"")
            if not piece:
                break
            self._seen += piece
        return self._seen[at - self._begin :]


def _reason(laid: Laid, place: int) -> str:
    start, stop = int(laid.starts[place]), int(laid.stops[place])
    length = int.from_bytes(laid.data[start : start + 8].tobytes(), "little")
    whole = stop - start == length + _HEAD + _FOOT
    return "its checksum is wrong" if whole else "it is cut off"


def write(path: str | os.PathLike, records: Iterable[bytes]) -> None:
    """Write a TFRecord file, for tests or to prepare data."""
    crc = _checksum()
    with open(path, "wb") as file:  # noqa: PTH123
        for data in records:
            head = struct.pack("<Q", len(data))
            file.write(head + struct.pack("<I", masked(crc(head))))
            file.write(data + struct.pack("<I", masked(crc(data))))
