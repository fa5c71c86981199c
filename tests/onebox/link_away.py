"""Jobs on a shaped network one of whose links is away for some seconds: `ip link set down`."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from until import holds_within

from mpidist.launch.launchers import find_launcher
from mpidist.launch.processes import Finished
from onebox.network import ShapedNetwork

#: The ranks of a job wait after so many steps for the file `GO` in their folder.
BEGUN, GO = 10, "go"
#: Files that say to the ranks that the link is away, and that it is back; see `link_away`.
DOWN, BACK = "down", "back"


@dataclass(frozen=True)
class Outcome:
    """What came of a job: the command, and the seconds in which no rank noted a step.

    `after` are the seconds from the return of the link until each rank that does steps has done
    one more.
    """

    done: Finished
    longest: float
    after: float

    def told(self) -> list[str]:
        """Return the lines that say that a host does not answer, or has had no network."""
        lines = self.done.stderr.splitlines()
        return [line for line in lines if re.search("has had no answer from|had no network", line)]


def link_away(
    net: ShapedNetwork,
    python: str | Path,
    jobs: Mapping[Path, tuple[Sequence, Sequence[str]]],
    seconds: float,
    *,
    until: Callable[[], bool] = lambda: False,
    host: int = 3,
    ranks_per_host: int = 1,
    timeout: float = 120,
) -> dict[Path, Outcome]:
    """Run all `jobs` at once, and take the link of one host away once all of them have begun.

    It is away for `seconds`, or until `until` returns true.

    `jobs` maps a folder, in which ranks note ``TIME STEP`` in files, to the words after the Python
    and to options of mpirun. The ranks wait after `BEGUN` steps for the file `GO`, make slow steps
    before the file `DOWN`, and their last step after the file `BACK`: so they are at work when the
    link goes away and when it comes back, however busy this machine is. Local.
    """
    link = ["ip", "-n", f"h{host}", "link", "set", "eth0"]
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = {
            folder: pool.submit(
                net.mpirun, ranks_per_host, [python, *words], options=options,
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
        tell(jobs, GO)
        time.sleep(0.1)
        net.box.run([*link, "down"]).check()
        tell(jobs, DOWN)
        holds_within(until, seconds)
        net.box.run([*link, "up"]).check()
        back = time.time()
        tell(jobs, BACK)
        return {folder: outcome(job.result(), folder, back) for folder, job in running.items()}


def tell(folders: Iterable[Path], name: str) -> None:
    """Make the file `name` in all folders. Local."""
    for folder in folders:
        (folder / name).touch()


def times(folder: Path) -> list[float]:
    """Return the times of all steps that ranks have noted so far. Local."""
    return sorted(when for one in _times_of_ranks(folder) for when in one)


def outcome(done: Finished, folder: Path, back: float) -> Outcome:
    """Return what came of a job whose link was back at the time `back`. Local."""
    noted = times(folder)
    longest = max((b - a for a, b in itertools.pairwise(noted)), default=float("inf"))
    ranks = [one for one in _times_of_ranks(folder) if one]
    firsts = [min((when - back for when in one if when > back), default=float("inf"))
              for one in ranks]  # fmt: skip
    return Outcome(done, longest, max(firsts, default=float("inf")))


def _times_of_ranks(folder: Path) -> list[list[float]]:
    """Return the times that each rank has noted; none of a rank that does no steps."""
    files = [path for path in folder.iterdir() if path.name.isdigit()]
    texts = [path.read_text().split("\n")[:-1] for path in files]
    return [[float(line.split()[0]) for line in lines] for lines in texts]
