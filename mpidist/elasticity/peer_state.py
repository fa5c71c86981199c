"""Send the newest state of a living rank to the ranks that have done fewer steps.

    rank 0   step 812   behind: receives into new memory, sends on to rank 3, then copies
    rank 1   step 813   has the newest state: sends
    rank 2   step 813   already has the same state: does nothing
    rank 3   step 812   behind: receives from rank 0

A rank changes its state only after it has received all data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
from mpi4py import MPI

from ..arrays import copy_into, host_empty, is_device, is_writable
from ..checkpoint.format.state import Path, Shard, array_of, is_array, leaves, show
from ..errors import ConfigError, MismatchError
from ..runtime.agreement.run_on_all import difference
from ..runtime.elastic_requests import wait_for

#: The state of a program: nested dicts of arrays and numbers, or a function that returns arrays.
State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

#: The step of a rank that has no state, which is a spare that has not replaced a dead rank.
NOTHING = -2

_PIECE = 1 << 22  # bytes of one message
_TAG = 8


def leaves_of(state: State) -> list[tuple[Path, Any]]:
    """Return (path, leaf) for each array or number of a state; a path is a sequence of keys.

    Raises ConfigError for a leaf that cannot be replaced by that of another rank.
    """
    found = [*leaves(state() if callable(state) else state)]
    for path, leaf in found:
        if isinstance(leaf, Shard):
            raise ConfigError(f"the state has a Shard, {show(path)}, which no other rank has")
        if not _in_place(leaf):
            if callable(state):
                wanted = "a function may give only arrays; pass a dict, so numbers can be replaced"
                raise ConfigError(f"the state has {type(leaf).__name__} {show(path)}: {wanted}")
        elif not is_writable(array_of(leaf)) or array_of(leaf).dtype.hasobject:
            raise ConfigError(f"the state has an array that cannot be written: {show(path)}")
    return found


def description(state: State) -> dict[str, str]:
    """Return {name: text with dtype and shape} of a state. All ranks must have the same result."""
    return {
        show(path): f"{array_of(leaf).dtype} {array_of(leaf).shape}"
        if _in_place(leaf)
        else type(leaf).__name__
        for path, leaf in leaves_of(state)
    }


def size_of(state: State) -> int:
    """Return the number of bytes of all arrays of a state."""
    return sum(array_of(leaf).nbytes for _, leaf in leaves_of(state) if _in_place(leaf))


def bring_up_to_date(comm: MPI.Intracomm, state: State, step: int) -> int:
    """Give all ranks of `comm` the state of the rank with the largest `step`. Collective.

    Arrays of `state` are overwritten in place, and numbers in its dicts are replaced. Returns the
    largest step, or `NOTHING` (-2) if no rank has a state.
    """
    mine, steps = np.array([step], np.int64), np.empty(comm.size, np.int64)
    wait_for([comm.Iallgather(mine, steps)], mine, steps)
    newest, sender = int(steps.max()), int(steps.argmax())
    # No communicator is made for these ranks: with Open MPI 5.0.11 a rank may crash if another rank
    # dies while a communicator is made.
    line = [sender, *np.flatnonzero(steps < newest).tolist()]
    if len(line) == 1 or comm.rank not in line:
        return newest
    found, told = leaves_of(state), b""
    if comm.rank == sender:
        told = MPI.pickle.dumps((description(state), [x for _, x in found if not _in_place(x)]))
    length = np.array([len(told)], np.int64)
    _pass_on(comm, line, length)
    text = np.frombuffer(bytearray(told or int(length[0])), np.uint8)
    _pass_on(comm, line, text)
    if comm.rank == sender:
        _send(comm, line, found)
    else:
        parts, numbers = MPI.pickle.loads(text)
        _check(parts, description(state))
        _receive(comm, line, found, iter(numbers), state)
    return newest


def _in_place(leaf) -> bool:
    """Return whether a leaf of a state is an array, which is changed in place."""
    return is_array(leaf) and not isinstance(leaf, np.generic)


def _check(newest: dict[str, str], mine: dict[str, str]) -> None:
    """Raise MismatchError if the newest state and the state of this rank do not match."""
    text = difference([newest, mine])
    if text is not None:
        raise MismatchError(
            "md.elastic: the newest state (called rank 0) and the state of a rank that is behind "
            f"(called rank 1) have different parts: {text}; make all parts before the first step"
        )


def _send(comm: MPI.Intracomm, line: list[int], found: list[tuple[Path, Any]]) -> None:
    for _, leaf in found:
        if _in_place(leaf):
            array = array_of(leaf)
            if is_device(array) or not array.flags.c_contiguous:
                packed = host_empty(array.size, array.dtype, array)
                copy_into(packed, array)
                array = packed
            _pass_on(comm, line, array.reshape(-1))


def _receive(comm, line: list[int], found: list[tuple[Path, Any]], numbers, state: State) -> None:
    values = []
    for _, leaf in found:
        if _in_place(leaf):
            array = array_of(leaf)
            values.append(host_empty(array.size, array.dtype, array))
            _pass_on(comm, line, values[-1])
        else:
            values.append(next(numbers))
    for (path, leaf), value in zip(found, values, strict=True):
        if _in_place(leaf):
            copy_into(array_of(leaf), value)
        else:
            reduce(getitem, path[:-1], state)[path[-1]] = value  # type: ignore[index, arg-type]


def _pass_on(comm: MPI.Intracomm, line: list[int], vector: np.ndarray) -> None:
    """Send `vector` from the first rank of `line` to the other ranks along a binomial tree."""
    raw, mine = vector.view(np.uint8), line.index(comm.rank)
    step = mine & -mine or 1 << len(line).bit_length()  # mine - step is the parent in the tree
    children = []
    source = mine - step
    while step := step >> 1:
        if mine + step < len(line):
            children.append(line[mine + step])
    for start in range(0, raw.size, _PIECE):
        piece = [raw[start : start + _PIECE], MPI.BYTE]
        if mine:
            wait_for([comm.Irecv(piece, line[source], _TAG)], raw)
        wait_for([comm.Isend(piece, child, _TAG) for child in children], raw)
