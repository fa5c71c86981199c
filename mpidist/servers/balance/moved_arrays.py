"""Move the arrays of one model from the servers of an old layout to the servers of a new layout.

    for each tensor, and each slot (each kind of optimizer state, and then the parameters):
        new array      | elements that stay here: copied | elements of others: received into it |
        old array      | elements for others: sent       |   then it is freed

Only elements that change owner are sent. A server needs memory for only one more array at a time,
because an old array is freed before the next new array is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ...errors import ConfigError
from ...partition import pieces
from ...runtime.elastic_requests import test_all
from ...tensors import dtype_of
from ..layout.placement import ServerLayout
from ..link import Link
from ..modes.hosted_model import Hosted
from ..protocol import MESSAGE_BYTES, VALUES
from .common_elements import Common, Divided, TensorMove

#: The name of an array with one entry per parameter: ("parameters",), or "state" and the keys of
#: the array in the optimizer's nested dicts, or "pulled" and the number of a worker.
Slot = tuple[Any, ...]

PARAMETERS: Slot = ("parameters",)
PULLED = "pulled"


def arrays_of(hosted: Hosted) -> dict[int, dict[Slot, np.ndarray]]:
    """Return all arrays that this server holds of a model.

    The result maps the number of each tensor to a dict, which maps the name of an array to the
    array. Such an array has parameters, or one kind of optimizer state (such as velocities), or the
    parameters that one worker has pulled. Raises ConfigError if an array of the optimizer's state
    is not a scalar and does not have one entry per parameter.
    """
    shard = hosted.shard
    numbers = {shard.layout.key(p): p.tensor for p in shard.layout.pieces[shard.server]}
    found: dict[int, dict[Slot, np.ndarray]] = {
        tensor: {PARAMETERS: shard.parameters[key]} for key, tensor in numbers.items()
    }
    for path, leaf in shard.leaves():
        tensor = numbers.get(path[-1])
        if tensor is not None and np.shape(leaf) == found[tensor][PARAMETERS].shape:
            found[tensor]["state", *path[:-1]] = leaf
        elif np.ndim(leaf):
            raise ConfigError(
                f"model {hosted.name!r}: the optimizer's state {'/'.join(path)!r} has shape "
                f"{np.shape(leaf)}, and not one entry per parameter, so it cannot be divided"
            )
    for worker, kept in enumerate(hosted.kept()):
        for key, array in kept.items():
            found[numbers[key]][PULLED, worker] = array
    return found


def move_model(
    link: Link,
    ranks: Sequence[int],
    hosted: Hosted,
    layouts: tuple[ServerLayout, ServerLayout],
    slots: Mapping[int, Sequence[tuple[Slot, str]]],
) -> None:
    """Move the arrays of a model, so that each server gets its elements in the new layout.

    All servers call it. `layouts` are the old and the new layout. For each tensor, `slots` has the
    names and dtypes of its arrays (parameters, and kinds of optimizer state), in the same order on
    all servers.
    """
    me = hosted.shard.server
    old, new = (Divided(layout, len(ranks)) for layout in layouts)
    mine = arrays_of(hosted)
    for tensor in range(len(new.layout.tensors)):
        move = TensorMove(old, new, tensor)
        if not move.changes or move.stays(me):
            continue
        before, after = move.old[me], move.new[me]
        held = mine.pop(tensor, {})
        if before is not None:
            _take_out(hosted, old.layout.key(before))
        for slot, dtype in slots[tensor]:
            if slot[0] == PULLED and before is not None:
                # If a worker has not pulled these elements yet, they count as pulled now.
                held.setdefault(slot, held[PARAMETERS])
            taken = None if after is None else np.empty(after.stop - after.start, dtype_of(dtype))
            _exchange(link, ranks, me, move, held.pop(slot, None), taken)
            if after is not None and taken is not None:
                _put_in(hosted, slot, new.layout.key(after), taken)
    hosted.shard.divide_anew(new.layout)


def _exchange(link: Link, ranks: Sequence[int], me: int, move: TensorMove, given, taken) -> None:
    """Send elements of the old array `given` to other servers, and fill the new array `taken`.

    `given` is None if this server had no elements of the tensor, and `taken` is None if it will
    have none.
    """
    requests: list[MPI.Request] = []
    memory: list[np.ndarray] = []
    scattered: list[tuple[Common, np.ndarray]] = []

    def post(call: Callable[..., MPI.Request], array: np.ndarray, rank: int) -> None:
        raw = array.reshape(-1).view(np.uint8)
        memory.append(raw)
        for start, stop in pieces(0, raw.size, MESSAGE_BYTES):
            requests.append(call([raw[start:stop], MPI.BYTE], rank, link.tag + VALUES))

    with link.pinned(requests, memory):
        for other, rank in enumerate(ranks):
            if other != me and (common := move.common(other, me)) is not None:
                array = common.table(taken)[common.new]
                if not isinstance(common.new, slice):
                    scattered.append((common, array))
                post(link.comm.Irecv, array, rank)
        for other, rank in enumerate(ranks):
            if other != me and (common := move.common(me, other)) is not None:
                post(link.comm.Isend, common.table(given)[common.old], rank)
                link.count_pieces(1, memory[-1].size, 0, 0)
        if (common := move.common(me, me)) is not None:
            common.table(taken)[common.new] = common.table(given)[common.old]
        link.wait(lambda: test_all(requests), peers="all")
    for common, array in scattered:
        common.table(taken)[common.new] = array


def _take_out(hosted: Hosted, key: str) -> None:
    """Remove all arrays with this key (parameters, state, pulled copies) of a model."""
    for tree in (hosted.shard.parameters, hosted.shard.state, *hosted.kept()):
        _pop(tree, key)


def _pop(tree: dict, key: str) -> None:
    if isinstance(tree.get(key), np.ndarray) and np.ndim(tree[key]):
        del tree[key]
    for branch in tree.values():
        if isinstance(branch, dict):
            _pop(branch, key)


def _put_in(hosted: Hosted, slot: Slot, key: str, array: np.ndarray) -> None:
    kind, *path = slot
    if kind == PULLED:
        hosted.kept()[path[0]][key] = array
        return
    tree: dict[str, Any] = hosted.shard.parameters if slot == PARAMETERS else hosted.shard.state
    for name in path:
        tree = tree.setdefault(name, {})
    tree[key] = array
