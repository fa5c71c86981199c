"""Write a step as one HDF5 file by all ranks at once, where h5py was built with parallel HDF5.

Rank 0 makes the file with all its data sets, alone; then every rank reads and writes its rows of
each. Making data sets by all would be a collective call for each of them, which takes longer, and
in which HDF5 leaves the others waiting for a rank that the disk is full for. So opening and closing
are the only collective calls of HDF5 here, and nothing of the file's structure changes in between.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import h5py
import numpy as np

from ...errors import CheckpointError, StorageError
from ...partition import BlockPartition
from .. import load
from ..control import by_rank_0, run_on_all
from ..format.manifest import Damaged
from ..format.state import Fact, Shard, Unreadable, dtype_of, leaves, show, to_json, tree
from ..storage import steps
from ..store import CheckpointStore
from .plain_file import extras_text, name_of, named, put_extras

#: Bytes written in one call: HDF5 1.10 hands MPI no more than 2 GiB.
AT_ONCE = 2**30


def export_by_all(comm, path: str, target: Path, step: int | None) -> int:
    """Write one step of the store at `path` to `target`, a new file. Collective over `comm`.

    Returns the step, the newest good one for None.
    """
    number, tensors, state = _read(comm, path, step)
    rows = {p: (leaf.array, leaf.start) for p, leaf in leaves(state) if isinstance(leaf, Shard)}
    extras = {show(p): to_json(leaf, p) for p, leaf in leaves(state) if p not in rows}

    def write() -> None:
        with h5py.File(target, "r+", driver="mpio", comm=comm) as file:
            for keys, (array, start) in rows.items():
                # A data set without room is given some when it is opened, which is collective.
                if array.ndim and array.size:
                    _write(file[name_of(keys)], _stored(array), start)

    doing = f"export of step {number}"
    by_rank_0(comm, doing, lambda: _make(target, tensors, rows, extras))
    # Opening and closing may fail on some ranks only, too: all are heard before any raises.
    run_on_all(comm, doing, write)
    return number


def _make(target: Path, tensors: tuple[Fact, ...], rows: dict, extras: dict) -> None:
    """Make the file: room for all arrays, numbers without an axis, and the extras."""
    empty, dtypes = named({name_of(t.path): np.empty(0, dtype_of(t.dtype)) for t in tensors})
    # All room has its place when the file is closed, and nothing is written there twice.
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(target, "w-") as file:
        for tensor in tensors:
            name = name_of(tensor.path)
            if tensor.shape:
                file.create_dataset(name, tensor.shape, _stored(empty[name]).dtype, dcpl=early)
            else:  # h5py makes no room before it is written
                file.create_dataset(name, data=_stored(rows[tensor.path][0]))
        put_extras(file, extras_text(extras, dtypes))


def _stored(array: np.ndarray) -> np.ndarray:
    """Return what is in the file: text has room for four bytes a character, whoever writes it."""
    (array,) = named({"": array})[0].values()
    if array.dtype.kind != "U":
        return array
    return np.char.encode(array, "utf-8").astype(f"S{max(1, array.dtype.itemsize)}")


def _write(data_set, array: np.ndarray, start) -> None:
    """Write `array` to its place, in pieces of at most `AT_ONCE`."""
    if array.nbytes > AT_ONCE and array.size > 1:
        axis = next(axis for axis, length in enumerate(array.shape) if length > 1)
        low, high = np.array_split(array, 2, axis)
        _write(data_set, low, start)
        middle = start[axis] + low.shape[axis]
        _write(data_set, high, (*start[:axis], middle, *start[axis + 1 :]))
    else:
        place = zip(start, array.shape, strict=True)
        data_set[tuple(slice(first, first + length) for first, length in place)] = array


def _read(comm, path: str, step: int | None) -> tuple[int, tuple[Fact, ...], dict]:
    """Read this rank's rows of the newest good step: (step, all arrays, state). Collective."""
    search = load.Search(path, step)
    with CheckpointStore(comm, path) as store:
        while True:
            entry = by_rank_0(comm, "export", search.next)
            try:
                look = partial(steps.read_manifest, path, entry)
                tensors = by_rank_0(comm, "export", lambda: look().tensors)  # noqa: B023
                rows = _rows(comm, tensors)
                _, state = store.restore(rows, entry.step, history=entry.history)
                return entry.step, tensors, state
            except (StorageError, Unreadable):
                raise  # whole as far as anybody knows: no older step in its place
            except CheckpointError as damage:
                # What is no `Damaged` here `restore` has said.
                said = not isinstance(damage, Damaged)
                by_rank_0(comm, "export", partial(search.pass_over, str(damage), said))


def _rows(comm, tensors: tuple[Fact, ...]) -> dict:
    """Return room for this rank's rows of each array; what has none is the first rank's."""
    items = []
    for tensor in tensors:
        shape, dtype = tensor.shape, dtype_of(tensor.dtype)
        low, high = 0, int(comm.rank == 0)
        if shape:
            low, high = BlockPartition(shape[0], comm.size).range(comm.rank)
        if high > low or comm.rank == 0:
            room = np.empty((high - low, *shape[1:]) if shape else (), dtype)
            start = (low, *[0] * (len(shape) - 1)) if shape else ()
            items.append((tensor.path, Shard(room, shape, start)))
    return tree(iter(items))
