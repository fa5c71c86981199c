"""How an MPI launcher is told what to start, and on which hosts. The environment is given.

The launcher is the one that belongs to the running interpreter, or the user's words for it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..errors import ConfigError
from ..launch.claims import srun_mpi
from ..launch.launchers import crowding, find_launcher, launcher_command, launcher_kind
from ..launch.processes import run

#: Node states in which Slurm starts nothing; a ``*`` behind any state: it does not answer.
_AWAY = ("down", "drain", "fail", "maint", "unk", "power", "no_respond", "boot")

#: What a rank's shell does first. Open MPI's component for one-sided transfers over libfabric
#: sleeps a second when MPI_Init closes it unused, and ranks that are all on one host do not use it
#: (mca_btl_ofi_component_close in opal/mca/btl/ofi/btl_ofi_component.c).
_WITHOUT_OFI = (
    '[ "$OMPI_COMM_WORLD_LOCAL_SIZE" = "$OMPI_COMM_WORLD_SIZE" ] && '
    'export OMPI_MCA_btl="${OMPI_MCA_btl-^ofi}"; '
)


def kind_of(words: Sequence[str]) -> str:
    """Return "openmpi", "mpich", "srun" or "other" for a launcher's command line."""
    name = Path(words[0]).name
    if name == "srun":
        return "srun"
    with contextlib.suppress(ConfigError, OSError, subprocess.SubprocessError):
        return launcher_kind(shutil.which(words[0]) or words[0])[0]
    return "other"


def command(
    ranks: int,
    words: Sequence[str] = (),
    hosts: Mapping[str, int] | None = None,
    restricted: bool = False,
) -> list[str]:
    """Return the words before the program.

    Parameters
    ----------
    ranks : int
    words : sequence of str
        The user's launcher; none is the one of this interpreter.
    hosts : mapping, optional
        Host to number of ranks there is room for; None leaves it to the launcher.
    restricted : bool
        Name the hosts: not all of those that the launcher knows of are to be used.
    """
    if not words and hosts is None:
        return launcher_command(ranks)
    words = list(words) or [str(find_launcher())]
    named = _host_words(kind_of(words), hosts) if hosts and restricted else []
    return [*words, *named, "-n", str(ranks)]


def again(ranks: int, started_by: str, library: str, crowded: bool) -> list[str]:
    """Return the words by which a job like this one is started from a shell.

    Parameters
    ----------
    ranks : int
    started_by : str
        Who started this process, as `claims.claimed_size` says; "" for nobody.
    library : str
        Name and version of the MPI library.
    crowded : bool
        Some host has more ranks than cores.
    """
    family, _, version = library.rpartition(" ")
    open_mpi = family == "Open MPI"
    if started_by == "srun":
        return ["srun", f"--mpi={srun_mpi(library)}", "-n", str(ranks)]
    if not started_by:
        return []
    major = version.partition(".")[0]
    kind = "openmpi" if open_mpi else "mpich"
    known = open_mpi or family == "MPICH"  # Intel's and others have words of their own
    more = crowding(kind, int(major)) if crowded and known and major.isdecimal() else []
    return [callable_as("mpirun"), *more, "-n", str(ranks)]


def callable_as(program: str) -> str:
    """Return how a shell in this folder finds a program that lies beside this Python."""
    own = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    if not own.exists() or (found and Path(found).resolve() == own.resolve()):
        return program
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) else own)


def quick_start(kind: str, launcher: str, environ: Mapping[str, str]) -> str:
    """Return what a rank's shell is to do so that MPI_Init takes no longer than it must.

    Nothing where somebody has chosen the transports, by a variable, an option or a file.
    """
    if kind != "openmpi":
        return ""
    installed = Path(shutil.which(launcher) or launcher).resolve().parent.parent
    own = Path(environ.get("HOME", "/"), ".openmpi/mca-params.conf")
    for path in (own, installed / "etc/openmpi-mca-params.conf"):
        with contextlib.suppress(OSError):
            if re.search(r"^\s*btl\s*=", path.read_text(errors="replace"), re.MULTILINE):
                return ""
    return _WITHOUT_OFI


def _host_words(kind: str, hosts: Mapping[str, int]) -> list[str]:
    slots = ",".join(f"{host}:{count}" for host, count in hosts.items())
    if kind == "openmpi":
        return ["--host", slots]
    if kind == "mpich":
        return ["-hosts", slots]
    if kind == "srun":
        return [f"--nodelist={','.join(hosts)}", f"--nodes={len(hosts)}"]
    raise ConfigError(
        "mpidist launch can name hosts to Open MPI's and MPICH's mpiexec and to srun only; leave "
        "--hosts out, or give one of these as --launcher"
    )


def parse_hosts(text: str) -> dict[str, int]:
    """Read ``a:2,b:2`` into host and number of ranks; one rank where there is no number."""
    hosts: dict[str, int] = {}
    for word in text.split(","):
        name, found, count = word.strip().partition(":")
        if not name or name in hosts or (found and not (count.isdigit() and int(count))):
            raise ConfigError(f"--hosts {text!r}: expected HOST[:RANKS][,HOST[:RANKS]...]")
        hosts[name] = int(count) if found else 1
    return hosts


def named_like(host: str, hosts: Collection[str]) -> str:
    """Return which of several hosts calls itself `host`, "" if none; domains may be left out. Pure.

    With less than two there is nothing to choose from.
    """
    own = host.partition(".")[0]
    alike = [name for name in hosts if host and name.partition(".")[0] == own]
    return alike[0] if len(hosts) > 1 and alike else ""


def answers(host: str, words: Sequence[str], environ: Mapping[str, str], seconds: float) -> bool:
    """Whether the launcher can start anything on a host. Blocks for at most `seconds`."""
    probe = command(1, words, {host: 1}, restricted=True)
    try:
        # It leaves nothing behind of a launcher that still waits for the host.
        return run([*probe, "true"], env=environ, timeout=seconds).returncode == 0
    except OSError:
        return False


# --------------------------------------------------------------------------------------- Slurm


def slurm_hosts(environ: Mapping[str, str]) -> dict[str, int] | None:
    """Return the hosts of this allocation and the tasks of each; None outside of one."""
    nodes = environ.get("SLURM_JOB_NODELIST")
    if "SLURM_JOB_ID" not in environ or not nodes:
        return None
    names = _ask(["scontrol", "show", "hostnames", nodes]).split()
    counts = expand_counts(environ.get("SLURM_TASKS_PER_NODE", "1"))
    counts += [counts[-1]] * (len(names) - len(counts))
    return dict(zip(names, counts, strict=False))


def slurm_left(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts that the allocation has now: a node that went down leaves it."""
    nodes = _ask(["squeue", "-h", "-j", environ["SLURM_JOB_ID"], "-o", "%N"]).strip()
    return _ask(["scontrol", "show", "hostnames", nodes]).split()


def slurm_environ(
    environ: Mapping[str, str], hosts: Sequence[str], left: Sequence[str], ranks: int
) -> dict[str, str]:
    """Return what Slurm would have set on a start on the hosts that are `left`. Pure.

    srun and Open MPI's mpirun believe these variables, and fail where they name a host too many.
    """
    if list(hosts) == list(left):
        return {}
    told = {"SLURM_NTASKS": str(ranks), "SLURM_NPROCS": str(ranks)}
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        told[name] = ",".join(left)
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        told[name] = str(len(left))
    for name in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"):
        counts = dict(zip(hosts, expand_counts(environ.get(name, "")), strict=False))
        told[name] = ",".join(str(counts.get(host, 1)) for host in left)
    return {name: value for name, value in told.items() if name in environ}


def slurm_away(hosts: Sequence[str]) -> set[str]:
    """Return those of the hosts on which Slurm starts nothing now."""
    said = _ask(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N %T"])
    return {
        name
        for name, state in (line.split()[:2] for line in said.splitlines() if " " in line)
        if state.lower().startswith(_AWAY) or state.endswith("*")
    }


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's ``2(x3),1`` into 2, 2, 2, 1. Pure."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts or [1]


def _ask(words: Sequence[str]) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"mpidist launch: {' '.join(words[:2])} failed: {error}") from None
