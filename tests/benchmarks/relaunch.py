"""Measure the seconds from the kill of a rank under `mpidist launch` to the next completed step.

    PYTHONPATH=tests python -m benchmarks.relaunch [--torch | --all | --grow]

The same model, batch and checkpoints are run under `mpidist launch` and, if it is installed, under
torchrun with gloo; runs of the two take turns. A rank is killed by SIGKILL after some steps. The
time ends when a rank records a step that was completed after the kill.

With --all, all ranks of a job under `mpidist launch --elastic` are killed at once, and the next
attempt begins from the copies in memory. With --grow, nothing is killed: a job is asked for as many
ranks again, and the time is that from the last step before to the first step on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from python_path import python_path

from benchmarks.relaunch_job import EVERY
from mpidist.errors import MpidistError
from mpidist.launch.processes import Started
from mpidist.supervisor.requests import request_growth

#: A rank is killed once this step is done: a checkpoint is there, and one is due.
KILL_AT = 50
_PATIENCE = 120.0


def measure(ranks: int, rounds: int, kinds: list[str]) -> dict:
    """Return the row: seconds of each run, medians, and the ratio. Local."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for k in range(rounds):
        for who in seconds if k % 2 else reversed(seconds):
            seconds[who].append(one(who, ranks, victim=1 + k % (ranks - 1)))
    row: dict = {"ranks": ranks, "seconds": seconds}
    row |= {who: round(statistics.median(each), 3) for who, each in seconds.items()}
    if "torch" in kinds:
        pairs = zip(seconds["torch"], seconds["ours"], strict=True)
        row["ratio"] = round(statistics.median(a / b for a, b in pairs), 3)
    return row


def command(who: str, ranks: int, folder: Path, python: str = sys.executable) -> list[str]:
    """Return the command line of one run; torch is in the environment of `python`. Local."""
    kind = "ours" if who == "grow" else who
    job = ["-m", "benchmarks.relaunch_job", kind, str(folder)]
    if who != "torch":
        program = [sys.executable, *job]
        more = {"memory": ["--elastic"], "grow": ["--control", str(folder / "control")]}.get(
            who, []
        )
        return [sys.executable, "-m", "mpidist", "launch", *more, "-n", str(ranks), "--", *program]
    starter = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    return [python, *starter, "--standalone", *job]


def one(who: str, ranks: int, victim: int, python: str = sys.executable) -> float:
    """Start a run, kill a rank, and return the seconds until the next completed step. Local."""
    folder = Path(tempfile.mkdtemp(prefix="mpidist-relaunch-"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or each start compiles everything again
    # The ranks start in another folder, where a relative path leads nowhere.
    environment["PYTHONPATH"] = python_path()
    job = Started(command(who, ranks, folder, python), env=environment, cwd=folder)
    try:
        _wait(job, folder, lambda when, step: step >= KILL_AT)
        first = _pid(folder)
        victims = range(ranks) if who == "memory" else [victim]
        if who == "grow":
            request_growth(folder / "control", ranks)
            _wait(job, folder, lambda when, step: _sizes(folder)[-1] > ranks)
            k = _sizes(folder).index(2 * ranks)
            return _steps(folder)[k][0] - _steps(folder)[k - 1][0]
        killed = time.time()
        for rank in victims:
            os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
        # The survivors' last step may be noted after the kill: the next attempt's rank 0 is another
        # process, and what it notes counts.
        _wait(job, folder, lambda when, step: _pid(folder) not in (first, 0))
        before = len(_steps(folder))
        _wait(job, folder, lambda when, step: len(_steps(folder)) > before)
        if who == "memory" and (redone := _steps(folder)[before][1]) <= KILL_AT - EVERY:
            raise MpidistError(f"the run went on from step {redone}, and not from the newest copy")
        return _steps(folder)[before][0] - killed
    finally:
        job.process.send_signal(signal.SIGINT)
        job.finish(5)
        shutil.rmtree(folder, ignore_errors=True)


def _pid(folder: Path) -> int:
    return int((folder / "pid-0").read_text() or 0)


def _lines(folder: Path) -> list[list[str]]:
    try:
        lines = (folder / "steps").read_text().splitlines()
    except OSError:
        return []
    return [words for words in map(str.split, lines) if len(words) == 3]


def _steps(folder: Path) -> list[tuple[float, int]]:
    return [(float(when), int(step)) for when, step, _ in _lines(folder)]


def _sizes(folder: Path) -> list[int]:
    """Return the number of ranks of each step."""
    return [int(size) for *_, size in _lines(folder)]


def _last(folder: Path) -> tuple[float, int]:
    return (_steps(folder) or [(0.0, 0)])[-1]


def _wait(job: Started, folder: Path, done) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not done(*_last(folder)):
        if job.process.poll() is not None or time.monotonic() > deadline:
            said = job.finish(1)
            raise MpidistError(f"the run did not go on: {said.stderr[-2000:]}")
        time.sleep(0.01)


def main(words: list[str] | None = None) -> None:
    """Measure and print. Local: this process starts the ranks."""
    parser = argparse.ArgumentParser("benchmarks.relaunch", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="ranks (4)")
    parser.add_argument("--rounds", type=int, default=7, help="kills of each (7)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="kill all ranks at once")
    what.add_argument("--grow", action="store_true", help="double the number of ranks")
    what.add_argument("--torch", action="store_true", help="also torchrun with gloo")
    parser.add_argument("--json", metavar="FILE", help="write the row to FILE as well")
    args = parser.parse_args(words)
    kinds = ["memory"] if args.all else ["grow"] if args.grow else ["ours"]
    row = measure(args.ranks, args.rounds, [*kinds, "torch"] if args.torch else kinds)
    print(f"# from a killed rank to the next completed step, {args.ranks} ranks, seconds")
    for who in row["seconds"]:
        each = row["seconds"][who]
        print(f"{who:>6} {row[who]:7.2f}   ({min(each):.2f} to {max(each):.2f})")
    if args.torch:
        print(f" ratio {row['ratio']:7.2f}   torchrun over mpidist launch, median of pairs")
    if args.json:
        Path(args.json).write_text(json.dumps([row], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
