"""Find out from environment variables which launcher started this job, and check the launcher.

The functions take the environment variables as an argument. There are two common errors. First, the
launcher and the MPI library may use different versions of PMI (the interface between launcher and
library), so that n programs of one rank each start. Second, the ``mpirun`` of one MPI may start
programs with the library of another MPI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import ConfigError

#: Makes MPI_Init of Open MPI 5 leave out a component that ranks on one host never use, and that
#: sleeps for a second there (`network_for`).
WITHOUT_OFI = {"OMPI_MCA_btl": "^ofi"}

#: The variable with which srun --mpi=pmix makes each barrier of the ranks' start a ring. By default
#: a barrier without data is a tree, and Slurm's tree sometimes lets ranks go before all have come
#: (seen in Slurm 22.05). Open MPI then dies in MPI_Init of a rank that is still there.
WHOLE_BARRIERS = {"SLURM_PMIX_FENCE": "ring"}

#: Variables with the number of ranks, and the launcher that sets them. Slurm's variable comes last,
#: because under ``mpirun`` inside an allocation Slurm's variable has the number of helper processes
#: of ``mpirun``.
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
    """The launcher of this process, and the number of ranks that the launcher has started."""

    launcher: str
    size: int


def claimed_size(environ: Mapping[str, str]) -> Claim | None:
    """Return the launcher and its number of ranks, or None if there was no launcher."""
    for variable, launcher in _SIZES:
        value = environ.get(variable, "")
        if value.isdigit():
            # srun may also set PMI's variables. Only MPICH's own mpiexec sets HYDI_CONTROL_FD.
            from_srun = launcher.startswith("MPICH") and "HYDI_CONTROL_FD" not in environ
            if from_srun and "SLURM_STEP_NUM_TASKS" in environ:
                launcher = "srun"
            return Claim(launcher, int(value))
    return None


def rank_hint(environ: Mapping[str, str]) -> int:
    """Return the rank that the launcher gave this process, or 0. Works before MPI_Init."""
    for variable in _RANKS:
        if environ.get(variable, "").isdigit():
            return int(environ[variable])
    return 0


def srun_mpi(library: str) -> str:
    """Return the value of ``srun --mpi=`` for an MPI library, given its name or version text."""
    return "pmix" if mpi_name(library).startswith("Open MPI") else "pmi2"


def mpi_name(library: str) -> str:
    """Return the name and version of an MPI library, such as ``Open MPI 5.0.11``.

    `library` is the text of ``MPI.Get_library_version()``.
    """
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
    """Raise ConfigError if MPI_Init of the MPI `library` would abort under this launcher.

    Call this function before MPI_Init. An MPICH that is built for PMI 1 and 2 ends the process in
    MPI_Init if the launcher uses PMIx. The error text of MPICH names neither the cause nor the
    cure.
    """
    mpich = library.startswith("MPICH") and "pmix" not in library.lower()
    if mpich and "PMIX_RANK" in environ and "PMI_RANK" not in environ:
        claim = claimed_size(environ)
        raise _on_one_rank(environ, _wrong_launcher(claim or Claim("a PMIx launcher", 0), library))


def network_for(environ: Mapping[str, str], library: str) -> dict[str, str]:
    """Return environment variables that mend and speed up MPI_Init of the given MPI library.

    Open MPI 5 has a component for one-sided transfers over libfabric. If MPI_Init closes this
    component unused, the component sleeps for a second. If all ranks are on one host, they never
    use the component. The returned variables then exclude it, unless the user has chosen the
    components (``OMPI_MCA_btl``). This function is for the commands of mpidist under `mpirun`; for
    programs under `mpidist launch`, `supervisor.commands` excludes the component.

    If MPICH uses the network library UCX, it publishes the address of a rank in 4096 bytes,
    although the address has only some hundred bytes. MPICH sends the 4096 bytes to the launcher in
    nine requests, each with a value of up to 1022 digits. Slurm's pmi2 plugin reads only 1024 bytes
    of a request. A request also contains a name and a key, so its value is cut. It then depends on
    the contents of unused memory whether MPI_Init returns or waits for ever (Slurm's
    src/plugins/mpi/pmi2/pmi1.c, handle_pmi1_cmd; MPICH's ch4/netmod/ucx/ucx_init.c). The returned
    variables select libfabric, whose addresses are short, instead of UCX. If the user has chosen a
    network library, no variable is returned.

    libfabric has several providers (network drivers). On a TCP network, MPICH prefers the provider
    "sockets" to "tcp". With "sockets", about 3 of 100 starts wait for ever in MPI_Init on a busy
    machine, because all ranks wait for messages of the first collective operation (MPICH 5.0.2).
    The returned variables also exclude the provider "sockets", unless the user has chosen a
    provider.
    """
    sizes = environ.get("OMPI_COMM_WORLD_SIZE"), environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if library.startswith("Open MPI v5") and sizes[0] and sizes[0] == sizes[1]:
        return {} if "OMPI_MCA_btl" in environ else dict(WITHOUT_OFI)
    slurm = "PMI_FD" in environ and "SLURM_PROCID" in environ and "HYDI_CONTROL_FD" not in environ
    if slurm and "ch4:ucx,ofi" in library and "MPIR_CVAR_CH4_NETMOD" not in environ:
        provider = {} if "FI_PROVIDER" in environ else {"FI_PROVIDER": "^sockets"}
        return {"MPIR_CVAR_CH4_NETMOD": "ofi", **provider}
    return {}


def check_singletons(size: int, environ: Mapping[str, str], library: str) -> None:
    """Raise ConfigError if n programs of one rank each have started in place of one job.

    Raises
    ------
    ConfigError
        If MPI has one rank although the launcher has started more. Every process raises the error.
        On all processes except the first, the attribute ``quiet`` of the error is true, so that the
        text is printed only once.
    """
    claim = claimed_size(environ)
    if size == 1 and claim is not None and claim.size > 1:
        raise _on_one_rank(environ, _wrong_launcher(claim, library))


def _wrong_launcher(claim: Claim, library: str) -> str:
    name = mpi_name(library)
    family, extra = "MPICH", "openmpi"
    if name.startswith("Open MPI"):
        family, extra = "Open MPI", "mpich"
    started = f"{claim.launcher} started {claim.size or 'several'} ranks"
    seen = f"{started}, but this Python's MPI library is {name}, which sees 1 rank in each"
    if claim.launcher == "srun":
        other = "pmi2" if family == "Open MPI" else "pmix"
        return (
            f"{seen}: it has no connection to its launcher; use srun --mpi={srun_mpi(library)} "
            f"(--mpi={other} is for the other MPI, 'srun --mpi=list' shows what there is), "
            f"or {family}'s own mpirun inside the batch script"
        )
    return (
        f"{seen}; start it with the mpiexec of {family} (beside this Python, or from its module), "
        f"or install mpidist[{extra}] to go with this launcher"
    )


def _on_one_rank(environ: Mapping[str, str], message: str) -> ConfigError:
    error = ConfigError(message)
    error.quiet = rank_hint(environ) > 0
    return error
