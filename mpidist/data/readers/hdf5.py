"""Datasets of HDF5 files as a source: read when asked for, in whole chunks, each once per batch.

    file        images (60000, 28, 28)   chunks of 128 rows
    a batch     rows 5 9 130 4000        chunks 0, 1, 31: three reads, four rows

That is for filters: those of HDF5 and h5py (gzip, lzf, szip, ...), and those of hdf5plugin where it
is installed. Where there are none, rows lie in the file as they are, and are read past HDF5: only
those that are wanted, neighbours at once, straight into the batch.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import BadRecord, ClosedError, ConfigError
from ..read_retry import ByteRun, Rooms, RunReader, bytes_of
from ..sources import Part, Source, check_split

#: Bytes of chunks that are kept, for a batch has several rows of one, and so has the next batch.
_CACHE = 32 << 20
#: Rows further apart than this many bytes are not read in one piece.
_GAP = 4096


class HDF5:
    """Named datasets of one file with equal first axis. Threads take turns.

    Parameters
    ----------
    path : path-like
    names : sequence of str
        Datasets, in the order of a sample's arrays.
    cache : int
        Bytes of chunks that are kept.

    Raises ConfigError where the file or a dataset is missing, or is not plain numbers in the file
    itself: see ``untrusted_hdf5.py``.
    """

    reads = True

    def __init__(self, path: str | os.PathLike, names: Sequence[str], cache: int = _CACHE):
        self.name, self.names = str(path), tuple(names)
        self._lock, self._rooms = threading.Lock(), Rooms()
        if not self.names:
            raise ConfigError(f"hdf5: {path}: no dataset is named; give at least one")
        from ... import untrusted_hdf5  # and with it HDF5, which others do not need at their start

        self._file = untrusted_hdf5.open_untrusted(path, follow=True)
        self._raw = os.dup(self._file.id.get_vfd_handle())
        try:
            self._readers = [self._reader(name, cache // len(self.names)) for name in self.names]
            lengths = {name: r.count for name, r in zip(self.names, self._readers, strict=True)}
            if len(set(lengths.values())) > 1:
                raise ConfigError(
                    f"hdf5: {path}: datasets of {lengths} samples, expected equal ones"
                )
        except BaseException:
            self.close()
            raise

    def _reader(self, name: str, cache: int) -> _Rows | _Chunks:
        from ... import untrusted_hdf5

        try:
            dataset = untrusted_hdf5.checked_dataset(self._file, name, plugins=True)
        except ConfigError as error:
            known = ", ".join(repr(key) for key in list(self._file)[:20])
            raise ConfigError(f"hdf5: {self.name}: {error} (there are {known})") from None
        if not dataset.shape:
            raise ConfigError(f"hdf5: {self.name}: dataset {name!r} is one number, not samples")
        if _as_they_are(dataset):
            return _Rows(RunReader([self._raw].__getitem__), self._rooms, dataset)
        return _Chunks(self._rooms, dataset, cache)

    def __len__(self) -> int:
        return self._readers[0].count

    @property
    def counts(self) -> list[int]:
        """Samples of each of the largest chunks, for `sharding.shard` by "file".

        A chunk is then one rank's, which unpacks it once.
        """
        there = [reader.chunk for reader in self._readers if reader.chunk < len(self)]
        per = max(there, default=max(1, len(self)))
        return [min(per, len(self) - low) for low in range(0, len(self), per)]

    def take(self, indices) -> tuple:
        """Return the samples at `indices`, in that order."""
        indices = np.asarray(indices)
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise ConfigError(f"hdf5: index {indices.max()} of {len(self)} samples in {self.name}")
        with self._lock:
            if self._raw < 0:  # the number may be another file's by now
                raise ClosedError(f"hdf5: {self.name} is closed")
            if len(indices) and (np.diff(indices) == 1).all():
                low, high = int(indices[0]), int(indices[-1]) + 1
                return tuple(reader.piece(low, high) for reader in self._readers)
            order = np.argsort(indices, kind="stable")
            # Written to where they belong, so nothing is sorted back.
            return tuple(reader.read(indices[order], order) for reader in self._readers)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._raw >= 0:
                os.close(self._raw)
                self._raw = -1
            self._file.close()


class _Rows:
    """Rows that lie in the file as they are, one after the other or chunk by chunk."""

    def __init__(self, runs: RunReader, rooms: Rooms, dataset):
        self._runs, self._rooms, self._dataset = runs, rooms, dataset
        self.count, self._shape, self._dtype = dataset.shape[0], dataset.shape[1:], dataset.dtype
        self._nbytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        # Where each chunk begins, asked for when it is needed; a dataset without is one chunk.
        self.chunk = dataset.chunks[0] if dataset.chunks else max(1, self.count)
        self._chunks = np.full(-(-self.count // self.chunk), -1)
        if not dataset.chunks:
            self._chunks[:] = dataset.id.get_offset()

    def piece(self, low: int, high: int) -> np.ndarray:
        """Return the rows from `low` to `high`."""
        out = self._rooms.empty((high - low, *self._shape), self._dtype)
        room = bytes_of(out)
        # Where this piece of each chunk begins: as a row, and in the file. Most lie side by side.
        firsts = np.array([low, *range(low - low % self.chunk + self.chunk, high, self.chunk)])
        begins = self._where(firsts)
        sizes = np.diff(firsts, append=high) * self._nbytes
        cuts = np.flatnonzero(np.diff(begins) != sizes[:-1]) + 1
        firsts, begins = firsts[[0, *cuts]], begins[[0, *cuts]]
        bounds = ((firsts - low) * self._nbytes).tolist()
        runs = [
            ByteRun(0, begin, room[start:stop])
            for begin, (start, stop) in zip(
                begins.tolist(), itertools.pairwise([*bounds, len(room)]), strict=True
            )
        ]
        self._fill(runs, firsts)
        return out

    def read(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the ascending `rows`, row k at place ``places[k]``."""
        out, width = self._rooms.empty((len(rows), *self._shape), self._dtype), self._nbytes
        room = bytes_of(out)
        begins = self._where(rows)
        # Cut where what lies between is not worth reading.
        steps = np.diff(begins)
        cuts = np.flatnonzero((steps > _GAP + width) | (steps < 0)) + 1
        bounds = [0, *cuts.tolist(), len(rows)] if len(rows) else [0]
        runs, strewn = [], []
        for first, last in itertools.pairwise(bounds):
            low, high = int(begins[first]), int(begins[last - 1]) + width
            if last == first + 1:
                at = int(places[first]) * width
                runs.append(ByteRun(0, low, room[at : at + width]))
            else:
                apart = np.empty(high - low, np.uint8)
                strewn.append((apart, slice(first, last), low))
                runs.append(ByteRun(0, low, bytes_of(apart)))
        self._fill(runs, [rows[first] for first in bounds[:-1]])
        row = np.dtype((np.void, width))
        for apart, some, low in strewn:
            any_row = np.ndarray((len(apart) - width + 1,), row, apart, 0, (1,))
            np.frombuffer(room, row)[places[some]] = any_row[begins[some] - low]
        return out

    def _fill(self, runs: list[ByteRun], rows) -> None:
        """Read the runs, which begin with these rows."""
        whole = self._runs.read(runs)
        if whole < len(runs):
            where = f"the file ends before it, at byte {runs[whole].begin} or later"
            raise BadRecord(int(rows[whole]), where)

    def _where(self, rows: np.ndarray) -> np.ndarray:
        """Return where each of these rows begins in the file."""
        chunks, within = np.divmod(rows, self.chunk)
        for chunk in np.unique(chunks[self._chunks[chunks] < 0]).tolist():
            corner = chunk * self.chunk, *(0 for _ in self._shape)
            self._chunks[chunk] = self._dataset.id.get_chunk_info_by_coord(corner).byte_offset
        return self._chunks[chunks] + within * self._nbytes


def _as_they_are(dataset) -> bool:
    """Whether the rows of a dataset lie whole in the file, byte for byte as in memory."""
    import h5py

    settings, stored = dataset.id.get_create_plist(), dataset.id.get_type()
    if settings.get_nfilters() or stored != h5py.h5t.py_create(dataset.dtype):
        return False
    if dataset.chunks is None:
        return dataset.id.get_offset() is not None
    # Chunks that nobody has written do not lie anywhere.
    chunks = -(-dataset.shape[0] // dataset.chunks[0])
    written = (
        dataset.id.get_storage_size() == chunks * math.prod(dataset.chunks) * stored.get_size()
    )
    return written and dataset.chunks[1:] == dataset.shape[1:]


class _Chunks:
    """Rows of a dataset with filters, or with chunks of parts of rows. Keeps the newest."""

    def __init__(self, rooms: Rooms, dataset, cache: int):
        self._rooms, self._dataset = rooms, dataset
        self.count = dataset.shape[0]
        row = max(1, int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize)
        self.chunk = dataset.chunks[0] if dataset.chunks else max(1, _GAP // row)
        # Two at least, for a batch may have rows at the seam of two.
        self._keep = max(2, cache // (row * self.chunk))
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()

    def piece(self, low: int, high: int) -> np.ndarray:
        """Return the rows from `low` to `high`; a whole chunk is unpacked where it belongs."""
        out = self._rooms.empty((high - low, *self._dataset.shape[1:]), self._dataset.dtype)
        for chunk in range(low // self.chunk, -(-high // self.chunk)):
            start = chunk * self.chunk
            stop = min(start + self.chunk, self.count)
            first, last = max(low, start), min(high, stop)
            if (first, last) == (start, stop) and chunk not in self._kept:
                self._dataset.read_direct(out, np.s_[start:stop], np.s_[start - low : stop - low])
            else:
                out[first - low : last - low] = self._chunk(chunk)[first - start : last - start]
        return out

    def read(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the ascending `rows`, row k at place ``places[k]``."""
        out = self._rooms.empty((len(rows), *self._dataset.shape[1:]), self._dataset.dtype)
        chunks = rows // self.chunk
        bounds = np.flatnonzero(np.diff(chunks, prepend=-1, append=self.count)).tolist()
        for first, last in itertools.pairwise(bounds):
            chunk = int(chunks[first])
            out[places[first:last]] = self._chunk(chunk)[rows[first:last] - chunk * self.chunk]
        return out

    def _chunk(self, chunk: int) -> np.ndarray:
        if chunk in self._kept:
            self._kept.move_to_end(chunk)
            return self._kept[chunk]
        values = self._dataset[chunk * self.chunk : (chunk + 1) * self.chunk]
        self._kept[chunk] = values
        if len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        return values


def hdf5(
    path: str | os.PathLike,
    names: Sequence[str] = ("inputs", "labels"),
    train: int | None = None,
    test_path: str | os.PathLike | None = None,
) -> tuple[Source, Source]:
    """Return (train, test): the first `train` samples and the others, or two files.

    Raises ConfigError unless one of `train` and `test_path` is given.
    """
    if (train is None) == (test_path is None):
        raise ConfigError(f"hdf5: train={train}, test_path={test_path}: give one of the two")
    whole = HDF5(path, names)
    if test_path is not None:
        return whole, HDF5(test_path, names)
    train = check_split("hdf5", train, len(whole), path)
    return Part(whole, 0, train), Part(whole, train, len(whole))


def write(path: str | os.PathLike, arrays: Mapping, chunks: int | None = None) -> None:
    """Write arrays by name, in chunks of so many rows: for tests, and to prepare data."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            shape = None if chunks is None else (min(chunks, len(array)), *array.shape[1:])
            file.create_dataset(name, data=array, chunks=shape)
