"""A data source of HDF5 datasets, which reads each chunk that a batch needs only once.

    file        images (60000, 28, 28)   chunks of 128 rows
    a batch     rows 5 9 130 4000        chunks 0, 1, 31: three reads, four rows

If a dataset has filters (for example, if it is compressed), its chunks are read whole. The filters
of HDF5, h5py and, if installed, hdf5plugin can be used. Without filters, only the rows of the batch
are read, without the HDF5 library.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import BadRecord, ClosedError, ConfigError
from ..byte_runs import ByteRun, LRUCache, Rooms, RunReader, bytes_of
from ..sources import Part, Source, check_indices, check_split

#: The largest number of bytes of chunks that are cached, because this batch and the next ones need
#: more rows of the same chunks.
_CACHE = 32 << 20
#: Rows that are more than this many bytes apart are read separately.
_GAP = 4096


class HDF5:
    """Named datasets of one file, whose first axes have the same length.

    Any thread may read.

    Parameters
    ----------
    path : path-like
    names : sequence of str
        Names of the datasets, in the order of the arrays of a sample.
    cache : int
        How many bytes of chunks are cached at most.

    Raises
    ------
    ConfigError
        The file or a dataset is missing, or a dataset is not plain numbers inside the file itself.
    """

    reads = True

    def __init__(self, path: str | os.PathLike, names: Sequence[str], cache: int = _CACHE):
        self.name, self.names = str(path), tuple(names)
        self._lock, self._rooms = threading.Lock(), Rooms()
        if not self.names:
            raise ConfigError(f"hdf5: {path}: no dataset is named; give at least one")
        from ... import untrusted_hdf5  # this imports h5py, which runs with other data do not need

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
        """Number of samples in each HDF5 chunk, as the argument `counts` of `sharding.shard`.

        With mode "file", `shard` then gives each chunk to one rank, which decompresses it once.
        """
        there = [reader.chunk for reader in self._readers if reader.chunk < len(self)]
        per = max(there, default=max(1, len(self)))
        return [min(per, len(self) - low) for low in range(0, len(self), per)]

    def take(self, indices) -> tuple:
        """Return the samples at `indices`, in the order of `indices`."""
        indices = np.asarray(indices)
        check_indices(f"hdf5: {self.name}", indices, len(self))
        with self._lock:
            if self._raw < 0:  # the descriptor may belong to another file by now
                raise ClosedError(f"hdf5: {self.name} is closed")
            if len(indices) and (np.diff(indices) == 1).all():
                low, high = int(indices[0]), int(indices[-1]) + 1
                return tuple(reader.piece(low, high) for reader in self._readers)
            order = np.argsort(indices, kind="stable")
            # Each of the readers writes a row to its place in the batch.
            return tuple(reader.read(indices[order], order) for reader in self._readers)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._raw >= 0:
                os.close(self._raw)
                self._raw = -1
            self._file.close()


class _Rows:
    """Reads rows of a dataset without filters, which the file stores as they are in memory."""

    def __init__(self, runs: RunReader, rooms: Rooms, dataset):
        self._runs, self._rooms, self._dataset = runs, rooms, dataset
        self.count, self._shape, self._dtype = dataset.shape[0], dataset.shape[1:], dataset.dtype
        self._nbytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        # The offset of each chunk, looked up on first use; a dataset without chunks is one chunk.
        self.chunk = dataset.chunks[0] if dataset.chunks else max(1, self.count)
        self._chunks = np.full(-(-self.count // self.chunk), -1)
        if not dataset.chunks:
            self._chunks[:] = dataset.id.get_offset()

    def piece(self, low: int, high: int) -> np.ndarray:
        """Return the rows `low` to `high` - 1 of the dataset."""
        out = self._rooms.empty((high - low, *self._shape), self._dtype)
        room = bytes_of(out)
        # For each chunk: the first row of the piece in this chunk, and the offset of this row.
        # Pieces that are adjacent in the file are one run.
        firsts = np.array([low, *range(low - low % self.chunk + self.chunk, high, self.chunk)])
        begins = self._where(firsts)
        sizes = np.diff(firsts, append=high) * self._nbytes
        cuts = np.flatnonzero(np.diff(begins) != sizes[:-1]) + 1
        firsts, begins = firsts[[0, *cuts]], begins[[0, *cuts]]
        bounds = ((firsts - low) * self._nbytes).tolist()
        parts = zip(begins.tolist(), itertools.pairwise([*bounds, len(room)]), strict=True)
        self._fill([ByteRun(0, begin, room[start:stop]) for begin, (start, stop) in parts], firsts)
        return out

    def read(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return an array with row number ``rows[k]`` at index ``places[k]``; `rows` ascend."""
        out, width = self._rooms.empty((len(rows), *self._shape), self._dtype), self._nbytes
        room = bytes_of(out)
        begins = self._where(rows)
        # A new run (a range of bytes) begins where the gap to the next row is too long to be read.
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
        """Read the ranges of bytes `runs`; `rows` has the number of the first row of each."""
        whole = self._runs.read(runs)
        if whole < len(runs):
            where = f"the file ends before it, at byte {runs[whole].begin} or later"
            raise BadRecord(int(rows[whole]), where)

    def _where(self, rows: np.ndarray) -> np.ndarray:
        """Return the offset in the file of each of the rows numbered `rows`."""
        chunks, within = np.divmod(rows, self.chunk)
        for chunk in np.unique(chunks[self._chunks[chunks] < 0]).tolist():
            corner = chunk * self.chunk, *(0 for _ in self._shape)
            self._chunks[chunk] = self._dataset.id.get_chunk_info_by_coord(corner).byte_offset
        return self._chunks[chunks] + within * self._nbytes


def _as_they_are(dataset) -> bool:
    """Return whether the file holds whole rows of the dataset with the same bytes as in memory."""
    import h5py

    settings, stored = dataset.id.get_create_plist(), dataset.id.get_type()
    if settings.get_nfilters() or stored != h5py.h5t.py_create(dataset.dtype):
        return False
    if dataset.chunks is None:
        return dataset.id.get_offset() is not None
    # A chunk that was never written has no place in the file.
    elements = -(-dataset.shape[0] // dataset.chunks[0]) * math.prod(dataset.chunks)
    written = dataset.id.get_storage_size() == elements * stored.get_size()
    return written and dataset.chunks[1:] == dataset.shape[1:]


class _Chunks:
    """Reads rows of a dataset with filters, or whose chunks cut rows in parts. Caches chunks."""

    def __init__(self, rooms: Rooms, dataset, cache: int):
        self._rooms, self._dataset = rooms, dataset
        self.count = dataset.shape[0]
        row = max(1, int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize)
        self.chunk = dataset.chunks[0] if dataset.chunks else max(1, _GAP // row)
        # At least two chunks, because a batch may have rows on both sides of a chunk's end.
        most, rows = max(2, cache // (row * self.chunk)), self.chunk
        # The function does not use `self`, because a reference cycle would keep the dataset open
        # after its last use.
        self._cached = LRUCache(lambda k: dataset[k * rows : (k + 1) * rows], most)

    def piece(self, low: int, high: int) -> np.ndarray:
        """Return rows `low` to `high` - 1; whole chunks are read directly into the result."""
        out = self._rooms.empty((high - low, *self._dataset.shape[1:]), self._dataset.dtype)
        for chunk in range(low // self.chunk, -(-high // self.chunk)):
            start = chunk * self.chunk
            stop = min(start + self.chunk, self.count)
            first, last = max(low, start), min(high, stop)
            if (first, last) == (start, stop) and chunk not in self._cached:
                self._dataset.read_direct(out, np.s_[start:stop], np.s_[start - low : stop - low])
            else:
                out[first - low : last - low] = self._cached[chunk][first - start : last - start]
        return out

    def read(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return an array with row number ``rows[k]`` at index ``places[k]``; `rows` ascend."""
        out = self._rooms.empty((len(rows), *self._dataset.shape[1:]), self._dataset.dtype)
        chunks = rows // self.chunk
        bounds = np.flatnonzero(np.diff(chunks, prepend=-1, append=self.count)).tolist()
        for first, last in itertools.pairwise(bounds):
            chunk = int(chunks[first])
            out[places[first:last]] = self._cached[chunk][rows[first:last] - chunk * self.chunk]
        return out


def hdf5(
    path: str | os.PathLike,
    names: Sequence[str] = ("inputs", "labels"),
    train: int | None = None,
    test_path: str | os.PathLike | None = None,
) -> tuple[Source, Source]:
    """Return (train, test) sources, from one file or from two files.

    With `train`, the first `train` samples of the file are the training set, and all others the
    test set. Raises ConfigError unless exactly one of `train` and `test_path` is given.
    """
    if (train is None) == (test_path is None):
        raise ConfigError(f"hdf5: train={train}, test_path={test_path}: give one of the two")
    whole = HDF5(path, names)
    if test_path is not None:
        return whole, HDF5(test_path, names)
    train = check_split("hdf5", train, len(whole), path)
    return Part(whole, 0, train), Part(whole, train, len(whole))


def write(path: str | os.PathLike, arrays: Mapping, chunks: int | None = None) -> None:
    """Write an HDF5 file of named arrays, in chunks of `chunks` rows, for tests and examples."""
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            shape = None if chunks is None else (min(chunks, len(array)), *array.shape[1:])
            file.create_dataset(name, data=array, chunks=shape)
