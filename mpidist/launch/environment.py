"""Environment variables that say how MPI is tuned, and where choices are remembered."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: Beginnings of the names of variables that change what MPI does with a message.
_MPI_SETTINGS = (
    "OMPI_MCA_coll", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_smsc",
    "OMPI_MCA_mpi_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "MV2_", "UCX_", "FI_",
)  # fmt: skip


#: Names the folder of this attempt to the ranks that `mpidist launch` starts.
ATTEMPT_FOLDER = "MPIDIST_ATTEMPT_FOLDER"


def job_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where all attempts of `mpidist launch` at this job find what they keep; None: none."""
    return Path(environ[ATTEMPT_FOLDER]).parent if ATTEMPT_FOLDER in environ else None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where choices are remembered between runs; None: nowhere.

    ``$XDG_CACHE_HOME/mpidist``, by default ``~/.cache/mpidist``. ``MPIDIST_SELECTION_CACHE=0``
    switches it off.
    """
    if environ.get("MPIDIST_SELECTION_CACHE", "1") == "0":
        return None
    base, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if Path(base).is_absolute():  # the XDG specification: anything else is to be ignored
        return Path(base) / "mpidist"
    return Path(home) / ".cache" / "mpidist" if Path(home).is_absolute() else None


def mpi_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables by which somebody has tuned MPI itself."""
    return {k: environ[k] for k in sorted(environ) if k.startswith(_MPI_SETTINGS)}
