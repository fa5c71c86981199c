"""`mpidist bench allreduce --advise`: find settings with which the allreduce of MPI is faster.

MPI chooses its algorithms when it starts, so the ranks are started again for each algorithm of MPI.
An algorithm is advised only if it was faster than MPI's default in three measurements. The command
itself is one process without MPI.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import ConfigError, MpidistError
from ..launch import claims
from ..launch.launchers import command_words, launch_environment, launcher_command
from ..launch.processes import Started
from . import mpi_algorithms as mpi
from .mpi_algorithms import DEFAULT, Passes, Setting

PASSES, CHECKS = 2, 3

#: The largest number of seconds for one measurement with one setting, because some algorithms are
#: very slow.
PATIENCE = 600

RULES, VARIABLES = "allreduce.rules", "mpi.env"


class Site:
    """How MPI is measured: the command that starts ranks, benchmark options, and vector sizes."""

    def __init__(self, launcher: Sequence[str], options: Sequence[str], sizes: Sequence[int]):
        self.launcher, self.options, self.sizes = [*launcher], [*options], [*sizes]
        self.environment = launch_environment()

    def output(self, words: Sequence[str], variables: Mapping[str, str]) -> str:
        """Run a program on all ranks and return its output; raise MpidistError if it fails."""
        command = [*self.launcher, *words]
        try:
            done = Started(command, env={**self.environment, **variables}).finish(PATIENCE)
        except OSError as error:
            why = f"cannot start {command[0]}: {error.strerror}"
            raise ConfigError(f"{why}; see --launcher") from None
        # Open MPI prints a warning for an unknown algorithm, and continues with its default.
        if done.returncode or "invalid value" in done.stderr:
            said = [line for line in done.stderr.splitlines() if line.strip(" -=")]
            why = " ".join(" ".join(said[:4]).split())
            raise MpidistError(f"{shlex.join(done.args)} ended with {done.returncode}: {why}")
        return done.stdout

    def hosts(self) -> list[str]:
        """Return the host of each rank."""
        # Each rank prints its host by a single write, because a launcher may print the writes of
        # different ranks in any order.
        program = "import socket, sys; sys.stdout.write(f'<host {socket.gethostname()}>\\n')"
        said = self.output([sys.executable, "-c", program], {})
        return re.findall("<host (.*?)>", said)

    def times(self, setting: Setting) -> dict[int, float]:
        """Measure MPI's allreduce with `setting`; return a dict: bytes of a vector -> us."""
        wanted = [n for n in self.sizes if setting.low <= n <= (setting.high or n)]
        if not wanted:
            return {}
        with tempfile.TemporaryDirectory(prefix="mpidist-advise-") as folder:
            rows = Path(folder) / "rows.json"
            words = [sys.executable, "-m", "mpidist", "bench", "allreduce", *self.options]
            words += ["--algorithms", "", "--forms", "call", "--json", str(rows)]
            words += ["--min", str(wanted[0]), "--max", str(wanted[-1])]
            self.output(words, setting.variables)
            found = json.loads(rows.read_text(encoding="utf-8"))
        native = [row["native_us"] for row in found if row["algorithm"] == "native"]
        return dict(zip(wanted, native, strict=True))


def site(ranks: int | None, launcher: str | None, options: Sequence[str], sizes) -> Site:
    """Return the `Site` (how MPI is measured) that the command-line options describe."""
    if launcher:
        if ranks is not None:
            raise ConfigError(f"--ranks {ranks} and --launcher: give the ranks in --launcher")
        return Site(command_words("--launcher", launcher), options, sizes)
    ranks = len(os.sched_getaffinity(0)) if ranks is None else ranks
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: expected 2 or more")
    return Site(launcher_command(ranks), options, sizes)


def advise(there: Site, library: str, out: Path, say: Callable[[str], None]) -> list[dict]:
    """Find the settings with which MPI's allreduce is fastest, and write them to the folder `out`.

    Returns a row (a dict) for each vector size: the advised algorithm, and the times of MPI's
    default and of each algorithm in microseconds.
    """
    hosts = there.hosts()
    ranks, nodes = len(hosts), len(set(hosts))
    is_open_mpi = library.startswith("Open MPI")
    if not is_open_mpi and not library.startswith("MPICH"):
        raise ConfigError(f"--advise knows Open MPI and MPICH; this Python has {library}")
    where = f"{library}, {ranks} ranks on {nodes} host{'s' if nodes > 1 else ''}"
    settings = mpi.open_mpi(ranks, nodes) if is_open_mpi else mpi.mpich()
    say(f"# trying {len(settings)} of MPI's own algorithms for allreduce, {where}")
    passes = _measure(there, settings, say)
    if is_open_mpi:
        chosen = {n: mpi.best_for(passes, settings, n, mpi.base(nodes)) for n in there.sizes}
    else:
        chosen = dict.fromkeys(there.sizes, mpi.best_for_all(passes, settings, there.sizes))
    write = partial(_write, out, where, (ranks, nodes) if is_open_mpi else None)
    rows = [_row(passes, n, chosen[n]) for n in there.sizes]
    if all(setting == DEFAULT for setting in chosen.values()):
        what = "" if is_open_mpi else " without loss at other sizes (--min, --max)"
        say(f"# no setting was {mpi.GAIN} times as fast in each pass{what}: MPI chooses well here")
        return rows
    again = _check(there, write(chosen), say)
    for row in rows:
        each = mpi.ratios(again, "advised", row["bytes"])
        row["advised_us"] = round(float(np.median([a[row["bytes"]] for a in again["advised"]])), 2)
        row["default_us"] = round(float(np.median([d[row["bytes"]] for d in again["default"]])), 2)
        row["ratio"] = round(float(np.median(each)), 3)
    _keep_what_holds(rows, chosen, write, is_open_mpi and nodes == 1, out, say)
    return rows


def _measure(there: Site, settings: Sequence[Setting], say) -> Passes:
    passes: dict[str, list] = {DEFAULT.name: []}
    for k in range(PASSES):
        # Every second pass tries the settings in reverse order. If the speed of the machine changes
        # slowly, no setting then has an advantage.
        for setting in [DEFAULT, *(settings if k % 2 == 0 else reversed(settings))]:
            if k and setting.name not in passes:
                continue
            try:
                found = there.times(setting)
            except MpidistError:
                if setting == DEFAULT:
                    raise
                passes.pop(setting.name, None)
                say(f"# pass {k + 1} of {PASSES}: {setting.name} does not run here")
                continue
            passes.setdefault(setting.name, []).append(found)
            say(f"# pass {k + 1} of {PASSES}: {setting.name}")
    return passes


def _check(there: Site, variables: Mapping[str, str], say) -> Passes:
    advised = Setting("advised", dict(variables))
    again: dict[str, list] = {DEFAULT.name: [], advised.name: []}
    for k in range(CHECKS):
        for setting in (DEFAULT, advised):
            again[setting.name].append(there.times(setting))
        say(f"# check {k + 1} of {CHECKS}: default, then advised")
    return again


def _row(passes: Passes, nbytes: int, setting: Setting) -> dict:
    tried = {name: each[-1][nbytes] for name, each in passes.items() if nbytes in each[-1]}
    us = tried[DEFAULT.name]
    return {
        "bytes": nbytes, "algorithm": setting.name, "default_us": us, "advised_us": us,
        "ratio": 1.0, "tried": tried,
    }  # fmt: skip


def _keep_what_holds(rows, chosen: dict[int, Setting], write, per_size: bool, out, say) -> None:
    """Measure the chosen settings once more, drop those without a gain, and write the final files.

    If `per_size` is true, a setting can be dropped for one vector size alone.
    """
    if per_size:
        for row in rows:
            if row["algorithm"] != DEFAULT.name and row["ratio"] < mpi.GAIN:
                said = f"{row['algorithm']} was {row['ratio']:.2f} times as fast, default kept"
                say(f"# {row['bytes']} bytes: {said}")
                chosen[row["bytes"]] = DEFAULT
                _take_back(row)
    changed = [row["ratio"] for row in rows if row["algorithm"] != DEFAULT.name]
    if changed and mpi.geometric_mean(changed) >= mpi.GAIN:
        write(chosen)
        return
    for name in (RULES, VARIABLES):
        (out / name).unlink(missing_ok=True)
    for row in rows:
        _take_back(row)
    say("# the second measurement showed no gain: nothing to advise")


def _take_back(row: dict) -> None:
    row.update(algorithm=DEFAULT.name, advised_us=row["default_us"], ratio=1.0)


def _write(out: Path, where: str, job: tuple[int, int] | None, chosen) -> dict[str, str]:
    """Write the files with the advised settings; return the environment variables that select them.

    For Open MPI, `job` is (ranks, nodes), and a rules file is written; for MPICH, `job` is None.
    """
    source = f"measured by mpidist bench allreduce --advise: {where}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; give a folder to write to") from None
    variables = next(iter(chosen.values())).variables
    if job:
        path = out.absolute() / RULES
        path.write_text(mpi.rules_file(chosen, *job, source), encoding="utf-8")
        variables = mpi.with_rules(str(path), job[1])
    (out / VARIABLES).write_text(mpi.shell(variables, source), encoding="utf-8")
    return variables


def advice_lines(rows: Sequence[dict], out: Path, library: str):
    """Yield the lines to print: a table, how much faster the advised settings are, what to do."""
    names = ("Size", "default(us)", "advised(us)", "ratio")
    yield "# " + "".join(f"{name:>14}" for name in names)[2:] + "  advised"
    for row in rows:
        numbers = f"{row['default_us']:>14.2f}{row['advised_us']:>14.2f}{row['ratio']:>14.2f}"
        yield f"{row['bytes']:>14}{numbers}  {row['algorithm']}"
    changed = [row for row in rows if row["algorithm"] != DEFAULT.name]
    if not changed:
        return
    gain = mpi.geometric_mean([row["ratio"] for row in changed])
    yield (
        f"# {gain:.2f} times as fast over the {len(changed)} sizes that the settings change "
        f"(geometric mean); to use them in any program: . {out / VARIABLES}"
    )
    if losing := [str(row["bytes"]) for row in changed if row["ratio"] < mpi.LOSS]:
        yield f"# but slower than the default at {', '.join(losing)} bytes"
    if library.startswith("Open MPI"):
        yield (
            "# or the same names without OMPI_MCA_ as lines 'name = value' in "
            "openmpi-mca-params.conf; user-defined operations that do not commute may be slower"
        )


def installed_mpi() -> str:
    """Return the name and version of this Python's MPI library, without a call of MPI_Init."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return claims.mpi_name(MPI.Get_library_version())
