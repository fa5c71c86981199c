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

from mpidist import strangers
from mpidist.checkpoint import export, files, hdf5, load, shard, steps
from mpidist.checkpoint.arguments import path_of
from mpidist.checkpoint.layout import dtype_of, show, to_json
from mpidist.checkpoint.manifest import Damaged, Manifest, Piece, Tensor
from mpidist.checkpoint.reader import Reader
from mpidist.checkpoint.regions import Flat, boxes_of, whole
from mpidist.checkpoint.steps import Entry
from mpidist.checkpoint.wants import wants_of
from mpidist.errors import ConfigError

NAME = "index.h5"


def index(path, step: int | None = None, history: int | None = None) -> tuple[int, Path]:
    """Write the index of a step, by default the newest good one. Local.

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
    manifest = steps.parse(steps.read_manifest(path, entry), entry)
    with files.folder(path) as root, files.folder(entry.name, root) as folder:
        _compare(folder, manifest)
        # Made in memory, so that it is written as everything else in a store is.
        memory = io.BytesIO()
        with h5py.File(memory, "w") as file:
            _fill(file, manifest, Reader(folder, manifest))
        partial = f"index-{secrets.token_hex(4)}.part"
        try:
            shard.put(folder, partial, memory.getvalue())
            files.rename(partial, NAME, folder)
        finally:
            files.remove_file(partial, folder)
        files.sync(folder)


def _compare(folder: int, manifest: Manifest) -> None:
    """Raise Damaged unless HDF5 finds in the shards what the manifest says, where it says it."""
    held: list[list[tuple[Tensor, Piece]]] = [[] for _ in manifest.files]
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            if piece.region.size:
                held[piece.file].append((tensor, piece))
    for listed, pieces in zip(manifest.files, held, strict=True):
        try:
            with strangers.opened(listed.name, folder) as file:
                for tensor, piece in pieces:
                    _compare_one(strangers.dataset(file, piece.dataset), tensor, piece)
        except ConfigError as error:
            raise Damaged(f"{listed.name}: {error}") from error


def _compare_one(found: h5py.Dataset, tensor: Tensor, piece: Piece) -> None:
    dtype, inner = hdf5.face(tensor.dtype)
    expected = dtype, (*piece.region.shape, *inner), None, piece.offset
    there = found.dtype, found.shape, found.chunks, found.id.get_offset()
    if there != expected:
        raise ConfigError(f"dataset {piece.dataset} is not {piece.region} of {show(tensor.path)}")


def _fill(file: h5py.File, manifest: Manifest, reader: Reader) -> None:
    dtypes = {}
    for tensor in manifest.tensors:
        name = export.name_of(tensor.path)
        dtype, inner = hdf5.face(tensor.dtype)
        if inner:
            dtypes[name] = str(dtype_of(tensor.dtype))
        if not tensor.shape or not tensor.nbytes:  # HDF5 has no virtual scalars
            array = np.empty(tensor.shape, dtype_of(tensor.dtype))
            region = whole(tensor.shape)
            reader.read([*wants_of(tensor, region, array.itemsize, array, manifest.block)])
            array = array.reshape(-1).view(dtype).reshape((*tensor.shape, *inner))
            file.create_dataset(name, data=array)
        else:
            file.create_virtual_dataset(name, _mapped(manifest, tensor, dtype, inner))
    extras = {show(path): to_json(value, path) for path, value in manifest.extras}
    export.put_extras(file, export.extras_text(extras, dtypes))


def _mapped(manifest: Manifest, tensor: Tensor, dtype: np.dtype, inner: tuple):
    """Return the layout of a tensor: each box of each piece from its shard, beside the index."""
    layout = h5py.VirtualLayout((*tensor.shape, *inner), dtype)
    for piece in tensor.pieces:
        name, shape = manifest.files[piece.file].name, (*piece.region.shape, *inner)
        for position, box in boxes_of(piece.region, tensor.shape):
            source = h5py.VirtualSource(name, piece.dataset, shape, dtype)
            to = tuple(slice(at, at + n) for at, n in zip(box.start, box.extent, strict=True))
            flat = isinstance(piece.region, Flat)
            layout[to] = source[position : position + box.size] if flat else source
    return layout
