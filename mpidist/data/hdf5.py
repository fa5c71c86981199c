"""Datasets of HDF5 files as a source: read when asked for, in whole chunks, each once per batch.

    file        images (60000, 28, 28)   chunks of 128 rows
    a batch     rows 5 9 130 4000        chunks 0, 1, 31: three reads, four rows

Datasets without chunks and filters are read past HDF5: their rows lie one after the other in the
file, and a read of neighbours goes straight into the batch.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import h5py
import numpy as np

from mpidist import strangers
from mpidist.data.sources import Part, Source
from mpidist.errors import BadRecord, ClosedError, ConfigError

#: Bytes of chunks that are kept, for a batch has several rows of one, and so has the next batch.
_CACHE = 32 << 20
#: Rows further apart than this many bytes are not read in one piece.
_GAP = 4096


class HDF5:
    """Named datasets of one file with equal first axis. Local; threads take turns.

    Parameters
    ----------
    path : path-like
    names : sequence of str
        Datasets, in the order of a sample's arrays.
    cache : int
        Bytes of chunks that are kept.

    Raises ConfigError where the file or a dataset is missing, or is not plain numbers in the file
    itself: see ``strangers.py``.
    """

    reads = True

    def __init__(self, path: str | os.PathLike, names: Sequence[str], cache: int = _CACHE):
        self.name, self.names = str(path), tuple(names)
        self._lock = threading.Lock()
        if not self.names:
            raise ConfigError(f"hdf5: {path}: no dataset is named; give at least one")
        self._file = strangers.opened(path, follow=True)
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
        try:
            dataset = strangers.dataset(self._file, name)
        except ConfigError as error:
            known = ", ".join(repr(key) for key in list(self._file)[:20])
            raise ConfigError(f"hdf5: {self.name}: {error}; there are {known}") from None
        if not dataset.shape:
            raise ConfigError(f"hdf5: {self.name}: dataset {name!r} is one number, not samples")
        offset = dataset.id.get_offset()
        if dataset.chunks is None and offset is not None:
            return _Rows(self._raw, offset, dataset)
        return _Chunks(dataset, cache)

    def __len__(self) -> int:
        return self._readers[0].count

    def take(self, indices) -> tuple:
        """Return the samples at `indices`, in that order."""
        order = np.argsort(indices, kind="stable")
        rows = np.asarray(indices)[order]
        if len(rows) and not 0 <= rows[0] <= rows[-1] < len(self):
            raise ConfigError(f"hdf5: index {rows[-1]} of {len(self)} samples in {self.name}")
        with self._lock:
            if self._raw < 0:  # the number may be another file's by now
                raise ClosedError(f"hdf5: {self.name} is closed")
            # Written to where they belong, so nothing is sorted back.
            return tuple(reader.read(rows, order) for reader in self._readers)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._raw >= 0:
                os.close(self._raw)
                self._raw = -1
            self._file.close()


class _Rows:
    """Rows of a dataset that lie one after the other in the file. Local."""

    def __init__(self, file: int, offset: int, dataset):
        self._file, self._offset = file, offset
        self.count, self._shape, self._dtype = dataset.shape[0], dataset.shape[1:], dataset.dtype
        self._nbytes = int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize

    def read(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the ascending `rows`, row k at place ``places[k]``."""
        out = np.empty((len(rows), *self._shape), self._dtype)
        gaps = np.diff(rows, prepend=rows[:1]) * self._nbytes > _GAP + self._nbytes
        bounds = [0, *np.flatnonzero(gaps).tolist(), len(rows)]
        for first, last in itertools.pairwise(bounds):
            if first == last:
                continue
            low, high = int(rows[first]), int(rows[last - 1]) + 1
            whole = high - low == last - first
            straight = whole and bool((np.diff(places[first:last]) == 1).all())
            target = (
                out[places[first] : places[first] + last - first]
                if straight
                else np.empty((high - low, *self._shape), self._dtype)
            )
            self._fill(target, low)
            if not straight:
                out[places[first:last]] = target[rows[first:last] - low]
        return out

    def _fill(self, target: np.ndarray, row: int) -> None:
        view = memoryview(target.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        start = self._offset + row * self._nbytes
        while view:
            count = os.preadv(self._file, [view], start)
            if not count:
                raise BadRecord(row, f"the file ends before it, at byte {start}")
            view, start = view[count:], start + count


class _Chunks:
    """Rows of a chunked or compressed dataset. Local; the newest chunks are kept."""

    def __init__(self, dataset, cache: int):
        self._dataset = dataset
        self.count = dataset.shape[0]
        row = max(1, int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize)
        self._rows = dataset.chunks[0] if dataset.chunks else max(1, _GAP // row)
        self._keep = max(1, cache // (row * self._rows))
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()

    def read(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the ascending `rows`, row k at place ``places[k]``."""
        out = np.empty((len(rows), *self._dataset.shape[1:]), self._dataset.dtype)
        chunks = rows // self._rows
        for chunk in np.unique(chunks):
            mine = slice(*np.searchsorted(chunks, [chunk, chunk + 1]))
            out[places[mine]] = self._chunk(int(chunk))[rows[mine] - chunk * self._rows]
        return out

    def _chunk(self, chunk: int) -> np.ndarray:
        if chunk in self._kept:
            self._kept.move_to_end(chunk)
            return self._kept[chunk]
        values = self._dataset[chunk * self._rows : (chunk + 1) * self._rows]
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
    """Return (train, test): the first `train` samples and the others, or two files. Local.

    Raises ConfigError unless one of `train` and `test_path` is given.
    """
    if (train is None) == (test_path is None):
        raise ConfigError(f"hdf5: train={train}, test_path={test_path}: give one of the two")
    whole = HDF5(path, names)
    if test_path is not None:
        return whole, HDF5(test_path, names)
    if isinstance(train, bool) or not isinstance(train, int) or not 0 < train < len(whole):
        raise ConfigError(
            f"hdf5: train is {train!r}, expected from 1 to {len(whole) - 1}: {path} has "
            f"{len(whole)} samples and the others are the test set"
        )
    return Part(whole, 0, train), Part(whole, train, len(whole))


def write(path: str | os.PathLike, arrays: Mapping, chunks: int | None = None) -> None:
    """Write arrays by name, in chunks of so many rows: for tests, and to prepare data. Local."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            shape = None if chunks is None else (min(chunks, len(array)), *array.shape[1:])
            file.create_dataset(name, data=array, chunks=shape)
