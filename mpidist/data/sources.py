"""Where samples come from: anything with a length and a `take`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mpidist.errors import ConfigError


@runtime_checkable
class Source(Protocol):
    """What training needs of a data set. Local; every rank holds one of the same length."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def take(self, indices) -> tuple:
        """Return the samples at `indices` (maybe none) as arrays with equal first axis."""
        ...


class ArraySource:
    """Arrays in memory with equal first axis: ``ArraySource(images, labels)``. Local.

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


def as_source(data) -> Source:
    """Return `data` as a Source: one already, or a tuple or list of arrays, or an array. Local."""
    if isinstance(data, tuple | list):
        return ArraySource(*data)
    if getattr(data, "shape", None) is not None:
        # Arrays have a `take` and a length of their own, which mean something else.
        return ArraySource(data)
    if isinstance(data, Source):
        return data
    raise ConfigError(
        f"data is {type(data).__name__}, expected a tuple of arrays or an object with __len__ "
        "and take(indices)"
    )
