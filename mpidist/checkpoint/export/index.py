"""Make ``index.h5`` beside the shards of a step: each array whole, as a virtual dataset.

    index.h5:  parameters/w (12, 5)  =  shard-00000.h5:/0   elements  0 to 23, as three boxes
                                        shard-00001.h5:/0   elements 23 to 60, as two

    h5py.File("run/checkpoints/step-000000001200/index.h5")["parameters/w"][:]

For people and other programs. A restart never goes through it: where a shard is gone, HDF5 gives
zeros for its part, and no error. So an index is made only when each byte of the step has been
checked, and HDF5 has found each dataset where the manifest says that its bytes are.
"""

from __future__ import annotations

import io
import secrets
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from ... import untrusted_hdf5
from ...errors import ConfigError
from .. import load
from ..arguments import path_of
from ..format import hdf5_layout, piece_table
from ..format.manifest import Damaged, Manifest
from ..format.regions import Flat, boxes_of, whole
from ..format.state import Fact, dtype_of, show, to_json
from ..read.read_plan import Places
from ..read.reader import Reader
from ..storage import files, steps
from ..storage.steps import Entry
from ..write import shard_writer
from . import plain_file

NAME = "index.h5"


def index(path, step: int | None = None, history: int | None = None) -> tuple[int, Path]:
    """Write the index of a step, by default the newest good one.

    Returns the step and the file; one that is there already is replaced. It goes with the step when
    that is removed. Raises as `mpidist.load`.
    """
    path = path_of("path", path)
    entry, _ = load.newest_good(path, step, history, partial(_write, path))
    return entry.step, Path(path) / entry.name / NAME


def _write(path: str, entry: Entry) -> None:
    damages, _ = load.damages(path, entry)
    if damages:
        raise Damaged("; ".join(damages))
    manifest = steps.read_manifest(path, entry)
    with files.folder(path) as root, files.folder(entry.name, root) as folder:
        _compare(folder, manifest)
        # Made in memory, so that it is written as everything else in a store is.
        memory = io.BytesIO()
        with h5py.File(memory, "w") as file:
            _fill(file, manifest, Reader(folder, manifest))
        partial = f"index-{secrets.token_hex(4)}.part"
        try:
            shard_writer.put(folder, partial, memory.getvalue())
            files.rename(partial, NAME, folder)
        finally:
            files.remove_file(partial, folder)
        files.sync(folder)


def _compare(folder: int, manifest: Manifest) -> None:
    """Raise Damaged unless HDF5 finds in the shards what the manifest says, where it says it."""
    datasets = _datasets(manifest)
    for number, listed in enumerate(manifest.files):
        mine = np.flatnonzero(manifest.rows[:, piece_table.FILE] == number).tolist()
        try:
            with untrusted_hdf5.open_untrusted(listed.name, folder) as file:
                for place in mine:
                    row = manifest.rows[place].tolist()
                    tensor = manifest.tensors[row[piece_table.TENSOR]]
                    name = str(datasets[place])
                    _compare_one(untrusted_hdf5.checked_dataset(file, name), name, tensor, row)
        except ConfigError as error:
            raise Damaged(f"{listed.name}: {error}") from error


def _datasets(manifest: Manifest) -> list[int]:
    """Return the number of the dataset of each piece: they lie in their order in each file."""
    file, offset = manifest.rows[:, piece_table.FILE], manifest.rows[:, piece_table.OFFSET]
    order = np.lexsort((offset, file))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order)) - np.searchsorted(file[order], file[order])
    return number.tolist()


def _compare_one(found: h5py.Dataset, name: str, tensor: Fact, row: list[int]) -> None:
    dtype, inner = hdf5_layout.face(tensor.dtype)
    region = piece_table.region_of(row, len(tensor.shape))
    expected = dtype, (*region.shape, *inner), None, row[piece_table.OFFSET]
    there = found.dtype, found.shape, found.chunks, found.id.get_offset()
    if there != expected:
        raise ConfigError(f"dataset {name} is not {region} of {show(tensor.path)}")


def _fill(file: h5py.File, manifest: Manifest, reader: Reader) -> None:
    dtypes = {}
    places, datasets = Places(manifest), _datasets(manifest)
    bounds = np.searchsorted(manifest.rows[:, piece_table.TENSOR], range(len(manifest.tensors) + 1))
    for number, tensor in enumerate(manifest.tensors):
        name = plain_file.name_of(tensor.path)
        dtype, inner = hdf5_layout.face(tensor.dtype)
        if inner:
            dtypes[name] = str(dtype_of(tensor.dtype))
        if not tensor.shape or not tensor.nbytes:  # HDF5 has no virtual scalars
            array = np.empty(tensor.shape, dtype_of(tensor.dtype))
            reader.read([*places.wants(number, whole(tensor.shape), array)])
            array = array.reshape(-1).view(dtype).reshape((*tensor.shape, *inner))
            file.create_dataset(name, data=array)
        else:
            held = range(*bounds[number : number + 2].tolist())
            parts = [(datasets[place], manifest.rows[place].tolist()) for place in held]
            file.create_virtual_dataset(name, _mapped(manifest, tensor, parts, dtype, inner))
    extras = {show(path): to_json(value, path) for path, value in manifest.extras}
    plain_file.put_extras(file, plain_file.extras_text(extras, dtypes))


def _mapped(manifest: Manifest, tensor: Fact, parts: list, dtype: np.dtype, inner: tuple):
    """Return the layout of a tensor: each box of each piece from its shard, beside the index."""
    layout = h5py.VirtualLayout((*tensor.shape, *inner), dtype)
    for dataset, row in parts:
        region = piece_table.region_of(row, len(tensor.shape))
        name, shape = manifest.files[row[piece_table.FILE]].name, (*region.shape, *inner)
        for position, box in boxes_of(region, tensor.shape):
            source = h5py.VirtualSource(name, str(dataset), shape, dtype)
            to = tuple(slice(at, at + n) for at, n in zip(box.start, box.extent, strict=True))
            flat = isinstance(region, Flat)
            layout[to] = source[position : position + box.size] if flat else source
    return layout
