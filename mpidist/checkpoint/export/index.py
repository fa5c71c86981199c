"""Write ``index.h5`` into the folder of a step: an HDF5 file that shows each array whole.

The shard files of a step have the arrays in parts. In the index, each array is one virtual dataset,
which refers to these parts.

    index.h5:  parameters/w (12, 5)  =  shard-00000.h5:/0   elements  0 to 23, as three boxes
                                        shard-00001.h5:/0   elements 23 to 60, as two

    h5py.File("run/checkpoints/step-000000001200/index.h5")["parameters/w"][:]

The index is for other programs. A restart never uses it, because HDF5 returns zeros and no error if
a shard is missing.
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
from ..arguments import checked_path
from ..format import hdf5_layout, piece_table
from ..format.manifest import Damaged, Manifest
from ..format.regions import Flat, boxes_of, whole
from ..format.state import Fact, named_dtype, show, to_json
from ..read.read_plan import Places
from ..read.reader import Reader
from ..storage import files, steps
from ..storage.steps import Entry
from ..write import shard_writer
from . import plain_file

NAME = "index.h5"


def index(path, step: int | None = None, history: int | None = None) -> tuple[int, Path]:
    """Write the index of a step: an HDF5 file in which other programs find each array whole.

    The index refers to the parts of the arrays in the step's own files. By default, the step is the
    newest good one. Returns the step and the path of the index. An existing index is replaced.
    Raises the same errors as `mpidist.load`.
    """
    path = checked_path("path", path)
    entry, _ = load.newest_good(path, step, history, partial(_write, path))
    return entry.step, Path(path) / entry.name / NAME


def _write(path: str, entry: Entry) -> None:
    damages, _ = load.damages(path, entry)
    if damages:
        raise Damaged("; ".join(damages))
    manifest = steps.read_manifest(path, entry)
    with files.folder(path) as root, files.folder(entry.name, root) as folder:
        _compare(folder, manifest)
        # The index is made in memory, so that it is written by the functions of `files`, like all
        # files of a store.
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
    """Raise Damaged unless HDF5 finds each dataset where the manifest (list of parts) says."""
    datasets = _datasets(manifest)
    for number, listed in enumerate(manifest.files):
        try:
            with untrusted_hdf5.open_untrusted(listed.name, folder) as file:
                for place in np.flatnonzero(manifest.rows[:, piece_table.FILE] == number).tolist():
                    row, name = manifest.rows[place].tolist(), str(datasets[place])
                    tensor = manifest.tensors[row[piece_table.TENSOR]]
                    _compare_one(untrusted_hdf5.checked_dataset(file, name), name, tensor, row)
        except ConfigError as error:
            raise Damaged(f"{listed.name}: {error}") from error


def _datasets(manifest: Manifest) -> list[int]:
    """Return, for each stored part of an array, the number of its dataset in its shard file."""
    file, offset = manifest.rows[:, piece_table.FILE], manifest.rows[:, piece_table.OFFSET]
    order = np.lexsort((offset, file))
    return (np.argsort(order) - np.searchsorted(file[order], file)).tolist()


def _compare_one(found: h5py.Dataset, name: str, tensor: Fact, row: list[int]) -> None:
    dtype, inner = hdf5_layout.face(tensor.dtype)
    region = piece_table.region_of_row(row, len(tensor.shape))
    expected = dtype, (*region.shape, *inner), None, row[piece_table.OFFSET]
    there = found.dtype, found.shape, found.chunks, found.id.get_offset()
    if there != expected:
        raise ConfigError(f"dataset {name} is not {region} of {show(tensor.path)}")


def _fill(file: h5py.File, manifest: Manifest, reader: Reader) -> None:
    """Write the datasets of all tensors, and the values that are not arrays, to the open `file`."""
    dtypes = {}
    places, datasets = Places(manifest), _datasets(manifest)
    bounds = np.searchsorted(manifest.rows[:, piece_table.TENSOR], range(len(manifest.tensors) + 1))
    for number, tensor in enumerate(manifest.tensors):
        name = plain_file.name_of(tensor.path)
        dtype, inner = hdf5_layout.face(tensor.dtype)
        if inner:
            dtypes[name] = str(named_dtype(tensor.dtype))
        if not tensor.shape or not tensor.nbytes:  # HDF5 has no virtual scalars
            array = np.empty(tensor.shape, named_dtype(tensor.dtype))
            reader.read([*places.wants(number, whole(tensor.shape), array)])
            file.create_dataset(name, (*tensor.shape, *inner), data=array.reshape(-1).view(dtype))
        else:
            held = range(*bounds[number : number + 2].tolist())
            parts = [(datasets[place], manifest.rows[place].tolist()) for place in held]
            file.create_virtual_dataset(name, _mapped(manifest, tensor, parts, dtype, inner))
    extras = {show(path): to_json(value, path) for path, value in manifest.extras}
    plain_file.put_extras(file, extras, dtypes)


def _mapped(manifest: Manifest, tensor: Fact, parts: list, dtype: np.dtype, inner: tuple):
    """Return the h5py layout of a tensor's virtual dataset."""
    layout = h5py.VirtualLayout((*tensor.shape, *inner), dtype)
    for dataset, row in parts:
        region = piece_table.region_of_row(row, len(tensor.shape))
        name, shape = manifest.files[row[piece_table.FILE]].name, (*region.shape, *inner)
        for position, box in boxes_of(region, tensor.shape):
            source = h5py.VirtualSource(name, str(dataset), shape, dtype)
            to = tuple(slice(at, at + n) for at, n in zip(box.start, box.extent, strict=True))
            part = slice(position, position + box.size)
            layout[to] = source[part] if isinstance(region, Flat) else source
    return layout
