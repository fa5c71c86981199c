"""`mpidist bench allreduce --advise`: does the site's MPI choose well, and what helps.

Each of MPI's own algorithms is measured by newly started ranks, since MPI settles its choice when
it starts. It alternates `PASSES` times with the default, and is kept only if it gained each time.
Then the default and the advised settings are measured in turn, and the gain reported is that of
this second measurement. A gain that is not confirmed is dropped. One process: it starts the ranks
itself.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import ConfigError, MpidistError
from ..launch import claims
from ..launch.launchers import launch_environment, launcher_command
from ..launch.processes import Finished, Started
from . import mpi_algorithms as mpi
from .mpi_algorithms import DEFAULT, Passes, Setting

PASSES, CHECKS = 2, 3

#: Seconds for one start with one setting; some algorithms do not end in sensible time.
PATIENCE = 600

RULES, VARIABLES = "allreduce.rules", "mpi.env"


class Site:
    """How ranks are started here, and what is measured on them."""

    def __init__(self, launcher: Sequence[str], options: Sequence[str], sizes: Sequence[int]):
        self.launcher, self.options, self.sizes = [*launcher], [*options], [*sizes]
        self.environment = launch_environment()

    def run(self, words: Sequence[str], variables: Mapping[str, str]) -> Finished:
        """Run a program on all ranks to its end."""
        command = [*self.launcher, *words]
        try:
            return Started(command, env={**self.environment, **variables}).finish(PATIENCE)
        except OSError as error:
            raise ConfigError(
                f"cannot start {command[0]}: {error.strerror}; see --launcher"
            ) from None

    def output(self, words: Sequence[str], variables: Mapping[str, str]) -> str:
        """Run a program on all ranks and return its output; MpidistError if it fails."""
        done = self.run(words, variables)
        # Open MPI says that it does not know an algorithm, and goes on with its default.
        if done.returncode or "invalid value" in done.stderr:
            said = [line for line in done.stderr.splitlines() if line.strip(" -=")]
            why = " ".join(" ".join(said[:4]).split())
            raise MpidistError(f"{shlex.join(done.args)} ended with {done.returncode}: {why}")
        return done.stdout

    def hosts(self) -> list[str]:
        """Return the host of each rank."""
        program = "import socket; print('host', socket.gethostname(), flush=True)"
        said = self.output([sys.executable, "-c", program], {}).splitlines()
        return [line.split()[1] for line in said if line.startswith("host ")]

    def times(self, setting: Setting) -> dict[int, float]:
        """Return microseconds of MPI's allreduce by bytes, in the better of its two forms."""
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
    """Return the site as the options describe it."""
    if launcher:
        if ranks is not None:
            raise ConfigError(f"--ranks {ranks} and --launcher: give the ranks in --launcher")
        return Site(shlex.split(launcher), options, sizes)
    ranks = len(os.sched_getaffinity(0)) if ranks is None else ranks
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: expected 2 or more")
    return Site(launcher_command(ranks), options, sizes)


def advise(there: Site, library: str, out: Path, say: Callable[[str], None]) -> list[dict]:
    """Measure, write what helps into `out`, measure again; return a row per size.

    Rows: bytes, algorithm (advised), default_us, advised_us, ratio (median over the checks), tried
    (name -> microseconds of the last pass).
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
        write = partial(_write_rules, out, ranks, nodes, where)
    else:
        one = mpi.best_for_all(passes, settings, there.sizes)
        chosen = dict.fromkeys(there.sizes, one)
        write = partial(_write_variables, out, where)
    rows = [_row(passes, n, chosen[n]) for n in there.sizes]
    if all(setting == DEFAULT for setting in chosen.values()):
        what = "" if is_open_mpi else " and lost at no size (--min and --max set the sizes)"
        say(f"# nothing gained {mpi.GAIN} times in each pass{what}: MPI chooses well here")
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
        # There and back: what drifts with time favours nobody.
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
    """Take back what the second look has not confirmed, and write the files for good.

    Size by size where the default can be had for some sizes alone, else all or nothing.
    """
    if per_size:
        for row in rows:
            if row["algorithm"] != DEFAULT.name and row["ratio"] < mpi.GAIN:
                said = f"{row['algorithm']} gained {row['ratio']:.2f} times, left as it was"
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
    say("# the gain did not show a second time: nothing to advise")


def _take_back(row: dict) -> None:
    row.update(algorithm=DEFAULT.name, advised_us=row["default_us"], ratio=1.0)


def _write_rules(out: Path, ranks: int, nodes: int, where: str, chosen) -> dict[str, str]:
    _make(out)
    path = out.absolute() / RULES
    path.write_text(mpi.rules_file(chosen, ranks, nodes, _source(where)), encoding="utf-8")
    variables = mpi.with_rules(str(path), nodes)
    _shell(out, variables, where)
    return variables


def _write_variables(out: Path, where: str, chosen) -> dict[str, str]:
    _make(out)
    variables = next(iter(chosen.values())).variables
    _shell(out, variables, where)
    return variables


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; give a folder to write to") from None


def _shell(out: Path, variables: Mapping[str, str], where: str) -> None:
    (out / VARIABLES).write_text(mpi.shell(variables, _source(where)), encoding="utf-8")


def _source(where: str) -> str:
    return f"measured by mpidist bench allreduce --advise: {where}"


def advice_lines(rows: Sequence[dict], out: Path, library: str):
    """Print the rows, the gain, and how every program gets it."""
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
        f"# {gain:.2f} times as fast over the {len(changed)} sizes that it "
        f"changes (geometric mean); for every program: . {out / VARIABLES}"
    )
    if losing := [str(row["bytes"]) for row in changed if row["ratio"] < mpi.LOSS]:
        yield f"# but slower than the default at {', '.join(losing)} bytes"
    if library.startswith("Open MPI"):
        yield (
            "# or the same names without OMPI_MCA_ as lines 'name = value' in "
            "openmpi-mca-params.conf; user-defined operations that do not commute may be slower"
        )


def installed_mpi() -> str:
    """Return name and version of this Python's MPI, which need not have begun."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return claims.mpi_name(MPI.Get_library_version())
