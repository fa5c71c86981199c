"""Read environment variables: settings of the user, of MPI and of `mpidist launch`.

`mpidist launch` starts the program of a job again after a failure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from .claims import claimed_size

#: The first letters of the names of variables that change how MPI sends messages.
_MPI_SETTINGS = (
    "OMPI_MCA_coll", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mtl", "OMPI_MCA_smsc",
    "OMPI_MCA_mpi_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "MV2_", "UCX_", "FI_",
)  # fmt: skip


#: Variables that `mpidist launch` sets for its ranks. An attempt is one start of the job. The
#: variables name the folder of this attempt, a folder for copies of the state in the memory of each
#: host, and the folder of the earlier attempt whose run this attempt takes over.
ATTEMPT_FOLDER, MEMORY_FOLDER = "MPIDIST_ATTEMPT_FOLDER", "MPIDIST_MEMORY_FOLDER"
ATTEMPT_BEFORE = "MPIDIST_ATTEMPT_BEFORE"


def attempt_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of this attempt (start of the program by `mpidist launch`).

    The result is None if `mpidist launch` has not started this process.
    """
    return Path(environ[ATTEMPT_FOLDER]) if ATTEMPT_FOLDER in environ else None


def attempt_before(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the attempt (start of the program) that this attempt replaces, or None.

    When a job gets more ranks, for example by `mpidist grow`, the program is started again while
    its earlier start still trains. Then the new start takes over the training run.
    """
    return Path(environ[ATTEMPT_BEFORE]) if ATTEMPT_BEFORE in environ else None


def job_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the job that `mpidist launch` has started.

    The result is None if `mpidist launch` has not started this process.
    """
    return Path(environ[ATTEMPT_FOLDER]).parent if ATTEMPT_FOLDER in environ else None


def memory_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder in /dev/shm for copies of the training state, or None.

    The result is None if `mpidist launch` has not started this process.
    """
    return Path(environ[MEMORY_FOLDER]) if MEMORY_FOLDER in environ else None


#: The oldest Open MPI whose ranks can continue after a rank has died.
WITH_ULFM = 5, 0, 11

#: What to do if a job cannot survive the death of a rank; the end of error texts.
_CURE = "use mpidist launch, which starts the job again from the newest checkpoint"


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder that stores the selected collective algorithms for later runs.

    The result is None with ``MPIDIST_SELECTION_CACHE=0``, or if this user has no such folder.
    """
    return None if environ.get("MPIDIST_SELECTION_CACHE") == "0" else user_cache(environ)


def user_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for measurements that later runs of this user can use, or None.

    The folder is ``$XDG_CACHE_HOME/mpidist``, by default ``~/.cache/mpidist``.
    """
    base, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if Path(base).is_absolute():  # the XDG specification says that other values are ignored
        return Path(base) / "mpidist"
    return Path(home) / ".cache" / "mpidist" if Path(home).is_absolute() else None


def mpi_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that tune MPI itself."""
    return {k: environ[k] for k in sorted(environ) if k.startswith(_MPI_SETTINGS)}


def has_ulfm(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the ranks of this job can go on after the death of a rank (ULFM)."""
    return environ.get("OMPI_MCA_mpi_ft_enable") == "1"


def may_have_ulfm(version: str) -> bool:
    """Return whether the MPI library or launcher `version` can go on after a death (ULFM)."""
    found = re.search(r"\bOpen MPI\)? v?(\d+)\.(\d+)\.(\d+)", version)
    return found is not None and tuple(map(int, found.groups())) >= WITH_ULFM


def why_not_elastic(library: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return why a job with this MPI library and environment cannot survive a death, or ""."""
    name = library.splitlines()[0].split(",")[0].strip()
    if not may_have_ulfm(name):
        needed = ".".join(map(str, WITH_ULFM))
        return f"md.elastic needs Open MPI {needed} or newer, and {name} is not: {_CURE}"
    claim = claimed_size(environ)
    if claim and claim.launcher == "srun":
        return f"md.elastic: srun ends the job when a rank dies; start it with mpirun, or {_CURE}"
    if not has_ulfm(environ):
        return f"md.elastic: start the job with mpirun --with-ft ulfm, or {_CURE}"
    return ""


#: Variables with the number of ranks on this host and in the job: Open MPI, Hydra and srun.
_ONE_HOST = (
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
)


def is_on_one_host(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher says that all ranks of the job are on one host."""
    for here, everywhere in _ONE_HOST:
        if here in environ:  # Slurm's variables may belong to the batch script that calls mpirun
            return environ[here] == environ.get(everywhere)
    return False
