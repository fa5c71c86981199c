"""Choose which bytes of the files fill each array in a restore, and which rank reads them.

Arrays in host memory are filled in place. The values of an array on a device, or of a NumPy scalar,
are first read into a temporary host array; such an array or scalar is called staged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ...arrays import copy_into, host_empty, is_device
from ..format.state import Path, array_of, has_array, is_array, region_of
from .read_once import ReadAndBroadcast
from .read_plan import Places, ReadItem

#: The largest number of bytes of temporary host memory for one batch of arrays that are copied to a
#: device.
STAGED = 256 << 20


def is_whole(leaf) -> bool:
    """Whether other ranks may read parts of this array, and send them to this rank."""
    return is_array(leaf) and (_is_staged(leaf) or array_of(leaf).flags.c_contiguous)


def _is_staged(leaf) -> bool:
    return isinstance(leaf, np.generic) or is_device(array_of(leaf))


def staged_bytes(leaf) -> int:
    """Return the size in bytes of the temporary host array for `leaf`; 0 if there is none."""
    return array_of(leaf).nbytes if has_array(leaf) and _is_staged(leaf) else 0


def batches(sizes: Sequence[int]) -> list[int]:
    """Divide the tensors of a restore into consecutive batches; return the end of each batch."""
    ends, held = list[int](), 0
    for number, size in enumerate(sizes):
        if held and held + size > STAGED:
            ends.append(number)
            held = 0
        held += size
    return [*ends, len(sizes)]


class Filling:
    """The arrays to fill, and the read items (ranges of bytes of files) that fill them.

    `common` has the paths of dict keys of the arrays that all ranks want whole. Each rank reads a
    part of these arrays, and sends this part to all other ranks.
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
        own, shared = list[ReadItem](), list[ReadItem]()
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
        #: `shared` has the parts that ranks exchange, and `wants` has all items that this rank
        #: reads.
        self.shared = ReadAndBroadcast(shared, found.block, rank, ranks, room)
        self.wants = [*own, *self.shared.mine]

    def finish(self) -> dict[Path, Any]:
        """Copy temporary host arrays to their devices; return a dict: path of keys -> array."""
        filled: dict[Path, Any] = {}
        for path, leaf, host in self._leaves:
            if is_device(array_of(leaf)):
                copy_into(array_of(leaf), host)
            filled[path] = host[()] if isinstance(leaf, np.generic) else leaf
        return filled
