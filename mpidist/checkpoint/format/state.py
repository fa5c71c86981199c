"""The state of a program to save: nested dicts of arrays, shards and small JSON values.

    state = {"parameters": {"w": array},                    replicated: the same on every rank
             "momentum": {"w": Shard(part, (784, 128), (0, 0))},   a piece of a global array
             "step": 1200, "schedule": [0.1, 0.01]}         extras, kept in the manifest

A leaf is a value in the nested dicts that is no dict, or is an empty dict. A checkpoint identifies
a leaf by its path of dict keys, its dtype and its global shape, but not by the rank that held it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...arrays import as_array, is_device
from ...errors import CheckpointError, ConfigError, shown
from ...tensors import extended_dtype
from .regions import Box, Flat, Region, fits, whole

Path = tuple[str, ...]

MAX_DEPTH = 32
#: The largest number of bits of an integer among the extras, about 4,214 decimal digits. Python
#: could not read a larger one back: it refuses to convert a text of more than 4,300 digits.
_MOST_BITS = 14_000


class Fact(NamedTuple):
    """The path of a tensor in a nested dict, its dtype and its shape; equal on all ranks."""

    path: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the whole array."""
        return math.prod(self.shape) * named_dtype(self.dtype).itemsize


class Unreadable(CheckpointError):
    """A checkpoint is undamaged, but this installation cannot read its format or a dtype of it."""


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a global array, which one rank holds.

    Parameters
    ----------
    array : array
        The elements that this rank holds, as a NumPy or CuPy array, which may be empty.
    global_shape : tuple of int
        Shape of the whole array.
    start : tuple of int or int
        A tuple is the index of the first element in the global array, and `array` is a rectangular
        block. An int is the position of the first element in the global array flattened in C order,
        and `array` is one-dimensional.

    Raises
    ------
    ConfigError
        When the shard does not lie inside `global_shape`.
    """

    array: Any
    global_shape: tuple[int, ...]
    start: tuple[int, ...] | int

    def __post_init__(self):
        shape = tuple(int(n) for n in self.global_shape)
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "array", as_array(self.array))
        flat = not isinstance(self.start, (tuple, list))
        start = int(self.start) if flat else tuple(int(n) for n in self.start)  # type: ignore
        object.__setattr__(self, "start", start)
        if flat and self.array.ndim != 1:
            raise ConfigError(
                f"a flat shard (start={start}) needs a one-dimensional array, got shape "
                f"{self.array.shape}; pass its elements flattened, or a tuple as start"
            )
        if not fits(self.region, shape):
            raise ConfigError(
                f"a shard of shape {tuple(self.array.shape)} at {start} does not lie inside "
                f"global_shape {shape}"
            )

    @property
    def region(self) -> Region:
        """The region of the global array that `array` holds."""
        if isinstance(self.start, int):
            return Flat(self.start, self.array.shape[0])
        return Box(self.start, tuple(self.array.shape))


def is_array(leaf) -> bool:
    """Whether `leaf` is an array, a NumPy scalar or a DLPack tensor, but not a `Shard`."""
    if isinstance(leaf, (np.ndarray, np.generic)) or is_device(leaf):
        return True
    return hasattr(leaf, "__dlpack__") and hasattr(leaf, "__dlpack_device__")


def has_array(leaf) -> bool:
    """Whether `leaf`, a value of a state, is an array or a `Shard`."""
    return isinstance(leaf, Shard) or is_array(leaf)


def array_of(leaf):
    """Return the array in `leaf`, which is an array or a `Shard`, without a copy."""
    if isinstance(leaf, Shard):
        return leaf.array
    return np.asarray(leaf) if isinstance(leaf, np.generic) else as_array(leaf)


def region_of(leaf) -> Region:
    """Return the region of the global array that `leaf`, an array or a `Shard`, holds."""
    return leaf.region if isinstance(leaf, Shard) else whole(tuple(array_of(leaf).shape))


def shape_of(leaf) -> tuple[int, ...]:
    """Return the shape of the global array to which `leaf`, an array or a `Shard`, belongs."""
    return leaf.global_shape if isinstance(leaf, Shard) else tuple(array_of(leaf).shape)


# --------------------------------------------------------------------------------- the tree


def show(path: Path) -> str:
    """Return a path of dict keys as one text, for example ``parameters/conv1/w``."""
    return "/".join(path)


def leaves(state: Mapping, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the (path of keys, value) pairs of nested dicts in order; an empty dict is a value."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state must be a dict of arrays, got {type(state).__name__}")
    for key, value in state.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"keys of the state must be strings, got {shown(key)} ({type(key).__name__}) in "
                f"{show(path) or 'the state itself'}"
            )
        here = (*path, str.__str__(key))  # a plain str: a subclass may not be pickled or compared
        if len(here) > MAX_DEPTH:
            raise ConfigError(f"the state is nested deeper than {MAX_DEPTH} at {show(here)}")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, here)
        else:
            yield here, dict(value) if isinstance(value, Mapping) else value


def tree(items: Iterator[tuple[Path, Any]]) -> dict:
    """Return the nested dicts of (path of keys, value) pairs: the inverse of `leaves`."""
    state: dict = {}
    for path, leaf in items:
        place = state
        for key in path[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise CheckpointError(f"{show(path)}: a part of this path is a leaf as well")
        if path[-1] in place:
            raise CheckpointError(f"{show(path)} is there twice, or is both a leaf and a dict")
        place[path[-1]] = leaf
    return state


# ------------------------------------------------------------------------------------ dtypes

#: The kinds of dtypes that NumPy describes by a short string such as ``<f4``.
_KINDS = "biufcSUmM"
#: The pattern of these short strings. Other strings are not passed to NumPy's parser, which divides
#: by zero in ``<M8[s/0]``.
_SHORT = re.compile(rf"[<>|][{_KINDS}][0-9]*(\[[0-9]*[A-Za-z]+\])?", re.ASCII)


def dtype_name(dtype) -> str:
    """Return the name of `dtype` in a manifest, for example ``<f4`` or ``bfloat16``.

    Raises ConfigError for object dtypes and structured dtypes.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in _KINDS and _by_string(dtype.str) == dtype:
        return dtype.str
    if not dtype.hasobject and dtype.names is None and extended_dtype(dtype.name) == dtype:
        return dtype.name
    raise ConfigError(f"arrays of dtype {dtype} cannot be saved; use a number type of NumPy")


def named_dtype(name: str) -> np.dtype:
    """Return the dtype of this `name` in a manifest. Raises Unreadable."""
    found = _of_numpy(name)
    if found is None and name.isidentifier() and len(name) <= 24:
        found = extended_dtype(name)
    if found is None:
        raise Unreadable(
            f"{name[:40]!r} is not a dtype known here (float types beyond NumPy's need ml_dtypes)"
        )
    return found


@lru_cache(64)  # a state has many tensors of few dtypes
def _of_numpy(name: str) -> np.dtype | None:
    """Return the dtype whose `str` attribute in NumPy is `name`, or None if there is none."""
    dtype = _by_string(name) if len(name) <= 24 and _SHORT.fullmatch(name) else None
    known = dtype is not None and dtype.str == name and 0 < dtype.itemsize < 2**31
    return dtype if known else None


def _by_string(name: str) -> np.dtype | None:
    """Return the dtype that NumPy makes from this string, or None if NumPy refuses it."""
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        return None


# ------------------------------------------------------------------------------------ extras


def to_json(value, path: Path = ()):
    """Return an extra (a leaf that is not an array) as values that strict JSON can hold.

    Raises ConfigError for a type that JSON does not have.
    """
    if isinstance(value, np.generic):
        value = value.item()
    elif has_array(value):
        raise ConfigError(f"{show(path)}: an array inside a list cannot be saved; use a dict")
    if value is None or isinstance(value, bool):
        return value
    # A value of a subclass becomes a value of the plain type. An enum, for example, may have its
    # own `repr`, and the process that reads the checkpoint may lack its class.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise ConfigError(
                f"{show(path)}: an integer of {value.bit_length()} bits cannot be saved; expected "
                f"at most {_MOST_BITS}, save it as an array"
            )
        return int.__int__(value)
    if isinstance(value, float):
        value = float.__float__(value)
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(item, path) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {str.__str__(k): to_json(item, path) for k, item in value.items()}}
    raise ConfigError(
        f"{show(path)}: {type(value).__name__} cannot be saved; expected an array, a Shard, or "
        "a number, string, bool, None or list of them"
    )


def plain(value, path: Path = ()):
    """Return what a restore would return for `value`, a saved value that is not an array."""
    return from_json(to_json(value, path))


def from_json(value):
    """Return the value that `to_json` encoded. Raises CheckpointError."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"dict"} and isinstance(value["dict"], dict):
        return {key: from_json(item) for key, item in value["dict"].items()}
    if set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
        return float(value["float"])
    raise CheckpointError(f"an extra holds an object of unknown form with keys {sorted(value)}")
