"""What deaths cost an elastic job, and what it costs to be elastic when nobody dies.

    PYTHONPATH=tests python -m benchmarks.elastic [kill|behind|late|spare|cost|flat|torch ...]

``kill``: from a SIGKILL of one of 4 ranks until all others are two steps on, by parts; ``behind``:
with 64 MiB of state, which one rank must get from another; ``late``: from the deadline of a rank
that is stopped or sleeps until all others are a step on; ``spare``: from a SIGKILL until all ranks,
with the spare, are two steps on; ``cost``: sums and training steps with
and without an elastic group; ``flat``: what a process holds after 20 deaths and 10,000 steps;
``torch``: the next step after a death here, under torchrun, and under torchft. All of them without
words. `--json FILE` adds a line for each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from python_path import python_path

from benchmarks import elastic_torch
from mpidist.errors import MpidistError
from mpidist.launch.launchers import launch_environment, launcher_command
from mpidist.launch.processes import Started

PID, DONE = 0, 1
HELD = 30
WHAT = ["kill", "behind", "late", "spare", "cost", "flat", "torch"]
PARTS = ["noticed", "shrunk", "opened", "state", "step", "step"]
NAMES = ["noticed by all", "agreed, shrunk", "opened", "state", "first step", "second step"]


class Job:
    """A running program of `elastic_programs`, in a folder of its own, with its board."""

    def __init__(self, ranks: int, *words):
        self.folder = Path(tempfile.mkdtemp(prefix="mpidist-elastic-"))
        (self.folder / "board").write_bytes(bytes(16 * ranks))
        self.board = np.memmap(self.folder / "board", np.int64, "r", shape=(ranks, 2))
        env = launch_environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        env["PYTHONPATH"] = python_path()
        launcher, *options = launcher_command(ranks)
        program = [sys.executable, "-m", "benchmarks.elastic_programs", words[0], str(self.folder)]
        command = [launcher, "--with-ft", "ulfm", *options, *program, *map(str, words[1:])]
        self.job = Started(command, env=env, cwd=self.folder)

    def wait_for(self, step: int, timeout: float = 120) -> None:
        """Wait until a rank has done `step` steps."""
        end = time.monotonic() + timeout
        while self.board[:, DONE].max() < step:
            if self.job.process.poll() is not None or time.monotonic() > end:
                raise MpidistError(f"no step {step}: {self.job.finish(1)}")
            time.sleep(0.0002)

    def kill(self, rank: int) -> float:
        """Kill a rank; return the time."""
        now = time.monotonic()
        os.kill(int(self.board[rank, PID]), signal.SIGKILL)
        return now

    def results(self, timeout: float = 120) -> dict[int, dict]:
        """Wait for the end; return what the living ranks have left."""
        try:
            self.job.finish(timeout).check()
            return {int(p.stem): json.loads(p.read_text()) for p in self.folder.glob("*.json")}
        finally:
            self.job.finish(0)
            shutil.rmtree(self.folder, ignore_errors=True)


def load() -> float:
    return float(Path("/proc/loadavg").read_text().split()[0])


def killed(kills: int, numbers: int, behind: bool) -> dict:
    """Measure `kills` jobs of 4 ranks, one of which is killed."""
    runs, steps, loads = [], [], []
    for number in range(kills):
        draw = random.Random(number)
        victim, late = draw.sample(range(4), 2)
        loads.append(load())
        if behind:
            # A virtual machine may have to get memory from its host first, which can take 2 ms for
            # each MiB. Memory that was just used and freed is there.
            np.ones(128 << 20)
        job = Job(4, "kill", numbers, HELD + 60, victim, late if behind else -1)
        at = HELD + 1 if behind else draw.randint(HELD, HELD + 20)
        job.wait_for(at)
        time.sleep(0.05 if behind else draw.uniform(0, 0.003))
        when = job.kill(victim)
        found = job.results()
        assert len(found) == 3, found.keys()
        # Each part ends when the last rank has ended it.
        runs.append([max(of(each["marks"], k) for each in found.values()) - when
                     for k in range(len(PARTS))])  # fmt: skip
        steps += [each["step"] for each in found.values()]
    ms = np.array(runs) * 1e3
    parts = np.diff(ms, axis=1, prepend=0)
    row = {"what": "behind" if behind else "kill", "kills": kills, "load": np.median(loads),
           "step_ms": round(float(np.median(steps)) * 1e3, 2),
           "ms": ms[:, -1].round(1).tolist()}  # fmt: skip
    size = f"{numbers * 8 >> 10} KiB of state{', one rank behind' if behind else ''}"
    print(f"# {kills} kills, 4 ranks, steps of {row['step_ms']} ms, {size}; load {row['load']:.1f}")
    print(
        f"to all two steps on, ms: median {np.median(ms[:, -1]):.1f}, worst {ms[:, -1].max():.1f}"
    )
    for k, name in enumerate(NAMES):
        print(f"  {name:<16}{np.median(parts[:, k]):7.1f}   at worst {parts[:, k].max():.1f}")
    return row | {name: round(float(np.median(parts[:, k])), 2) for k, name in enumerate(NAMES)}


def of(marks: list, k: int) -> float:
    """Return when a rank had ended part `k` of its last repair."""
    # A death in a repair begins it anew: the last one counts.
    begin = max(i for i, (name, _) in enumerate(marks) if name == PARTS[0])
    found = [(name, when) for name, when in marks[begin:]]
    if PARTS[k] == "step":
        return [when for name, when in found if name == "step"][k - 4]
    return next(when for name, when in found if name == PARTS[k])


def late(runs: int, deadline: float = 0.3) -> dict:
    """Measure jobs of 4 ranks, one of which is stopped, or sleeps while the others wait."""
    row: dict = {"what": "late", "runs": runs, "deadline": deadline, "load": load()}
    print(f"# a rank of 4 is late, deadline {deadline} s, {runs} runs each; load {row['load']:.1f}")
    for how in ("stopped", "sleeps"):
        ms = []
        for number in range(runs):
            victim = random.Random(number).randrange(4)
            job = Job(4, "late", how, victim, deadline, HELD + 60)
            job.wait_for(HELD + 2)
            when = float((job.folder / "when").read_text())
            ms.append((max(job.results().values()) - when - deadline) * 1e3)
        row[how] = np.round(ms, 1).tolist()
        print(f"  {how}: from the deadline to the next step of all, ms: median "
              f"{np.median(ms):.1f}, worst {max(ms):.1f}")  # fmt: skip
    return row


def spare(kills: int) -> dict:
    """Measure jobs of 4 ranks and a spare, which steps in for a rank that is killed."""
    before, ms = load(), []
    for number in range(kills):
        draw = random.Random(number)
        job = Job(5, "spare", HELD + 60)
        job.wait_for(draw.randint(HELD, HELD + 20))
        when = job.kill(draw.randrange(4))
        found = job.results()
        assert len(found) == 4, found.keys()
        ms.append((max(each[1] for each in found.values()) - when) * 1e3)
    print(f"# {kills} kills, 4 ranks and a spare; load {before:.1f}")
    print(f"to all two steps on, ms: median {np.median(ms):.1f}, worst {max(ms):.1f}")
    return {"what": "spare", "kills": kills, "load": before, "ms": np.round(ms, 1).tolist()}


def cost(rounds: int) -> dict:
    """Compare calls with and without an elastic group, on 2 ranks."""
    before = load()
    found = Job(2, "cost", rounds).results(600)[0]
    row: dict = {"what": "cost", "rounds": rounds, "load": before}
    print(f"# nobody dies: 2 ranks, {rounds} rounds, with over without a group; load {before:.1f}")
    for name, (off, on) in found.items():
        ratio = np.array(on) / np.array(off)
        draws = np.random.default_rng(0).choice(ratio, (2000, len(ratio)))
        low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
        row[name] = {"us": round(float(np.median(off)) * 1e6, 2),
                     "percent": round(float(np.median(ratio) - 1) * 100, 2)}  # fmt: skip
        print(f"  {name:<14}{row[name]['us']:10.2f} us  {row[name]['percent']:+.2f} % "
              f"({(low - 1) * 100:+.2f} to {(high - 1) * 100:+.2f})")  # fmt: skip
    return row


def flat(deaths: int, steps: int) -> dict:
    """Kill all ranks but two, one after the other, and see what the two hold."""
    every, before, ranks = 100, load(), deaths + 2
    job = Job(ranks, "flat", steps, every)
    order = random.Random(0).sample(range(ranks), ranks)
    for k, rank in enumerate(order[:deaths], 1):
        job.wait_for(k * every + 40, 300)
        job.kill(rank)
    found = job.results(600)
    looks = found[order[-1]]
    row = {"what": "flat", "deaths": deaths, "steps": steps, "load": before, "looks": looks}
    print(f"# {ranks} ranks, {deaths} deaths, {steps} steps; load {before:.1f}")
    # Every fifth death, and the end.
    shown = {each["deaths"]: (step, each) for step, each in looks.items()}
    for step, each in [*[shown[k] for k in sorted(shown) if k % 5 == 0], list(looks.items())[-1]]:
        print(f"  step {step:>6}: " + ", ".join(f"{value} {name}" for name, value in each.items()))
    return row


def main(words: list[str] | None = None) -> None:
    """Measure and print. Local: this process starts the jobs."""
    parser = argparse.ArgumentParser("benchmarks.elastic", description=__doc__)
    parser.add_argument("what", nargs="*", default=WHAT)
    parser.add_argument("--kills", type=int, default=20, help="runs of the first four (20)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of `cost` (60)")
    parser.add_argument("--deaths", type=int, default=20, help="deaths of `flat` (20)")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of `flat` (10,000)")
    elastic_torch.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line for each to FILE")
    args = parser.parse_args(words)
    measures = {
        "kill": lambda: killed(args.kills, 1000, False),
        "behind": lambda: killed(args.kills, 8 << 20, True),
        "late": lambda: late(args.kills),
        "spare": lambda: spare(args.kills),
        "cost": lambda: cost(args.rounds),
        "flat": lambda: flat(args.deaths, args.steps),
        "torch": lambda: elastic_torch.measure(args),
    }
    for name in args.what:
        row = measures[name]()
        sys.stdout.flush()
        if args.json:
            with args.json.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(row)}\n")


if __name__ == "__main__":
    main()
