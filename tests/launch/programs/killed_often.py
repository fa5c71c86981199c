"""Run the digits job many times, and kill a random rank at a random place: killed_often.py 100.

Each run must finish, use every sample once, and end with the weights of an undisturbed run. The
number of the run is the seed from which the number of ranks, the killed rank, the step and the
place are drawn.
"""

import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from mpidist.launch.processes import run

JOB = Path(__file__).parents[3] / "jobs" / "digits.toml"
STEPS, EVERY = 150, 20
SETTINGS = (
    f"steps={STEPS}", f"checkpoint_every={EVERY}", "microbatches=12", "log_every=1", "out=run",
    "data.distort.copies=2", "model.channels=[4, 8]",
)  # fmt: skip
MPIDIST = [sys.executable, "-m", "mpidist"]
TRAIN = [*MPIDIST, "train", str(JOB), *(word for s in SETTINGS for word in ("--set", s))]


def trained(folder, ranks, fault=""):
    """Run it under `mpidist launch`: (what came of it, summary, the steps that were made)."""
    environ = {**os.environ, "MPIDIST_TESTING": "1", "MPIDIST_FAULT": fault}
    command = [*MPIDIST, "launch", "-n", str(ranks), "--", *TRAIN]
    done = run(command, env=environ, cwd=folder, timeout=300)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    facts = json.loads((folder / "run" / "summary.json").read_text())
    return done, facts, [json.loads(line)["step"] for line in lines]


def check(done, facts, made, reference):
    """What is wrong, or nothing."""
    resumed = facts["resumed_at"]
    before = len(made) - (STEPS - resumed)
    wrong = []
    if done.returncode or facts["steps"] != STEPS:
        wrong.append(f"exit code {done.returncode}, {facts['steps']} steps")
    if facts["restarts"] != 1:
        wrong.append(f"{facts['restarts']} restarts")
    if made != [*range(1, before + 1), *range(resumed + 1, STEPS + 1)] or resumed > before:
        wrong.append("a step is missing or was made out of turn")
    if facts["parameters_sha256"] != reference["parameters_sha256"]:
        wrong.append("other weights")
    return wrong


def main(runs, first=0):
    """Kill so many runs; returns how many failed."""
    folder = Path(tempfile.mkdtemp(prefix="killed-often-"))
    failed, seconds = 0, []
    try:
        (folder / "undisturbed").mkdir()
        _, reference, made = trained(folder / "undisturbed", 2)
        assert made == list(range(1, STEPS + 1))
        for number in range(first, first + runs):
            draw = random.Random(number)
            ranks, place = draw.choice([3, 4]), draw.choice(["step", "exchange", "save"])
            step = draw.randrange(2, STEPS)
            if place == "save":
                step = EVERY * draw.randrange(1, STEPS // EVERY + 1)
            rank = draw.randrange(ranks)
            one = folder / str(number)
            one.mkdir()
            fault = f"kill@{place}:{step},rank={rank}"
            done, facts, made = trained(one, ranks, fault)
            wrong = check(done, facts, made, reference)
            seconds.append(done.seconds)
            if wrong:
                failed += 1
                print(f"run {number}, {ranks} ranks, {fault}: {'; '.join(wrong)}", flush=True)
                print(done.stderr[-3000:], flush=True)
            shutil.rmtree(one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{runs - failed} of {runs} killed runs finished, every sample once, equal weights; "
          f"{statistics.median(seconds):.1f} s each")  # fmt: skip
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*map(int, sys.argv[1:] or ["100"])), 1))
