"""Bring all ranks to the newest state of a living rank, without a file.

    rank 0   step 812   behind: receives into new memory, then copies
    rank 1   step 813   the newest: sends
    rank 2   step 813   has the same state already, and does nothing

A rank that receives copies nothing into its state before it has received everything. If the sender
dies meanwhile, each rank still has a whole state, the newest of which the next attempt uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
from mpi4py import MPI

from ..arrays import copy_into, host_empty, is_device, is_writable
from ..checkpoint.format.state import Path, Shard, array_of, is_array, leaves, show
from ..errors import ConfigError, MismatchError
from ..runtime.agreement.run_on_all import difference

#: The state of a program: nested dicts of arrays and numbers, or a function that returns arrays.
State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_MOST = 1 << 30  # bytes of one message


def leaves_of(state: State) -> list[tuple[Path, Any]]:
    """Return the (path, leaf) pairs of a state; raise ConfigError for what cannot be replaced."""
    found = [*leaves(state() if callable(state) else state)]
    for path, leaf in found:
        if isinstance(leaf, Shard):
            raise ConfigError(f"the state has a Shard, {show(path)}, which no other rank has")
        if not _in_place(leaf):
            if callable(state):
                wanted = "a function gives arrays only; pass a dict, in which numbers are replaced"
                raise ConfigError(f"the state has {type(leaf).__name__} {show(path)}: {wanted}")
        elif not is_writable(array_of(leaf)) or array_of(leaf).dtype.hasobject:
            raise ConfigError(f"the state has an array that cannot be written: {show(path)}")
    return found


def description(state: State) -> dict[str, str]:
    """Return a text for each leaf of a state; the texts must be equal on all ranks."""
    return {
        show(path): f"{array_of(leaf).dtype} {array_of(leaf).shape}"
        if _in_place(leaf)
        else type(leaf).__name__
        for path, leaf in leaves_of(state)
    }


def bring_up_to_date(comm: MPI.Intracomm, state: State, step: int) -> int:
    """Give all ranks of `comm` the state of the rank with the largest `step`. Collective.

    Arrays of the state are changed in place, and other leaves are replaced in their dicts. If a
    rank dies, MPI raises an exception, and the state of this rank is what it was.

    Returns
    -------
    int
        The largest step.
    """
    steps = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([step], np.int64), steps)
    newest, sender = int(steps.max()), int(steps.argmax())
    if newest == steps.min():
        return newest
    takes_part = step < newest or comm.rank == sender
    # The sender has the lowest key, so it is rank 0 of `part`.
    part: Any = comm.Split(0 if takes_part else MPI.UNDEFINED, int(comm.rank != sender))
    if comm.rank == sender:
        part.bcast(description(state), 0)
        _send(part, leaves_of(state))
    elif takes_part:
        _check(part.bcast(None, 0), description(state))
        _receive(part, leaves_of(state), state)
    if takes_part:
        with suppress(MPI.Exception):
            part.Free()
    return newest


def _in_place(leaf) -> bool:
    """Return whether a leaf is an array, into which values can be copied, and not a number."""
    return is_array(leaf) and not isinstance(leaf, np.generic)


def _check(newest: dict[str, str], mine: dict[str, str]) -> None:
    """Raise MismatchError if a rank that is behind has no place for a part of the newest state."""
    text = difference([newest, mine])
    if text is not None:
        raise MismatchError(
            "md.elastic: the newest state (rank 0) has other parts than that of a late rank "
            f"(rank 1): {text}; make all parts before the first step"
        )


def _send(part: MPI.Intracomm, found: list[tuple[Path, Any]]) -> None:
    part.bcast([leaf for _, leaf in found if not _in_place(leaf)], 0)
    for _, leaf in found:
        if _in_place(leaf):
            array = array_of(leaf)
            if is_device(array) or not array.flags.c_contiguous:
                packed = host_empty(array.size, array.dtype, array)
                copy_into(packed, array)
                array = packed
            _bcast(part, array.reshape(-1))


def _receive(part: MPI.Intracomm, found: list[tuple[Path, Any]], state: State) -> None:
    numbers, values = iter(part.bcast(None, 0)), []
    for _, leaf in found:
        if _in_place(leaf):
            array = array_of(leaf)
            values.append(host_empty(array.size, array.dtype, array))
            _bcast(part, values[-1])
        else:
            values.append(next(numbers))
    for (path, leaf), value in zip(found, values, strict=True):
        if _in_place(leaf):
            copy_into(array_of(leaf), value)
        else:
            reduce(getitem, path[:-1], state)[path[-1]] = value  # type: ignore[index, arg-type]


def _bcast(part: MPI.Intracomm, vector: np.ndarray) -> None:
    raw = vector.view(np.uint8)
    for start in range(0, raw.size, _MOST):
        part.Bcast([raw[start : start + _MOST], MPI.BYTE], 0)
