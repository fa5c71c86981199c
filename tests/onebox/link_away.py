"""Jobs on a shaped network one of whose links is away for some seconds: `ip link set down`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mpidist.launch.launchers import find_launcher
from mpidist.launch.processes import Finished
from onebox.network import ShapedNetwork

#: The ranks of a job wait after so many steps for the file `GO` in their folder.
BEGUN, GO = 10, "go"


@dataclass(frozen=True)
class Outcome:
    """What came of a job: the command, and the seconds in which no rank noted a step.

    `after` are the seconds from the return of the link until the first step after it.
    """

    done: Finished
    longest: float
    after: float


def link_away(
    net: ShapedNetwork,
    python: str | Path,
    jobs: Mapping[Path, tuple[Sequence, Sequence[str]]],
    seconds: float,
    *,
    host: int = 3,
    timeout: float = 120,
) -> dict[Path, Outcome]:
    """Run all `jobs` at once, one rank per host, and take a host's link away once all have begun.

    `jobs` maps a folder, in which ranks note ``TIME STEP`` in files, to the words after the Python
    and to options of mpirun. The ranks wait after `BEGUN` steps for the file `GO`. Local.
    """
    link = ["ip", "-n", f"h{host}", "link", "set", "eth0"]
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = {
            folder: pool.submit(
                net.mpirun, 1, [python, *words], options=options,
                mpi=find_launcher(python), env=env, timeout=timeout,
            )
            for folder, (words, options) in jobs.items()
        }  # fmt: skip
        end = time.monotonic() + timeout
        while not all(len(times(folder)) >= BEGUN for folder in jobs):
            ended = [job.result() for job in running.values() if job.done()]
            if ended or time.monotonic() > end:
                raise RuntimeError(f"jobs have not begun: {ended}")
            time.sleep(0.02)
        for folder in jobs:
            (folder / GO).touch()
        time.sleep(0.1)
        net.box.run([*link, "down"]).check()
        time.sleep(seconds)
        net.box.run([*link, "up"]).check()
        back = time.time()
        return {folder: outcome(job.result(), folder, back) for folder, job in running.items()}


def times(folder: Path) -> list[float]:
    """Return the times of all steps that ranks have noted so far. Local."""
    files = [path for path in folder.iterdir() if path.name.isdigit()]
    lines = [line for path in files for line in path.read_text().split("\n")[:-1]]
    return sorted(float(line.split()[0]) for line in lines)


def outcome(done: Finished, folder: Path, back: float) -> Outcome:
    """Return what came of a job whose link was back at the time `back`. Local."""
    noted = times(folder)
    longest = max((b - a for a, b in itertools.pairwise(noted)), default=float("inf"))
    later = [when - back for when in noted if when > back]
    return Outcome(done, longest, min(later, default=float("inf")))
