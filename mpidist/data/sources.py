"""Data sources: objects with a length and a method `take`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from ..errors import BadRecord, ConfigError


@runtime_checkable
class Source(Protocol):
    """The methods that a data set must have for training.

    Every rank has a source of the same length. `take` raises ``BadRecord(index, reason)`` for a
    record that cannot be used. Four attributes are optional:

    - ``name``: the name in messages about bad records.
    - ``reads = True``: a thread should read batches ahead, so `take` is called in this thread.
    - ``finite = True``: the source itself checks that all numbers are finite.
    - ``remote = False``: `md.train` may read the first and the last record when it starts, to
      compare them between the ranks.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def take(self, indices) -> tuple:
        """Return the samples at `indices`, which may be empty: arrays with one row per sample."""
        ...


class ArraySource:
    """A source of arrays in memory with one row per sample, as in ``ArraySource(images, labels)``.

    Raises ConfigError if the lengths differ or an argument is not an array.
    """

    def __init__(self, *arrays):
        if not arrays:
            raise ConfigError("a data source needs at least one array, got none")
        for i, array in enumerate(arrays):
            if not getattr(array, "shape", ()):
                raise ConfigError(
                    f"data: item {i} is {type(array).__name__}, expected an array whose first "
                    "axis counts the samples"
                )
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1:
            raise ConfigError(f"data: arrays of {lengths} samples, expected equal first axes")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def take(self, indices) -> tuple:
        """Return copies of the samples at `indices` from every array."""
        return tuple(array[indices] for array in self.arrays)


class Part:
    """A source that consists of samples `start` to `stop` - 1 of another source."""

    def __init__(self, source: Source, start: int, stop: int):
        self.source, self.start, self.stop = source, start, stop
        self.name = f"{getattr(source, 'name', type(source).__name__)}[{start}:{stop}]"
        self.reads = getattr(source, "reads", False)

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, indices) -> tuple:
        """Return the samples at `indices`; index 0 is sample `start` of the whole source."""
        return self.source.take(np.asarray(indices) + self.start)


class Derived:
    """A source of samples that `function` computes from the samples of another source.

    Parameters
    ----------
    source : Source
    function : callable
        Gets the arrays of a batch as arguments, and returns a tuple of arrays with the same first
        axis. The result for a sample must not depend on the other samples. The function may run in
        another thread. A sample for which it raises an exception counts as a bad record, which is
        skipped.
    """

    def __init__(self, source: Source, function: Callable[..., tuple]):
        self.source, self.function = source, function
        self.name = getattr(source, "name", type(source).__name__)
        self.reads = getattr(source, "reads", False)

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices) -> tuple:
        """Return the results of `function` for the samples at `indices`."""
        return self.function(*self.source.take(indices))


class _OneByOne:
    """Base of sources whose method `_sample` returns one sample, as a tuple or as one value."""

    _sample: Callable[[int], object]
    _empty: tuple | None = None

    def take(self, indices) -> tuple:
        """Return the samples at `indices`, stacked along a new first axis."""
        if not len(indices):
            return self._empty or tuple(array[:0] for array in self.take([0]))
        samples = [self._sample(int(index)) for index in indices]
        tuples = [sample if isinstance(sample, tuple) else (sample,) for sample in samples]
        arrays = tuple(np.stack([np.asarray(v) for v in c]) for c in zip(*tuples, strict=True))
        self._empty = tuple(array[:0] for array in arrays)
        return arrays


class Items(_OneByOne):
    """A source made from a map-style data set, where ``items[k]`` is one sample.

    A sample is an array, a number or a tuple.
    """

    def __init__(self, items):
        self.items = items
        self.name = type(items).__name__

    def __len__(self) -> int:
        return len(self.items)

    def _sample(self, index: int):
        try:
            return self.items[index]
        except Exception as error:
            raise BadRecord(index, f"{type(error).__name__}: {error}") from error


class Stream(_OneByOne):
    """A source that reads an iterable of samples; the first `count` samples are one epoch.

    An iterable can be read only in order. So each rank also reads the samples of the other ranks, a
    resumed run reads all used samples again, and going back to an earlier sample restarts the
    iterable. Use a stream with ``shuffle="none"`` and an iterable that is cheap to read.

    Parameters
    ----------
    make : callable
        Returns a new iterable with the same samples each time.
    count : int
        Number of samples of an epoch. If the iterable has fewer, each missing sample counts as a
        bad record, which is skipped.
    """

    def __init__(self, make: Callable[[], Iterable], count: int):
        self.make, self.count = make, int(count)
        self.name = getattr(make, "__name__", "stream")
        self._next = self.count
        self._iterator: Iterator = iter(())

    def __len__(self) -> int:
        return self.count

    def _sample(self, index: int):
        if index < self._next:
            self._iterator, self._next = iter(self.make()), 0
        missing = object()
        sample = next(itertools.islice(self._iterator, index - self._next, None), missing)
        self._next = index + 1
        if sample is missing:
            raise BadRecord(index, "the iterable ended before it")
        return sample


def as_source(data) -> Source:
    """Return `data` as a Source.

    `data` is a source, a tuple or list of arrays, an array, or a map-style data set (`Items`).
    """
    if isinstance(data, tuple | list):
        return ArraySource(*data)
    if getattr(data, "shape", None) is not None:
        # Arrays have a method `take`, but it does something else, so arrays are not sources.
        return ArraySource(data)
    if isinstance(data, Source):
        return data
    listed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if listed and not isinstance(data, str | bytes | Mapping):
        return Items(data)
    raise ConfigError(
        f"data is {type(data).__name__}, expected a tuple of arrays or an object with __len__ "
        "and either take(indices) or [index]"
    )


def check_split(kind: str, train, count: int, path) -> int:
    """Return `train`, a number of training samples; ConfigError unless 0 < `train` < `count`."""
    if isinstance(train, bool) or not isinstance(train, int) or not 0 < train < count:
        raise ConfigError(
            f"{kind}: train is {train!r}, expected from 1 to {count - 1}: {path} has {count} "
            "samples and the others are the test set"
        )
    return train


def check_indices(what: str, indices: np.ndarray, count: int) -> None:
    """Raise ConfigError if an index is not one of the numbers 0 to `count` - 1 of the samples."""
    wrong = indices[(indices < 0) | (indices >= count)]
    if len(wrong):
        raise ConfigError(
            f"{what}: sample {wrong[0]} of {count}; samples are numbered from 0 to {count - 1}"
        )
