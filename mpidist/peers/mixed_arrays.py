"""The arrays that ranks average: pack them into a message, average them with received arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..arrays import array_module, copy_into, work_dtype
from ..collectives.allreduce import allreduce
from ..runtime.agreement.run_on_all import run_on_all

#: The bytes of a message's header, which is the number of the round.
HEAD = 8
_ALIGNED = 64


def nested_arrays(tree: Mapping) -> list:
    """Return the arrays in nested dicts, sorted by name."""
    found: list = []
    for name in sorted(tree, key=str):
        one = tree[name]
        if isinstance(one, Mapping):
            found += nested_arrays(one)
        elif hasattr(one, "dtype") and not isinstance(one, np.generic):
            found.append(one)
    return found


class MixedArrays:
    """The arrays of this rank that are averaged with other ranks; on the host or on a device.

    All ranks must have arrays of the same shapes.

    Parameters
    ----------
    arrays : sequence of arrays
        They are changed in place by `mix` and `average`.
    """

    def __init__(self, arrays: Sequence):
        self.arrays = [array for array in arrays if array.dtype.kind not in "biuSU"]
        self._places: list[tuple[int, int]] = []
        stop = _ALIGNED  # the header lies in the first bytes
        for array in self.arrays:
            start = -(-stop // _ALIGNED) * _ALIGNED
            stop = start + prod(array.shape) * array.dtype.itemsize
            self._places.append((start, stop))
        self.nbytes = stop

    def pack(self, message: np.ndarray, round: int) -> None:
        """Write the number of a round and all arrays to `message`, which has `nbytes` bytes."""
        message[:HEAD].view(np.int64)[0] = round
        for array, (start, stop) in zip(self.arrays, self._places, strict=True):
            copy_into(message[start:stop].view(array.dtype), array)

    @staticmethod
    def round_of(message: np.ndarray) -> int:
        """Return the number of the round in which a message was sent."""
        return int(message[:HEAD].view(np.int64)[0])

    def mix(self, messages: Sequence[tuple[np.ndarray, float]]) -> None:
        """Replace the arrays by their weighted mean with the arrays of other ranks in `messages`.

        `messages` has pairs (message, ratio). The weight of a message is `ratio` times the weight
        of this rank's arrays, and the sum of all weights is 1.
        """
        own = 1 / (1 + sum(ratio for _, ratio in messages))
        for array, (start, stop) in zip(self.arrays, self._places, strict=True):
            xp, wide = array_module(array), work_dtype(array.dtype)
            total = array.astype(wide)
            total *= own
            for message, ratio in messages:
                values = xp.asarray(message[start:stop].view(array.dtype))
                total += (values.astype(wide) * (ratio * own)).reshape(array.shape)
            array[...] = total

    def average(self, comm) -> None:
        """Set the arrays of all ranks to their mean. Collective over `comm`."""
        # Of an optimizer's state, the numbers are on the host and other arrays may be on a device.
        kinds = [(array.dtype, array_module(array)) for array in self.arrays]
        for kind in dict.fromkeys(kinds):
            mine = [x for x, its in zip(self.arrays, kinds, strict=True) if its == kind]
            xp = kind[1]
            flat = xp.concatenate([array.reshape(-1) for array in mine])
            allreduce(comm, flat, "mean")
            start = 0
            for array in mine:
                stop = start + array.size
                array[...] = flat[start:stop].reshape(array.shape)
                start = stop

    def distance(self, before: Sequence) -> tuple[float, float]:
        """Return two squared norms: of the difference from `before`, and of these arrays.

        Both are sums over all elements of all arrays.
        """
        apart = length = 0.0
        for array, other in zip(self.arrays, before, strict=True):
            xp, wide = array_module(array), np.float64
            apart += float(xp.sum((array.astype(wide) - other.astype(wide)) ** 2))
            length += float(xp.sum(array.astype(wide) ** 2))
        return apart, length


def largest_of_all(comm, arrays: Sequence) -> None:
    """Set each element of integer arrays, such as counts, to its largest value on all ranks.

    Collective over `comm`; in place.
    """
    counts: list[Any] = [array for array in arrays if array.dtype.kind in "iu"]
    if counts:
        flat = np.array([int(value) for array in counts for value in array.reshape(-1)], np.int64)
        allreduce(comm, flat, "max", algorithm="native")
        start = 0
        for array in counts:
            values = flat[start : start + array.size].reshape(array.shape)
            array[...] = array_module(array).asarray(values)
            start += array.size


def average_state(comm, tree: dict) -> None:
    """Set an optimizer's state (nested dicts of arrays) to its mean over all ranks, in place.

    An integer, such as a count of updates, is set to its largest value on all ranks. Collective
    over `comm`.
    """
    arrays = nested_arrays(tree)
    MixedArrays(arrays).average(comm)
    largest_of_all(comm, arrays)
    places = _numbers(tree)
    if places:
        mine = [inside[name] for inside, name in places]
        agreed = run_on_all(comm, "md.train: optimizer", lambda: mine, _means)
        for (inside, name), old, new in zip(places, mine, agreed, strict=True):
            whole = isinstance(new, Integral)
            inside[name] = type(old)(new) if whole or not isinstance(old, Integral) else new


def _numbers(tree: dict) -> list[tuple[dict, Any]]:
    """Return (dict, name) for each number in nested dicts that is not an array."""
    found: list[tuple[dict, Any]] = []
    for name in sorted(tree, key=str):
        if isinstance(tree[name], dict):
            found += _numbers(tree[name])
        elif isinstance(tree[name], Real):
            found.append((tree, name))
    return found


def _means(everyone: list[list]) -> list:
    return [
        max(values) if all(isinstance(one, Integral) for one in values)
        else sum(map(float, values)) / len(values)
        for values in zip(*everyone, strict=True)
    ]  # fmt: skip
