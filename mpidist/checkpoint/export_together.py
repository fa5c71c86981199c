"""Write a step as one HDF5 file by all ranks at once, where h5py was built with parallel HDF5.

Every rank reads the rows of each array that it writes. Making data sets is collective in HDF5, and
so is closing the file: a rank that fails goes on to the end, and is heard there.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from mpidist.checkpoint import load, steps
from mpidist.checkpoint.export import extras_text, name_of, named, put_extras
from mpidist.checkpoint.layout import Shard, dtype_of, leaves, show, to_json, tree
from mpidist.checkpoint.manifest import Damaged, Tensor, Unreadable
from mpidist.checkpoint.steps import Entry
from mpidist.checkpoint.store import CheckpointStore
from mpidist.checkpoint.together import everywhere, together
from mpidist.errors import CheckpointError, StorageError
from mpidist.partition import BlockPartition


def export_together(comm, path: str, partial: Path, step: int | None) -> int:
    """Write one step of the store at `path` to `partial`, a new file. Collective over `comm`.

    Returns the step, the newest good one for None.
    """
    number, tensors, state = _read(comm, path, step)
    rows = {p: leaf for p, leaf in leaves(state) if isinstance(leaf, Shard)}
    extras = {show(p): to_json(leaf, p) for p, leaf in leaves(state) if p not in rows}
    # What is said of a type does not depend on the elements: each rank knows it of all arrays.
    empty, dtypes = named({name_of(t.path): np.empty(0, dtype_of(t.dtype)) for t in tensors})

    def write() -> None:
        problem: Exception | None = None
        with h5py.File(partial, "w-", driver="mpio", comm=comm) as file:
            for tensor in tensors:
                name = name_of(tensor.path)
                data_set = file.create_dataset(name, tensor.shape, _stored(empty[name].dtype))
                try:
                    if tensor.path in rows and problem is None:
                        _write(data_set, rows[tensor.path])
                except Exception as error:
                    problem = error
            put_extras(file, extras_text(extras, dtypes))
        if problem is not None:
            raise problem

    # Opening and closing may fail on some ranks only, too: all are heard before any raises.
    together(comm, f"export of step {number}", write)
    return number


def _stored(dtype: np.dtype) -> np.dtype:
    """Return the type in the file: text has room for four bytes a character, whoever writes it."""
    return np.dtype(f"S{max(1, dtype.itemsize)}") if dtype.kind == "U" else dtype


def _write(data_set, rows: Shard) -> None:
    """Write the rows of this rank. Local."""
    (array,) = named({"": rows.array})[0].values()
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.ndim:
        data_set[rows.start[0] : rows.start[0] + len(array)] = array  # type: ignore[index]
    else:
        data_set[()] = array


def _read(comm, path: str, step: int | None) -> tuple[int, tuple[Tensor, ...], dict]:
    """Read this rank's rows of the newest good step: (step, all arrays, state). Collective."""
    entries = together(comm, "export", lambda: None, lambda _: steps.candidates(path, step))
    tried: list[str] = []
    with CheckpointStore(comm, path) as store:
        for entry in entries:
            try:
                tensors = _tensors(comm, path, entry)
                return entry.step, tensors, store.restore(_rows(comm, tensors), entry.step)[1]
            except (StorageError, Unreadable):
                raise  # whole as far as anybody knows: no older step in its place
            except CheckpointError as damage:
                if isinstance(damage, Damaged) and comm.rank == 0:  # else `restore` has said it
                    load.note(path, entry, str(damage))
                tried.append(f"{entry.name}: {damage}")
    raise load.failure(path, step, tried)


def _tensors(comm, path: str, entry: Entry) -> tuple[Tensor, ...]:
    """Return all arrays of a step, without their numbers. Collective."""
    data = together(comm, "export", lambda: None, lambda _: steps.read_manifest(path, entry))
    return everywhere(comm, "export", lambda: steps.parse(data, entry)).tensors


def _rows(comm, tensors: tuple[Tensor, ...]) -> dict:
    """Return room for this rank's rows of each array; what has none is the first rank's. Local."""
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
