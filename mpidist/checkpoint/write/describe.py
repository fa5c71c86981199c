"""Describe the state of a rank without the data of its arrays, as the first part of a save."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..format import piece_table
from ..format.state import Fact, Shard, array_of, dtype_name, has_array, leaves, to_json
from .write_plan import Description, Extras


class Survey(NamedTuple):
    """The leaves of a state: the values in its nested dicts.

    `marks` describes each leaf in `arrays`: its dict keys, its dtype, the shape of the global array
    and, for a shard, which part of the global array it is. `extras` has the (path of dict keys,
    value) pairs of all other leaves.
    """

    arrays: list[Any]
    marks: list[tuple]
    extras: Extras


def survey(state: Mapping) -> Survey:
    """Return the values in the nested dicts of `state`. Raises ConfigError."""
    arrays, marks, extras = [], [], []
    for path, leaf in leaves(state):
        if type(leaf) is np.ndarray:  # true for most leaves, which need no further test
            array = leaf
        elif has_array(leaf):
            array = array_of(leaf)
        else:
            # An empty dict is saved as a leaf, because it has no entries whose paths would contain
            # its name.
            extras.append((path, {"dict": {}} if leaf == {} else to_json(leaf, path)))
            continue
        arrays.append(leaf)
        region = leaf.region if isinstance(leaf, Shard) else None
        shape = tuple(array.shape) if region is None else leaf.global_shape
        marks.append((path, array.dtype, shape, region))
    return Survey(arrays, marks, tuple(extras))


def describe(found: Survey) -> Description:
    """Return the names, dtypes and shapes of a rank's arrays, and the index ranges of its shards.

    Raises ConfigError.
    """
    dtypes = dict.fromkeys(mark[1] for mark in found.marks)
    names: dict[Any, str] = {dtype: dtype_name(dtype) for dtype in dtypes}
    facts = tuple(Fact(path, names[dtype], shape) for path, dtype, shape, _ in found.marks)
    regions = [(n, mark[3]) for n, mark in enumerate(found.marks) if mark[3] is not None]
    sharded = tuple(mark[3] is not None for mark in found.marks)
    return Description(facts, sharded, piece_table.of_regions(regions))


def digest(*values) -> bytes:
    """Return the SHA-256 of the `repr` of `values`."""
    return hashlib.sha256(repr(values).encode()).digest()
