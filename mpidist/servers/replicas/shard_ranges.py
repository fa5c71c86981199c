"""List the arrays of a server's part of a model, and the elements that an old and a new part share.

The arrays are parameters and optimizer state, as 1-D views (ranges). All servers of a model list
them in the same order, so messages need not name them. This module uses no MPI.
"""

from __future__ import annotations

import numpy as np

from ..layout.placement import ServerLayout
from ..shards import ServerShard

#: Parts of the arrays of one shard, as 1-D views.
Ranges = tuple[np.ndarray, ...]


def all_ranges(shard: ServerShard) -> Ranges:
    """Return 1-D views of all arrays (parameters, optimizer state) of a server's part."""
    kinds, scalars = _tables(shard)
    arrays = [array.reshape(-1) for table in kinds for _, array in table.values()]
    return (*arrays, *(leaf.reshape(-1) for leaf in scalars.values()))


def range_bytes(ranges: Ranges) -> int:
    """Return the sum of the bytes of all arrays in `ranges`."""
    return sum(array.nbytes for array in ranges)


def shared_ranges(shard: ServerShard, layout: ServerLayout, server: int) -> Ranges:
    """Return 1-D views of the elements of `shard` that another layout puts on `server`."""
    common = []
    for piece in shard.layout.pieces[shard.server]:
        for other in layout.pieces[server]:
            low, high = max(piece.start, other.start), min(piece.stop, other.stop)
            if other.tensor == piece.tensor and low < high:
                common.append((layout.tensors[piece.tensor].name, low, high))
    found = []
    for table in _tables(shard)[0]:
        for name, low, high in common:
            if name in table:
                start, array = table[name]
                found.append(array[low - start : high - start])
    return tuple(found)


def are_shared(old: ServerLayout, i: int, new: ServerLayout, j: int) -> bool:
    """Whether server `i` of layout `old` and server `j` of layout `new` have common elements."""
    return any(
        a.tensor == b.tensor and max(a.start, b.start) < min(a.stop, b.stop)
        for a in old.pieces[i]
        for b in new.pieces[j]
    )


def pack(ranges: Ranges, buffer: np.ndarray) -> None:
    """Copy the arrays in `ranges`, one after the other, to the front of a byte buffer."""
    at = 0
    for array in ranges:
        buffer[at : at + array.nbytes] = array.view(np.uint8)
        at += array.nbytes


def unpack(ranges: Ranges, buffer: np.ndarray) -> None:
    """Set the arrays in `ranges` to the values that `pack` has written into a byte buffer."""
    at = 0
    for array in ranges:
        array.view(np.uint8)[...] = buffer[at : at + array.nbytes]
        at += array.nbytes


def scalars_of(shard: ServerShard) -> dict[str, str]:
    """Return the scalars of the optimizer state by name, as texts that keep all bits."""
    return {name: leaf.tobytes().hex() for name, leaf in _tables(shard)[1].items()}


def set_scalars(shard: ServerShard, scalars: dict[str, str]) -> None:
    """Set the scalars of the optimizer state to the values that `scalars_of` has returned."""
    for name, leaf in _tables(shard)[1].items():
        leaf.reshape(-1).view(np.uint8)[...] = np.frombuffer(bytes.fromhex(scalars[name]), np.uint8)


def _tables(shard: ServerShard) -> tuple[list[dict], dict[str, np.ndarray]]:
    """Return a list of dicts (tensor to (start, array)), and a dict of the optimizer's scalars.

    The list has a dict for the parameters, and one for each kind of optimizer state.
    """
    held = shard.export()
    lists = [held["parameters"], *(held["optimizer"][slot] for slot in sorted(held["optimizer"]))]
    tables = [{name: (start, array) for name, start, array in triples} for triples in lists]
    return tables, {name: held["scalars"][name] for name in sorted(held["scalars"])}
