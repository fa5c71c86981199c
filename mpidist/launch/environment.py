"""Environment variables: the tuning of MPI, and the folders that runs share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

#: The first letters of the names of variables that change how MPI sends messages.
_MPI_SETTINGS = (
    "OMPI_MCA_coll", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_smsc",
    "OMPI_MCA_mpi_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "MV2_", "UCX_", "FI_",
)  # fmt: skip


#: `mpidist launch` passes these to its ranks: the folder of this attempt, and a folder for copies
#: of the state in the memory of each host.
ATTEMPT_FOLDER, MEMORY_FOLDER = "MPIDIST_ATTEMPT_FOLDER", "MPIDIST_MEMORY_FOLDER"


def job_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder that all attempts of `mpidist launch` share; None without this command."""
    return Path(environ[ATTEMPT_FOLDER]).parent if ATTEMPT_FOLDER in environ else None


def memory_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder in /dev/shm for copies of the state; None without `mpidist launch`."""
    return Path(environ[MEMORY_FOLDER]) if MEMORY_FOLDER in environ else None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder that stores the selected collective algorithms for later runs, or None.

    The folder is ``$XDG_CACHE_HOME/mpidist``, by default ``~/.cache/mpidist``. With
    ``MPIDIST_SELECTION_CACHE=0`` the result is None.
    """
    if environ.get("MPIDIST_SELECTION_CACHE", "1") == "0":
        return None
    base, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if Path(base).is_absolute():  # the XDG specification says that other values are ignored
        return Path(base) / "mpidist"
    return Path(home) / ".cache" / "mpidist" if Path(home).is_absolute() else None


def mpi_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that tune MPI itself."""
    return {k: environ[k] for k in sorted(environ) if k.startswith(_MPI_SETTINGS)}


def has_ulfm(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the job was started with ULFM, so that its ranks can survive a dead rank."""
    return environ.get("OMPI_MCA_mpi_ft_enable") == "1"
