"""``export``: one step of a store as one file that others read, called by all ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import h5py

from ... import events
from ..arguments import path_of, wanted
from ..control import by_rank_0, same_on_all
from .parallel_hdf5 import export_by_all
from .plain_file import check, export_step, partial_of


def export(comm, path, out, *, step: int | None = None) -> int:
    """Write one step of the store at `path` to the file `out` and return its number.

    Collective over `comm`: what goes wrong on one rank is raised on all. An HDF5 file is written
    by all ranks where h5py was built with parallel HDF5; everything else by rank 0 alone.

    Parameters
    ----------
    out : path-like
        A new file; its suffix is one of `plain_file.SUFFIXES`.
    step : int, optional
        None takes the newest good step.
    """

    def check_arguments() -> dict:
        folder, target = path_of("path", path), path_of("out", out)
        return {"path": folder, "out": target, "step": wanted(step)}

    given = same_on_all(comm, "export", check_arguments)
    path, out, step = given["path"], Path(given["out"]), given["step"]
    if comm.size == 1 or out.suffix not in (".h5", ".hdf5"):
        return _by_rank_0(comm, path, out, step)
    if not h5py.get_config().mpi:
        if comm.rank == 0 and events.VERBOSITY:
            text = f"mpidist: note: h5py here has no parallel HDF5: rank 0 alone writes {out}"
            print(text, file=sys.stderr, flush=True)
        return _by_rank_0(comm, path, out, step)

    def begin() -> Path:
        check(out)
        return partial_of(out)

    partial = by_rank_0(comm, f"export to {out}", begin)
    try:
        number = export_by_all(comm, os.fspath(path), partial, step)
        by_rank_0(comm, f"export to {out}", lambda: partial.rename(out) and None)
    finally:
        if comm.rank == 0:
            partial.unlink(missing_ok=True)
    return number


def _by_rank_0(comm, path, out: Path, step: int | None) -> int:
    return by_rank_0(comm, f"export to {out}", lambda: export_step(path, out, step=step))
