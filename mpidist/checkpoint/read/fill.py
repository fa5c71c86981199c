"""The arrays of a state on their way from a checkpoint: where each goes, and who reads it.

Host arrays are filled where they lie, from the blocks as they come. What lies on a device, or
cannot be written to, comes to host memory first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ...arrays import copy_into, host_empty, is_device
from ..format.state import Path, Shard, array_of, has_array, is_array, region_of
from .read_once import ReadAndBroadcast
from .read_plan import Places, ReadItem

#: Bytes that come to host memory first at once, where they are more.
STAGED = 256 << 20


def is_whole(leaf) -> bool:
    """Whether a leaf can be filled by what other ranks have read: all of it, in order."""
    if isinstance(leaf, Shard) or not is_array(leaf):
        return False
    return _is_staged(leaf) or array_of(leaf).flags.c_contiguous


def _is_staged(leaf) -> bool:
    return isinstance(leaf, np.generic) or is_device(array_of(leaf))


def staged_bytes(leaf) -> int:
    """Return what a leaf takes of host memory until its numbers are there."""
    return array_of(leaf).nbytes if has_array(leaf) and _is_staged(leaf) else 0


def batches(sizes: Sequence[int]) -> list[int]:
    """Cut tensors that take `sizes` so that a batch takes little, or is one: their ends.

    Not finer: tensors that share a block and not a batch each read it.
    """
    ends: list[int] = []
    held = 0
    for number, size in enumerate(sizes):
        if held and held + size > STAGED:
            ends.append(number)
            held = 0
        held += size
    return [*ends, len(sizes)]


class Filling:
    """The leaves of `items` and what fills them.

    Parameters
    ----------
    found : Manifest or Layout
    items : (path, leaf) pairs
    common : collection of Path
        Leaves that `is_whole` on all ranks: each of them reads a part.
    rank, ranks : int
    room : array, optional
        As in `ReadAndBroadcast`.
    """

    def __init__(
        self,
        found,
        items: Iterable[tuple[Path, Any]],
        common: Collection[Path] = (),
        rank: int = 0,
        ranks: int = 1,
        room: np.ndarray | None = None,
    ):
        places = Places(found)
        number = {tensor.path: n for n, tensor in enumerate(found.tensors)}
        own: list[ReadItem] = []
        shared: list[ReadItem] = []
        self._leaves: list[tuple[Path, Any, np.ndarray]] = []
        for path, leaf in items:
            if not has_array(leaf):
                continue
            host = array = array_of(leaf)
            if _is_staged(leaf):
                host = host_empty(array.size, array.dtype, like=array).reshape(array.shape)
            self._leaves.append((path, leaf, host))
            wants = shared if path in common else own
            wants += places.wants(number[path], region_of(leaf), host)
        #: What is passed on to other ranks, and all that this one reads.
        self.shared = ReadAndBroadcast(shared, found.block, rank, ranks, room)
        self.wants = [*own, *self.shared.mine]

    def finish(self) -> dict[Path, Any]:
        """Return the leaves by path, filled."""
        filled: dict[Path, Any] = {}
        for path, leaf, host in self._leaves:
            if isinstance(leaf, np.generic):
                filled[path] = host[()]
                continue
            if is_device(array_of(leaf)):
                copy_into(array_of(leaf), host)
            filled[path] = leaf
        return filled
