"""Write a step as one HDF5 file, all ranks at once; needs an h5py built with parallel HDF5.

Rank 0 alone creates the file with all data sets, and then every rank writes its own rows.
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
from ..format.state import Fact, Shard, Unreadable, leaves, named_dtype, show, to_json, tree
from ..storage import steps
from ..store import CheckpointStore
from .plain_file import name_of, named, put_extras

#: The largest number of bytes to write in one call, since HDF5 1.10 cannot pass more than 2 GiB to
#: MPI.
AT_ONCE = 2**30


def export_by_all(comm, path: str, target: Path, step: int | None) -> int:
    """Write one checkpoint of the store at `path` to the new file `target`; return its number.

    Collective over `comm`. If `step` is None, the newest good checkpoint is written.
    """
    number, tensors, state = _read(comm, path, step)
    rows = {p: (leaf.array, leaf.start) for p, leaf in leaves(state) if isinstance(leaf, Shard)}
    extras = {show(p): to_json(leaf, p) for p, leaf in leaves(state) if p not in rows}

    def write() -> None:
        with h5py.File(target, "r+", driver="mpio", comm=comm) as file:
            for keys, (array, start) in rows.items():
                # HDF5 would allocate an empty data set when it is opened, which is a collective
                # call, so empty data sets are not opened.
                if array.ndim and array.size:
                    _write(file[name_of(keys)], _stored(array), start)

    doing = f"export of step {number}"
    by_rank_0(comm, doing, lambda: _make(target, tensors, rows, extras))
    # Opening or closing may fail on some ranks only, so all ranks agree before any of them raises.
    run_on_all(comm, doing, write)
    return number


def _make(target: Path, tensors: tuple[Fact, ...], rows: dict, extras: dict) -> None:
    """Create the file with space for all arrays; write everything that no rank has in rows."""
    empty, dtypes = named({name_of(t.path): np.empty(0, named_dtype(t.dtype)) for t in tensors})
    # With these properties, HDF5 allocates the space of all data sets before the file is closed,
    # and writes no fill values into it.
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(target, "w-") as file:
        for tensor in tensors:
            name = name_of(tensor.path)
            if tensor.shape:
                file.create_dataset(name, tensor.shape, _stored(empty[name]).dtype, dcpl=early)
            else:  # h5py allocates a data set without axes when it is written
                file.create_dataset(name, data=_stored(rows[tensor.path][0]))
        put_extras(file, extras, dtypes)


def _stored(array: np.ndarray) -> np.ndarray:
    """Convert an array to the dtype that the file stores; text becomes UTF-8."""
    (array,) = named({"": array})[0].values()
    if array.dtype.kind != "U":
        return array
    return np.char.encode(array, "utf-8").astype(f"S{max(1, array.dtype.itemsize)}")


def _write(data_set, array: np.ndarray, start) -> None:
    """Write `array` into a data set from index `start` on, at most `AT_ONCE` bytes at once."""
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
    """Return the step, the description of all tensors, and this rank's rows. Collective."""
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
                raise  # the step may be undamaged, so no older step is tried
            except CheckpointError as damage:
                # If `restore` itself has found damage, it has reported the damage already, and
                # raises another error than `Damaged`.
                said = not isinstance(damage, Damaged)
                by_rank_0(comm, "export", partial(search.pass_over, str(damage), said))


def _rows(comm, tensors: tuple[Fact, ...]) -> dict:
    """Allocate an array for this rank's rows of each tensor; return them as nested dicts."""
    items = []
    for tensor in tensors:
        axes = len(tensor.shape)
        low, high = BlockPartition((*tensor.shape, 1)[0], comm.size).range(comm.rank)
        if high > low or comm.rank == 0:
            array = np.empty((high - low, *tensor.shape[1:])[:axes], named_dtype(tensor.dtype))
            items.append((tensor.path, Shard(array, tensor.shape, (low, *[0] * axes)[:axes])))
    return tree(iter(items))
