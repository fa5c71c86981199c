"""The function `export`: all ranks together write one step of a store as one ordinary file."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py

from ... import events
from ..arguments import checked_path, checked_step
from ..control import by_rank_0, same_on_all
from .parallel_hdf5 import export_by_all
from .plain_file import export_step, partial_of, put_in_place


def export(comm, path, out, *, step: int | None = None) -> int:
    """Write one checkpoint of the store at `path` to the new file `out`; return its step number.

    Collective over `comm`. All ranks together write an HDF5 file if h5py was built with parallel
    HDF5. Otherwise rank 0 alone writes the file. An error on one rank is raised on all ranks, and
    no file is left.

    Parameters
    ----------
    out : path-like
        A new file; its suffix is .h5, .hdf5, .npz or .safetensors.
    step : int, optional
        The number of the step to export. If it is None, the newest good step is exported.
    """

    def check_arguments() -> dict:
        folder, target = checked_path("path", path), checked_path("out", out)
        return {"path": folder, "out": target, "step": checked_step(step)}

    given = same_on_all(comm, "export", check_arguments)
    path, out, step = given["path"], Path(given["out"]), given["step"]
    doing = f"export to {out}"
    by_all = comm.size > 1 and out.suffix in (".h5", ".hdf5")
    if by_all and not h5py.get_config().mpi and comm.rank == 0 and events.VERBOSITY:
        text = f"mpidist: note: h5py here has no parallel HDF5: rank 0 alone writes {out}"
        print(text, file=sys.stderr, flush=True)
    if not by_all or not h5py.get_config().mpi:
        return by_rank_0(comm, doing, lambda: export_step(path, out, step=step))
    partial = by_rank_0(comm, doing, lambda: partial_of(out))
    try:
        number = export_by_all(comm, path, partial, step)
        by_rank_0(comm, doing, lambda: put_in_place(partial, out))
    finally:
        if comm.rank == 0:
            partial.unlink(missing_ok=True)
    return number
