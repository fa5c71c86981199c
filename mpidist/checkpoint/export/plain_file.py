"""Write a state as one plain file that others read: no shards, no manifest.

In ``.h5`` the keys are groups; in ``.npz`` and ``.safetensors`` names are joined by ``/``. Extras
are JSON in the entry ``__extras__``, in a safetensors file of its metadata. Types that HDF5 and
NumPy have no name for (bfloat16) are written as unsigned integers of the same bits, which the
extras say; safetensors has names for them, and takes no others.
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
    """Return the name under which a file is written until it is complete."""
    return out.with_name(f".{out.name}-{secrets.token_hex(4)}{out.suffix}")


def export_step(path, out, *, step: int | None = None, history: int | None = None) -> int:
    """Write one step of the store at `path` to the file `out`, as `export` does.

    In one process, without MPI.
    """
    out = Path(os.fspath(out))
    check(out)
    step, state = load.load_step(path, step, history)
    write(state, out)
    return step


def check(out: Path) -> None:
    """Raise ConfigError unless `out` can be written: suffix, folder, nothing there yet."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{out}: expected a name that ends in one of {', '.join(SUFFIXES)}")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder")
    if out.exists():
        raise ConfigError(f"{out} exists; remove it or choose another name")


def write(state: Mapping, out: Path) -> None:
    """Write `state` to `out`. Under its name stands a complete file or none."""
    check(out)
    arrays, extras = _split(state)
    partial = partial_of(out)
    try:
        _WRITERS[out.suffix](arrays, extras, partial)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)


def _split(state: Mapping) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Return the arrays by name, and everything else."""
    arrays: dict[str, np.ndarray] = {}
    extras: dict[str, object] = {}
    for path, leaf in leaves(state):
        if is_array(leaf):
            arrays[name_of(path)] = np.asarray(leaf)
        else:
            extras[show(path)] = to_json(leaf, path)
    return arrays, extras


def name_of(path: Keys) -> str:
    """Return the name of an array in a file: its keys joined by ``/``."""
    if path[0] == EXTRAS:
        raise ConfigError(f"an array is at {show(path)}, but {EXTRAS} is the name of the extras")
    return "/".join(_escaped(key) for key in path)


def _escaped(key: str) -> str:
    """Return a key that is one name, not a path: keys become groups, and members of a zip file."""
    if not key:
        return "%"
    key = key.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return key.replace(".", "%2E") if key in (".", "..") else key


def extras_text(extras: Mapping[str, object], dtypes: Mapping[str, str]) -> str:
    """Return what stands in `EXTRAS`: values, and dtypes that the file cannot say."""
    return json.dumps({"values": extras, "dtypes": dtypes})


def named(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays with a dtype that HDF5 and NumPy can name, and what the others were."""
    result, dtypes = {}, {}
    for name, array in arrays.items():
        if array.dtype.kind in "mM" or dtype_name(array.dtype) != array.dtype.str:
            dtypes[name] = str(array.dtype)
            bits = {1: "u1", 2: "<u2", 4: "<u4", 8: "<i8"}[array.dtype.itemsize]
            array = np.ascontiguousarray(array).view(bits).reshape(array.shape)
        result[name] = array
    return result, dtypes


def _write_h5(arrays: Mapping[str, np.ndarray], extras: Mapping, path: Path) -> None:
    values, dtypes = named(arrays)
    with h5py.File(path, "x") as file:
        for name, array in values.items():
            if array.dtype.kind == "U":
                array = np.char.encode(array, "utf-8")
            file.create_dataset(name, data=array)
        put_extras(file, extras_text(extras, dtypes))


def put_extras(file: h5py.File, text: str) -> None:
    """Add the extras to an HDF5 file. An attribute may not exceed 64 KiB; a data set may."""
    file.create_dataset(EXTRAS, data=np.frombuffer(text.encode(), "S1"))


def _write_npz(arrays: Mapping[str, np.ndarray], extras: Mapping, path: Path) -> None:
    values, dtypes = named(arrays)
    text = np.array(extras_text(extras, dtypes))
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for name, array in {**values, EXTRAS: text}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _write_safetensors(arrays: Mapping[str, np.ndarray], extras: Mapping, path: Path) -> None:
    safetensors.write(arrays, {EXTRAS: extras_text(extras, {})}, path)


_WRITERS = {
    ".h5": _write_h5,
    ".hdf5": _write_h5,
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
}
SUFFIXES = tuple(_WRITERS)
