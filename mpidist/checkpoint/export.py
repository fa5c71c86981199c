"""Write a state as one plain file that any HDF5 or NumPy program reads: no shards, no manifest.

In ``.h5`` the keys are groups, in ``.npz`` names are joined by ``/``; the extras are JSON in the
entry ``__extras__``. Types that neither format has
a name for (bfloat16) are written as unsigned integers of the same bits, which the extras say.
"""

from __future__ import annotations

import json
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from mpidist.checkpoint.layout import dtype_name, is_array, leaves, show, to_json
from mpidist.errors import ConfigError

SUFFIXES = (".h5", ".hdf5", ".npz")
EXTRAS = "__extras__"


def check(out: Path) -> None:
    """Raise ConfigError unless `out` can be written: suffix, folder, nothing there yet. Local."""
    if out.suffix not in SUFFIXES:
        raise ConfigError(f"{out}: expected a name that ends in one of {', '.join(SUFFIXES)}")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder")
    if out.exists():
        raise ConfigError(f"{out} exists; remove it or choose another name")


def write(state: Mapping, out: Path) -> None:
    """Write `state` to `out`. Local. Under its name stands a complete file or none."""
    check(out)
    arrays, extras = _split(state)
    partial = out.with_name(f".{out.name}-{secrets.token_hex(4)}{out.suffix}")
    try:
        (_write_npz if out.suffix == ".npz" else _write_h5)(arrays, extras, partial)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)


def _split(state: Mapping) -> tuple[dict[str, np.ndarray], str]:
    """Return the arrays by name, and the JSON of everything else."""
    arrays: dict[str, np.ndarray] = {}
    extras: dict[str, object] = {}
    dtypes: dict[str, str] = {}
    for path, leaf in leaves(state):
        name = "/".join(_escaped(key) for key in path)
        if not is_array(leaf):
            extras[show(path)] = to_json(leaf, path)
            continue
        array = np.asarray(leaf)
        if array.dtype.kind in "mM" or dtype_name(array.dtype) != array.dtype.str:
            dtypes[name] = str(array.dtype)
            bits = {1: "u1", 2: "<u2", 4: "<u4", 8: "<i8"}[array.dtype.itemsize]
            array = np.ascontiguousarray(array).view(bits).reshape(array.shape)
        if name == EXTRAS:
            raise ConfigError(f"an array is named {EXTRAS}, which is the name of the extras")
        arrays[name] = array
    return arrays, json.dumps({"values": extras, "dtypes": dtypes})


def _escaped(key: str) -> str:
    """Return a key that is one name, not a path: keys become groups, and members of a zip file."""
    if not key:
        return "%"
    key = key.replace("%", "%25").replace("/", "%2F")
    return key.replace(".", "%2E") if key in (".", "..") else key


def _write_h5(arrays: Mapping[str, np.ndarray], extras: str, path: Path) -> None:
    with h5py.File(path, "x") as file:
        for name, array in arrays.items():
            if array.dtype.kind == "U":
                array = np.char.encode(array, "utf-8")
            file.create_dataset(name, data=array)
        # An attribute may not exceed 64 KiB; a data set may.
        file.create_dataset(EXTRAS, data=np.frombuffer(extras.encode(), "S1"))


def _write_npz(arrays: Mapping[str, np.ndarray], extras: str, path: Path) -> None:
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for name, array in {**arrays, EXTRAS: np.array(extras)}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
