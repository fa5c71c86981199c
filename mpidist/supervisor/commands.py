"""The command lines that make an MPI launcher start a program on given hosts.

The launcher is the mpiexec that belongs to this Python interpreter, or the user's own command.
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
from ..launch.environment import WITH_ULFM, may_have_ulfm
from ..launch.launchers import (
    crowding,
    find_launcher,
    launcher_command,
    launcher_kind,
    launcher_version,
)

#: Beginnings of the names of node states in which Slurm starts no process on the node. A ``*``
#: after a state means that the node does not answer.
_AWAY = ("down", "drain", "fail", "maint", "unk", "power", "no_respond", "boot")

#: The option of Open MPI's launcher with which the other ranks go on when a rank dies.
SURVIVE = "--with-ft", "ulfm"

#: The variable with which srun begins a job step although other steps use the same cores; Open
#: MPI's launcher calls srun, too. If a host is lost, the step of an earlier attempt lasts until
#: Slurm gives the host up, and occupies the cores of all hosts until then.
BESIDE_OTHERS = {"SLURM_OVERLAP": "1"}

#: The first command in the shell of a rank. Open MPI's component for one-sided transfers over
#: libfabric sleeps for a second when MPI_Init closes it unused, and ranks on one host never use it
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
    """Return a command line that starts an MPI job: the launcher and its options, for the program.

    Parameters
    ----------
    ranks : int
    words : sequence of str
        The words of the user's launcher command; empty for this Python interpreter's mpiexec.
    hosts : mapping, optional
        The hosts, and how many ranks each host can run. With None, the launcher chooses the hosts.
    restricted : bool
        Whether the command line must name the hosts, because the launcher would otherwise use other
        hosts, too.
    """
    if not words and hosts is None:
        return launcher_command(ranks)
    words = list(words) or [str(find_launcher())]
    named = _host_words(kind_of(words), hosts) if hosts and restricted else []
    return [*words, *named, "-n", str(ranks)]


def surviving(words: Sequence[str]) -> list[str]:
    """Return a launcher's command line with the option that lets a job go on when a rank dies.

    Raises ConfigError if the launcher has no such option.
    """
    name, kind = Path(words[0]).name, kind_of(words)
    version = printed_version(words[0])
    if kind != "openmpi" or not may_have_ulfm(version):
        what = {"mpich": f"{name} of MPICH", "srun": "srun"}.get(kind, name)
        if found := re.search(r"\(Open MPI\) \d+\.\d+\.\d+", version):
            what = f"{name} of {found[0].strip('()').replace(')', '')}"
        raise ConfigError(
            f"mpidist launch --elastic: {what} ends the job when a rank dies; it needs Open MPI "
            f"{'.'.join(map(str, WITH_ULFM))} or newer. The same command without --elastic works: "
            "it starts the job again from the newest checkpoint"
        )
    return [*words] if SURVIVE[0] in words else [words[0], *SURVIVE, *words[1:]]


def printed_version(launcher: str) -> str:
    """Return the output of ``launcher --version``, or "" if the launcher cannot be run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return launcher_version(shutil.which(launcher) or launcher)
    return ""


def again(ranks: int, started_by: str, library: str, crowded: bool) -> list[str]:
    """Return the words of a command that starts `ranks` ranks in the way this process was started.

    Parameters
    ----------
    ranks : int
    started_by : str
        The launcher of this process, as returned by `claims.claimed_size`; "" for none.
    library : str
        Name and version of the MPI library.
    crowded : bool
        Whether some host has more ranks than cores.
    """
    if started_by == "srun":
        return ["srun", f"--mpi={srun_mpi(library)}", "-n", str(ranks)]
    if not started_by:
        return []
    family, _, version = library.rpartition(" ")
    major = version.partition(".")[0]
    # The options for more ranks than cores are known for these two MPI libraries only.
    kind = {"Open MPI": "openmpi", "MPICH": "mpich"}.get(family)
    more = crowding(kind, int(major)) if crowded and kind and major.isdecimal() else []
    return [callable_as("mpirun"), *more, "-n", str(ranks)]


def callable_as(program: str) -> str:
    """Return what a user must type to run `program`, which is installed beside this Python."""
    own = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    if not own.exists() or (found and Path(found).resolve() == own.resolve()):
        return program
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) else own)


def quick_start(kind: str, launcher: str, environ: Mapping[str, str]) -> str:
    """Return a shell command with which Open MPI starts a second faster; "" if there is none.

    The command switches off one of Open MPI's transports if all ranks are on one host, and does
    nothing if the user has chosen the transports.
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
        "mpidist launch can pass hosts only to Open MPI's and MPICH's mpiexec and to srun; leave "
        "--hosts out, or give one of these launchers as --launcher"
    )


def parse_hosts(text: str) -> dict[str, int]:
    """Parse hosts and their numbers of ranks, as in ``a:2,b:2``; the default number is 1."""
    hosts: dict[str, int] = {}
    for word in text.split(","):
        name, found, count = word.strip().partition(":")
        if not name or name in hosts or (found and not (count.isdecimal() and int(count))):
            raise ConfigError(f"--hosts {text!r}: expected HOST[:RANKS][,HOST[:RANKS]...]")
        hosts[name] = int(count) if found else 1
    return hosts


def named_like(host: str, hosts: Collection[str]) -> str:
    """Return the name in `hosts` that means the same host as `host`; "" if there is none.

    The result is also "" if `hosts` has only one name.

    Only the part of a name before the first dot is compared.
    """
    own = host.partition(".")[0]
    alike = [name for name in hosts if host and name.partition(".")[0] == own]
    return alike[0] if len(hosts) > 1 and alike else ""


def host_test(
    host: str, words: Sequence[str], by_slurm: bool, program: Sequence[str] = ("true",)
) -> list[str]:
    """Return a command that starts `program` on `host`, by srun or by the launcher."""
    if not by_slurm:
        # Open MPI 5.0.11's launcher hung in 29 of 430 starts of a program that ended at once, and
        # in none of 120 starts of a program that took 0.2 s.
        program = ["sh", "-c", '"$@"; code=$?; sleep 0.2; exit $code', "sh", *program]
        return [*command(1, words, {host: 1}, restricted=True), *program]
    # The step needs no resources, because steps of a killed launcher may still occupy the host.
    sharing = ("--overlap", "--mem=0", "--gres=none", "--mpi=none")
    return ["srun", *sharing, "--nodes=1", "--ntasks=1", f"--nodelist={host}", *program]


# --------------------------------------------------------------------------------------- Slurm


def slurm_hosts(environ: Mapping[str, str]) -> dict[str, int] | None:
    """Return how many tasks each host of this Slurm allocation has; None without Slurm."""
    nodes = environ.get("SLURM_JOB_NODELIST")
    if "SLURM_JOB_ID" not in environ or not nodes:
        return None
    names = _ask(["scontrol", "show", "hostnames", nodes]).split()
    counts = expand_counts(environ.get("SLURM_TASKS_PER_NODE", "1"))
    counts += [counts[-1]] * (len(names) - len(counts))
    return dict(zip(names, counts, strict=False))


def slurm_left(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts that still belong to this Slurm allocation; it may have lost nodes."""
    nodes = _ask(["squeue", "-h", "-j", environ["SLURM_JOB_ID"], "-o", "%N"]).strip()
    return _ask(["scontrol", "show", "hostnames", nodes]).split()


def slurm_environ(
    environ: Mapping[str, str], hosts: Sequence[str], left: Sequence[str], ranks: int
) -> dict[str, str]:
    """Return the Slurm variables for the hosts `left`, as if only these were allocated."""
    if list(hosts) == list(left):
        return {}
    told = dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(ranks))
    told |= dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), ",".join(left))
    told |= dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(left)))
    for name in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"):
        counts = dict(zip(hosts, expand_counts(environ.get(name, "")), strict=False))
        told[name] = ",".join(str(counts.get(host, 1)) for host in left)
    return {name: value for name, value in told.items() if name in environ}


def slurm_away(hosts: Sequence[str]) -> set[str]:
    """Return those of `hosts` on which Slurm can start no process now."""
    said = _ask(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-o", "%N %T"])
    return {
        name
        for name, state in (line.split()[:2] for line in said.splitlines() if " " in line)
        if state.lower().startswith(_AWAY) or state.endswith("*")
    }


def slurm_doors(hosts: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return {host: (address, port)}: where the Slurm daemon of each host accepts connections."""
    listed = "NodeHost:255,NodeAddr:255,Port:20"
    said = _ask(["sinfo", "-h", "-N", "-n", ",".join(hosts), "-O", listed])
    lines = (line.split() for line in said.splitlines())
    return {line[0]: (line[1], int(line[2])) for line in lines if line[2:] and line[2].isdigit()}


def expand_counts(text: str) -> list[int]:
    """Return the numbers of tasks in a text of Slurm: ``2(x3),1`` becomes 2, 2, 2, 1."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts or [1]


def _ask(words: Sequence[str]) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"mpidist launch: {' '.join(words[:2])} failed: {error}") from None
