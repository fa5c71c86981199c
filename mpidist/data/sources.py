"""Where samples come from: anything with a length and a `take`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from ..errors import BadRecord, ConfigError


@runtime_checkable
class Source(Protocol):
    """What training needs of a data set. Every rank holds one of the same length.

    A record that cannot be used: raise ``BadRecord(index, reason)``. Some attributes may be there:
    ``name``, told where a record is bad; ``reads = True``, where reading ahead in a thread helps
    (`take` is then called in that thread); ``finite = True``, where it looks for numbers that are
    not finite itself; ``remote = False``, where `md.train` may read the first and the last record
    of it beforehand, to compare them over the ranks.
    """

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def take(self, indices) -> tuple:
        """Return the samples at `indices` (maybe none) as arrays with equal first axis."""
        ...


class ArraySource:
    """Arrays in memory with equal first axis: ``ArraySource(images, labels)``.

    Raises ConfigError if the lengths differ or something is not an array.
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
        """Copy the samples at `indices` out of every array."""
        return tuple(array[indices] for array in self.arrays)


class Part:
    """Samples `start` to `stop` of another source."""

    def __init__(self, source: Source, start: int, stop: int):
        self.source, self.start, self.stop = source, start, stop
        self.name = f"{getattr(source, 'name', type(source).__name__)}[{start}:{stop}]"
        self.reads = getattr(source, "reads", False)

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, indices) -> tuple:
        """Return the samples at `indices`, counted from `start`."""
        return self.source.take(np.asarray(indices) + self.start)


class Derived:
    """What `function` makes of the samples of a source: combined or computed features (R14).

    Parameters
    ----------
    source : Source
    function : callable
        Is given the arrays of a batch and returns a tuple of arrays with the same first axis. Each
        result may depend on its own sample alone. It runs where the source is read, so ahead of
        the loop where that is done in a thread; what it raises for a sample makes that one bad.
    """

    def __init__(self, source: Source, function: Callable[..., tuple]):
        self.source, self.function = source, function
        self.name = getattr(source, "name", type(source).__name__)
        self.reads = getattr(source, "reads", False)

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices) -> tuple:
        """Return what the function makes of the samples at `indices`."""
        return self.function(*self.source.take(indices))


class Items:
    """A map-style data set: ``items[k]`` is one sample, an array or number or a tuple."""

    def __init__(self, items):
        self.items = items
        self.name = type(items).__name__
        self._form: list | None = None

    def __len__(self) -> int:
        return len(self.items)

    def take(self, indices) -> tuple:
        """Return the samples at `indices`, stacked."""
        samples = []
        for index in indices:
            try:
                sample = self.items[int(index)]
            except Exception as error:
                raise BadRecord(int(index), f"{type(error).__name__}: {error}") from error
            samples.append(sample if isinstance(sample, tuple) else (sample,))
        if not samples:
            return self._nothing()
        arrays = tuple(np.stack([np.asarray(v) for v in c]) for c in zip(*samples, strict=True))
        self._form = [array[:0] for array in arrays]
        return arrays

    def _nothing(self) -> tuple:
        if self._form is None:
            self.take([0])
        assert self._form is not None
        return tuple(self._form)


class Stream:
    """An iterable of samples, each a tuple, of which the first `count` are one epoch.

    An iterable can only be read in order. So each rank reads and drops the samples of the others,
    and a resumed run reads all samples again that were used before: use it with
    ``shuffle="none"`` and cheap iterators, or give each rank an iterable of its own
    (`sharding.grid`). Reading an earlier sample starts the iterable again.

    Parameters
    ----------
    make : callable
        Returns a new iterable, the same one each time.
    count : int
        Samples of an epoch. One that ends before makes the missing ones bad records.
    """

    def __init__(self, make: Callable[[], Iterable], count: int):
        self.make, self.count = make, int(count)
        self.name = getattr(make, "__name__", "stream")
        self._next = self.count
        self._iterator: Iterator = iter(())
        self._form: list | None = None

    def __len__(self) -> int:
        return self.count

    def take(self, indices) -> tuple:
        """Return the samples at `indices`, which ascend."""
        samples = [self._draw(int(index)) for index in indices]
        if not samples:
            if self._form is None:
                self._draw(0)
            return tuple(self._form or ())
        return tuple(np.stack([np.asarray(v) for v in c]) for c in zip(*samples, strict=True))

    def _draw(self, index: int) -> tuple:
        if index < self._next:
            self._iterator, self._next = iter(self.make()), 0
        missing = object()
        sample = next(itertools.islice(self._iterator, index - self._next, None), missing)
        self._next = index + 1
        if sample is missing:
            raise BadRecord(index, "the iterable ended before it")
        sample = sample if isinstance(sample, tuple) else (sample,)
        self._form = [np.asarray(value)[None][:0] for value in sample]
        return sample


def as_source(data) -> Source:
    """Return `data` as a Source.

    A source already, a tuple or list of arrays, an array, or a map-style data set (`Items`).
    """
    if isinstance(data, tuple | list):
        return ArraySource(*data)
    if getattr(data, "shape", None) is not None:
        # Arrays have a `take` and a length of their own, which mean something else.
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
    """Return how many samples are for training; ConfigError where none is left."""
    if isinstance(train, bool) or not isinstance(train, int) or not 0 < train < count:
        raise ConfigError(
            f"{kind}: train is {train!r}, expected from 1 to {count - 1}: {path} has {count} "
            "samples and the others are the test set"
        )
    return train
