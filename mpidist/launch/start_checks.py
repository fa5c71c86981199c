"""Checks at the start of a job: a wrong launch ends with a line with cause and cure.

Before MPI_Init, the launcher's environment variables are checked. After MPI_Init, the ranks compare
the versions of their software. If only CUDA drivers or CPUs differ, rank 0 prints a note; for other
differences the job ends before it computes anything.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from .. import __version__, events
from ..errors import ConfigError
from .claims import check_launcher, check_singletons, mpi_name, network_for

#: The versions whose difference ends the job, and the versions whose difference prints a note.
_MUST_AGREE = ("mpidist", "Python", "numpy", "mpi4py", "MPI", "h5py", "HDF5", "cupy")
_SHOULD_AGREE = ("CUDA driver", "CPU")

#: The CPU flags (vector instructions) that decide which kernels NumPy uses. Other flags do not
#: change results.
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "asimd", "sve")


def versions_fingerprint() -> dict[str, str]:
    """Return the host, the CPU and the software versions of this rank, which the ranks compare."""
    import mpi4py
    import numpy
    from mpi4py import MPI

    facts = {
        "host": socket.gethostname(),
        "mpidist": __version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "numpy": numpy.__version__,
        "mpi4py": mpi4py.__version__,
        "MPI": mpi_name(MPI.Get_library_version()),
        "h5py": h5py_version(),
        "CPU": _cpu(),
    }
    if "h5py" in sys.modules:
        facts["HDF5"] = sys.modules["h5py"].version.hdf5_version
    if "cupy" in sys.modules:
        cupy = sys.modules["cupy"]
        facts["cupy"] = cupy.__version__
        facts["CUDA driver"] = str(cupy.cuda.runtime.driverGetVersion())
    return facts


def h5py_version() -> str:
    """Return the version of the installed h5py, or "none"."""
    # Importing h5py takes 25 ms, and asking `importlib.metadata` 10 ms.
    found = importlib.util.find_spec("h5py")
    if found is None or found.origin is None:
        return "none"
    folders = Path(found.origin).parents[1].glob("h5py-*.dist-info")
    versions = [folder.stem.partition("-")[2] for folder in folders]
    if len(versions) == 1:
        return versions[0]
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("h5py")
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
    """Return a line about software versions that differ between hosts, or None if none differ."""
    differing = []
    for key in keys:
        hosts: dict[str, dict[str, None]] = {}  # version -> names, each once
        for facts in fingerprints:
            if key in facts:
                hosts.setdefault(facts[key], {})[facts["host"]] = None
        if len(hosts) > 1:
            # The rarest version comes last, because it is most often the wrong one.
            parts = sorted(hosts.items(), key=lambda item: -len(item[1]))
            differing.append(f"{key} " + " but ".join(f"{v} on {_some([*n])}" for v, n in parts))
    if not differing:
        return None
    return (
        f"the ranks do not run the same software: {'; '.join(differing)}; load the same module on "
        "all hosts, or use one virtual environment on a shared file system"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 4 else ""
    return ", ".join(names[:3] if more else names) + more


def check_launch(
    comm,
    environ: Mapping[str, str],
    facts: Mapping[str, str] | None = None,
    problem: str | None = None,
) -> None:
    """Raise ConfigError for a launch that cannot work; the error says what to do.

    Collective over `comm`.

    Parameters
    ----------
    comm : MPI.Intracomm
    environ : mapping
        ``os.environ``.
    facts : mapping, optional
        What the ranks compare, by default the result of `versions_fingerprint`.
    problem : str, optional
        A text that says why this rank cannot continue. The caller prints the problem of rank 0
        before this call.

    Raises
    ------
    ConfigError
        On all ranks, if n programs of one rank each have started, if versions differ, or if some
        rank has a `problem`.
    """
    from mpi4py import MPI

    check_singletons(MPI.COMM_WORLD.size, environ, MPI.Get_library_version())
    # The versions are sent as JSON and not as pickles, because other versions of Python or NumPy
    # may fail to read the pickles.
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

    Call this function before any module imports ``mpi4py.MPI``, which would call MPI_Init without
    the checks.
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
        # Exit handlers that are registered later run earlier, so this handler runs after all of
        # them.
        atexit.register(_finalize)
        # A process that a rank forks is not a rank of the job.
        os.register_at_fork(after_in_child=lambda: atexit.unregister(_finalize))
    check_singletons(MPI.COMM_WORLD.size, environ, MPI.Get_library_version())
    return MPI


def _finalize() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()
