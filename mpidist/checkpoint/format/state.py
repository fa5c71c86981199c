"""What a program's state is made of: nested dicts of arrays, shards and small JSON values.

    state = {"parameters": {"w": array},                    replicated: the same on every rank
             "momentum": {"w": Shard(part, (784, 128), (0, 0))},   a piece of a global array
             "step": 1200, "schedule": [0.1, 0.01]}         extras, kept in the manifest

A leaf is known by its path of keys, its dtype and its global shape; who held it is an accident.
Nothing here is MPI, and nothing is ever pickled.
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
#: Of an extra: 4,214 digits, of 4,300 that Python turns into text.
_MOST_BITS = 14_000


class Fact(NamedTuple):
    """What is known of a tensor, on any rank."""

    path: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


class Unreadable(CheckpointError):
    """A checkpoint is whole, but this installation cannot read it: a format or dtype it lacks.

    Not damage: an older step would be the wrong answer.
    """


@dataclass(frozen=True, eq=False)
class Shard:
    """A piece of a global array.

    Parameters
    ----------
    array : array
        The elements that this rank holds, NumPy or CuPy; may be empty.
    global_shape : tuple of int
        Shape of the whole array.
    start : tuple of int or int
        A tuple is the index of the first element: `array` is then a box of the global array. An
        int is a position in the global array flattened in C order: `array` is then
        one-dimensional, as the shards of parameter servers are.

    Raises
    ------
    ConfigError
        When the piece does not lie inside `global_shape`.
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
        """Which part of the global array this is."""
        if isinstance(self.start, int):
            return Flat(self.start, self.array.shape[0])
        return Box(self.start, tuple(self.array.shape))


def is_array(leaf) -> bool:
    """Whether `leaf` is replicated array state: an array, NumPy scalar, DLPack tensor."""
    return isinstance(leaf, (np.ndarray, np.generic)) or is_device(leaf) or _is_tensor(leaf)


def has_array(leaf) -> bool:
    """Whether a leaf has numbers: an array or a shard. All others are extras."""
    return isinstance(leaf, Shard) or is_array(leaf)


def _is_tensor(leaf) -> bool:
    return hasattr(leaf, "__dlpack__") and hasattr(leaf, "__dlpack_device__")


def array_of(leaf):
    """Return the array of an array leaf or a shard, over the same memory."""
    if isinstance(leaf, Shard):
        return leaf.array
    return np.asarray(leaf) if isinstance(leaf, np.generic) else as_array(leaf)


def region_of(leaf) -> Region:
    """Return which part of its global array a leaf is."""
    return leaf.region if isinstance(leaf, Shard) else whole(tuple(array_of(leaf).shape))


def shape_of(leaf) -> tuple[int, ...]:
    """Return the global shape of an array leaf or a shard."""
    return leaf.global_shape if isinstance(leaf, Shard) else tuple(array_of(leaf).shape)


# --------------------------------------------------------------------------------- the tree


def show(path: Path) -> str:
    """Return a path of keys as people read it: ``parameters/conv1/w``."""
    return "/".join(path)


def leaves(state: Mapping, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) of nested dicts, in their order; an empty dict is a leaf."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"the state must be a dict of arrays, got {type(state).__name__}")
    for key, value in state.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"keys of the state must be strings, got {shown(key)} ({type(key).__name__}) in "
                f"{show(path) or 'the state itself'}"
            )
        here = (*path, str.__str__(key))  # a subclass may not survive a message, or be equal
        if len(here) > MAX_DEPTH:
            raise ConfigError(f"the state is nested deeper than {MAX_DEPTH} at {show(here)}")
        if isinstance(value, Mapping) and value:
            yield from leaves(value, here)
        else:
            yield here, dict(value) if isinstance(value, Mapping) else value


def tree(items: Iterator[tuple[Path, Any]]) -> dict:
    """Make nested dicts of (path, leaf) pairs: the inverse of `leaves`."""
    state: dict = {}
    for path, leaf in items:
        place = state
        for key in path[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise CheckpointError(f"{show(path)}: a part of this path is a leaf as well")
        if path[-1] in place:
            raise CheckpointError(f"{show(path)} is there twice, or is a leaf and a folder")
        place[path[-1]] = leaf
    return state


# ------------------------------------------------------------------------------------ dtypes

#: Kinds that NumPy itself writes as a short string such as ``<f4``.
_KINDS = "biufcSUmM"
#: Those strings. NumPy's parser is not shown others: it divides by zero in ``<M8[s/0]``.
_SHORT = re.compile(rf"[<>|][{_KINDS}][0-9]*(\[[0-9]*[A-Za-z]+\])?", re.ASCII)


def dtype_name(dtype) -> str:
    """Return the name under which a manifest keeps `dtype`: ``<f4``, ``bfloat16``.

    Raises ConfigError for object and structured dtypes: they have no bytes of their own, or no
    name.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in _KINDS and _by_string(dtype.str) == dtype:
        return dtype.str
    if not dtype.hasobject and dtype.names is None and extended_dtype(dtype.name) == dtype:
        return dtype.name
    raise ConfigError(f"arrays of dtype {dtype} cannot be saved; use a number type of NumPy")


def dtype_of(name: str) -> np.dtype:
    """Return the dtype that `dtype_name` named.

    Raises Unreadable for a name that is none, and where ml_dtypes is needed and absent.
    """
    found = _of_numpy(name)
    if found is None and name.isidentifier() and len(name) <= 24:
        found = extended_dtype(name)
    if found is not None:
        return found
    raise Unreadable(
        f"{name[:40]!r} is not a dtype known here (float types beyond NumPy's need ml_dtypes)"
    )


@lru_cache(64)  # a state of many tensors has few dtypes
def _of_numpy(name: str) -> np.dtype | None:
    """Return the dtype of a short string that NumPy writes so, or None."""
    if len(name) > 24 or not _SHORT.fullmatch(name):
        return None
    dtype = _by_string(name)
    known = dtype is not None and dtype.str == name and 0 < dtype.itemsize < 2**31
    return dtype if known else None


def _by_string(name: str) -> np.dtype | None:
    """Return NumPy's own dtype of a short string, or None."""
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        return None


# ------------------------------------------------------------------------------------ extras


def to_json(value, path: Path = ()):
    """Return an extra in the form that strict JSON can hold.

    Dicts inside lists, and the floats that JSON has no word for, become one-key objects; a tuple
    becomes a list. Raises ConfigError for anything that is neither JSON nor an array.
    """
    if isinstance(value, np.generic):
        value = value.item()
    elif has_array(value):
        raise ConfigError(f"{show(path)}: an array inside a list cannot be saved; use a dict")
    if value is None or isinstance(value, bool):
        return value
    # Exact from here on: an enum or another subclass may have a `repr` of its own, and be unknown
    # to the process that reads it.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return _whole_number(int.__int__(value), path)
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


def _whole_number(value: int, path: Path) -> int:
    """Return `value`, or raise ConfigError: longer numbers Python does not read back from text."""
    if value.bit_length() > _MOST_BITS:
        raise ConfigError(
            f"{show(path)}: an integer of {value.bit_length()} bits cannot be saved; expected at "
            f"most {_MOST_BITS}, save it as an array"
        )
    return value


def plain(value, path: Path = ()):
    """Return an extra as it will be read back: exact numbers, texts, lists and dicts."""
    return from_json(to_json(value, path))


def from_json(value):
    """Return the extra that `to_json` wrote. Raises CheckpointError for other objects."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"dict"} and isinstance(value["dict"], dict):
        return {key: from_json(item) for key, item in value["dict"].items()}
    if set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
        return float(value["float"])
    raise CheckpointError(f"an extra holds an object of unknown form with keys {sorted(value)}")
