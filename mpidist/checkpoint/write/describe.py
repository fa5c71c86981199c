"""What a rank's state holds, without its numbers: looked at before each save."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..format import piece_table
from ..format.regions import Region
from ..format.state import Fact, Shard, array_of, dtype_name, is_array, leaves, to_json
from .write_plan import Description, Extras


class Survey(NamedTuple):
    """One look at a state.

    arrays : array leaves and shards.
    marks : path, dtype, shape and region of each: equal where a plan can be used again.
    extras : JSON-ready values by path.
    """

    arrays: list[Any]
    marks: list[tuple]
    extras: Extras


def survey(state: Mapping) -> Survey:
    """Look at `state`. Raises ConfigError for what cannot be saved."""
    arrays, marks, extras = [], [], []
    for path, leaf in leaves(state):
        region: Region | None = None
        if type(leaf) is not np.ndarray:
            if isinstance(leaf, Shard):
                region = leaf.region
            elif not is_array(leaf):
                # An empty dict is a leaf: it has no entries that could keep its name.
                value = {"dict": {}} if leaf == {} else to_json(leaf, path)
                extras.append((path, value))
                continue
        array = leaf if type(leaf) is np.ndarray else array_of(leaf)
        shape = leaf.global_shape if region is not None else tuple(array.shape)
        arrays.append(leaf)
        marks.append((path, array.dtype, shape, region))
    return Survey(arrays, marks, tuple(extras))


def describe(found: Survey) -> Description:
    """Say what a rank wants to save. Raises ConfigError for a dtype without a name."""
    names: dict[Any, str] = {}
    facts = []
    for path, dtype, shape, _ in found.marks:
        if dtype not in names:
            names[dtype] = dtype_name(dtype)
        facts.append(Fact(path, names[dtype], shape))
    regions = [(n, mark[3]) for n, mark in enumerate(found.marks) if mark[3] is not None]
    sharded = tuple(mark[3] is not None for mark in found.marks)
    return Description(tuple(facts), sharded, piece_table.of_regions(regions))


def digest(*values) -> bytes:
    """Return a digest of the descriptions of `values`."""
    return hashlib.sha256(repr(values).encode()).digest()
