"""MPI is initialised where the launch makes sense: else one line says what is wrong, and the cure.

What the launcher says is looked at before MPI_Init (`claims`); afterwards the ranks compare their
versions: hosts that do not run the same software are refused before anything is computed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from .. import events
from ..errors import ConfigError
from .claims import check_launcher, check_singletons, mpi_name, network_for

#: Differences that end the job, and those that are only worth a note.
_MUST_AGREE = ("mpidist", "Python", "numpy", "mpi4py", "MPI", "h5py", "HDF5", "cupy")
_SHOULD_AGREE = ("CUDA driver", "CPU")

#: Vector units that decide which kernels NumPy picks; other flags change nothing we compute.
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "asimd", "sve")


def versions_fingerprint() -> dict[str, str]:
    """Return the versions of everything that must be the same on all ranks.

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
    """Return one line that names what differs, on which hosts, and the cure; None if equal.

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
        This rank's `versions_fingerprint`, where the caller wants to add to it.
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
    mine = json.dumps({**(facts or versions_fingerprint()), "problem": problem}).encode()
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
    """Check the launcher, then initialise MPI, and return mpi4py's ``MPI``.

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
