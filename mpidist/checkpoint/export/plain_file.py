"""Write a state as one ordinary file for other programs, instead of shards and a manifest.

In an ``.h5`` file, each nested dict of the state is a group. In ``.npz`` and ``.safetensors``
files, the name of an array is its dict keys joined by ``/``. The values that are not arrays are
JSON in the entry ``__extras__``. In ``.h5`` and ``.npz`` files, arrays of a dtype that HDF5 or
NumPy lacks, such as bfloat16, are written as integers with the same bits, and ``__extras__`` names
the dtype.
"""

from __future__ import annotations

import json
import os
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from ...errors import ConfigError
from .. import load
from ..format.state import Path as Keys
from ..format.state import dtype_name, is_array, leaves, show, to_json
from . import safetensors

EXTRAS = "__extras__"


def partial_of(out: Path) -> Path:
    """Return a random temporary name for the file `out`. Raises ConfigError."""
    check(out)
    return out.with_name(f".{out.name}-{secrets.token_hex(4)}{out.suffix}")


def export_step(path, out, *, step: int | None = None, history: int | None = None) -> int:
    """Write one checkpoint of the store at `path` to the file `out` in one process, without MPI.

    If `step` is None, the newest good step is written. If `history` is None, the step belongs to
    the newest history (series of saved steps). Returns the number of the step.
    """
    out = Path(os.fspath(out))
    check(out)
    step, state = load.load_step(path, step, history)
    write(state, out)
    return step


def check(out: Path) -> None:
    """Raise ConfigError unless `out` can be a new file with a suffix in `SUFFIXES`."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{out}: expected a name that ends in one of {', '.join(SUFFIXES)}")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder")
    if out.exists():
        raise ConfigError(f"{out} exists; remove it or choose another name")


def write(state: Mapping, out: Path) -> None:
    """Write `state` to the file `out`, which appears only when it is complete."""
    partial = partial_of(out)
    arrays: dict[str, np.ndarray] = {}
    extras: dict[str, object] = {}
    for path, leaf in leaves(state):
        if is_array(leaf):
            arrays[name_of(path)] = np.asarray(leaf)
        else:
            extras[show(path)] = to_json(leaf, path)
    try:
        _WRITERS[out.suffix](arrays, extras, partial)
        put_in_place(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def put_in_place(partial: Path, out: Path) -> None:
    """Give the complete file `partial` the name `out`, as soon as it is on the disk."""
    # Without the wait, `out` might be empty after a power failure.
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(out)


def name_of(path: Keys) -> str:
    """Return the name of an array in a file: its keys joined by ``/``."""
    if path[0] == EXTRAS:
        raise ConfigError(f"an array is at {show(path)}, but {EXTRAS} is the name of the extras")
    return "/".join(_escaped(key) for key in path)


def _escaped(key: str) -> str:
    """Return a dict key as one part of an HDF5 path, with ``/`` and other special parts escaped."""
    key = key.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return {"": "%", ".": "%2E", "..": "%2E%2E"}.get(key, key)


def extras_text(extras: Mapping[str, object], dtypes: Mapping[str, str]) -> str:
    """Return the JSON text for the entry ``__extras__`` of a file.

    `extras` are the values that are not arrays. `dtypes` has the original dtypes of the arrays that
    were converted to integers.
    """
    return json.dumps({"values": extras, "dtypes": dtypes})


def named(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Convert arrays with dtypes that HDF5 or NumPy lacks to integers with the same bits.

    Returns two dicts whose keys are names of arrays: all arrays, and the original dtypes of the
    converted arrays.
    """
    result, dtypes = {}, {}
    for name, array in arrays.items():
        if array.dtype.kind in "mM" or dtype_name(array.dtype) != array.dtype.str:
            dtypes[name] = str(array.dtype)
            bits = {1: "u1", 2: "<u2", 4: "<u4", 8: "<i8"}[array.dtype.itemsize]
            array = np.ascontiguousarray(array).view(bits).reshape(array.shape)
        result[name] = array
    return result, dtypes


def _hdf5(arrays: Mapping[str, np.ndarray], extras: Mapping, path: Path) -> None:
    values, dtypes = named(arrays)
    with h5py.File(path, "x") as file:
        for name, array in values.items():
            if array.dtype.kind == "U":
                array = np.char.encode(array, "utf-8")
            file.create_dataset(name, data=array)
        put_extras(file, extras, dtypes)


def put_extras(file: h5py.File, extras: Mapping[str, object], dtypes: Mapping[str, str]) -> None:
    """Add the extras (the values that are not arrays) to an HDF5 file, as a data set."""
    text = extras_text(extras, dtypes).encode()
    # Not an attribute, which could have 64 KiB at most.
    file.create_dataset(EXTRAS, data=np.frombuffer(text, "S1"))


def _npz(arrays: Mapping[str, np.ndarray], extras: Mapping, path: Path) -> None:
    values, dtypes = named(arrays)
    text = np.array(extras_text(extras, dtypes))
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for name, array in {**values, EXTRAS: text}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _safetensors(arrays: Mapping[str, np.ndarray], extras: Mapping, path: Path) -> None:
    safetensors.write(arrays, {EXTRAS: extras_text(extras, {})}, path)


_WRITERS = {".h5": _hdf5, ".hdf5": _hdf5, ".npz": _npz, ".safetensors": _safetensors}
SUFFIXES = tuple(_WRITERS)
