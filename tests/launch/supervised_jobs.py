"""Start a small job under `mpidist launch`, and find out how it ended and which files it left."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from digits_job import write_job
from until import wait_until

from mpidist.launch.processes import Started, marked

MPIDIST = [sys.executable, "-m", "mpidist"]
TRAIN = [*MPIDIST, "train", "job.toml"]
#: Small, and with the same bits on any number of ranks.
SETTINGS = {"steps": 120, "checkpoint_every": 25, "microbatches": 12, "log_every": 1}
#: The command on a machine on which a rank may use these cores.
ON_CORES = """
import os, sys
from mpidist.launch import claims
from mpidist.cli.main import main
rank = claims.rank_hint(os.environ)
os.sched_getaffinity = lambda pid: %s
sys.exit(main())
"""
#: For a run that must not be over before somebody has done something to it.
SLOWLY = "sleep@step,ms=200"


def supervised(folder, *options, fault="", program=TRAIN, **more):
    """Start `mpidist launch` with a fault; MPI's own shared memory is its affair."""
    if not (folder / "job.toml").exists():
        write_job(folder, **SETTINGS)
    environ = {**os.environ, "MPIDIST_TESTING": "1", "MPIDIST_FAULT": fault, **more}
    return Started([*MPIDIST, "launch", *options, "--", *program], env=environ, cwd=folder)


def finish(job, code=0, timeout=240):
    """Wait for the end: its code, and no process left, though nobody swept yet."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(timeout)
    left = marked(job.mark)
    done = job.finish(0)
    assert done.returncode == code, done.stderr
    assert left == [], done.stderr
    return done


def run(folder, *options, code=0, **more):
    return finish(supervised(folder, *options, **more), code)


def summary(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def steps(folder):
    """The steps of metrics.jsonl, in the order they were made."""
    # The last line may be half written.
    lines = (folder / "run" / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line)["step"] for line in lines]


def check_whole(folder, undisturbed, reached, restarts=1):
    """Every sample once: none left out, only steps since the checkpoint again; the same weights.

    `reached`: the last step of the first attempt; None where that may be any. Rank 0, which writes
    of the steps, may be ended before it has written of the last one.
    """
    facts = summary(folder)
    assert (facts["steps"], facts["restarts"]) == (120, restarts)
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert facts["test_accuracy"] == undisturbed["test_accuracy"]
    made, resumed = steps(folder), facts["resumed_at"]
    before = len(made) - (120 - resumed)
    assert made == [*range(1, before + 1), *range(resumed + 1, 121)]
    assert resumed <= before
    if reached is not None:
        assert before in (reached - 1, reached)
        # The newest may have been on its way to the disk still.
        assert resumed in (reached // 25 * 25, reached // 25 * 25 - 25)
    assert not list(folder.glob(".mpidist-launch-*"))


def wait_for_step(job, folder, step):
    """Wait until a step is in the metrics."""
    metrics = folder / "run" / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and max(steps(folder), default=0) >= step,
        150, otherwise=lambda: f"no step {step}: {job.finish(0).stderr}", job=job.process,
    )  # fmt: skip


def children(pid):
    return map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
