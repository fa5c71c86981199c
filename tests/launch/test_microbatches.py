"""Runs with ``microbatches=V`` end with one digest on any number of ranks (issue 3, point 5)."""

import json
import sys
from pathlib import Path

import pytest
from commands import play_commands

from mpidist.launch.launchers import launch

JOB = Path(__file__).parents[2] / "jobs" / "digits.toml"
STEPS = [
    word
    for setting in ("microbatches=16", "steps=24", "data.distort.copies=1", "model.channels=[8,16]")
    for word in ("--set", setting)
]


def command(out, *words):
    train = [sys.executable, "-m", "mpidist", "train", str(JOB)]
    return [*train, *STEPS, "--set", f"out={out}", *words]


def summary(folder, out):
    return json.loads((folder / out / "summary.json").read_text())


@pytest.mark.exhaustive
def test_one_digest_at_1_3_and_4_ranks_and_after_a_resume_on_others(tmp_path, launches):
    """One rank sends nothing, so equal to it on this MPI is equal to it on any other.

    The last of the 23 steps of an epoch has 29 samples for 16 pieces.
    """
    jobs = {f"ranks{ranks}": (ranks, command(f"ranks{ranks}")) for ranks in (1, 3, 4)}
    jobs["pause"] = 4, command("pause", "--set", "stop_after=9")
    said = {out: result.check().stdout for out, result in launches(jobs, cwd=tmp_path).items()}
    alone = summary(tmp_path, "ranks1")
    assert alone["ordered_sum_overhead"] is None
    for out in ("ranks3", "ranks4"):
        several = summary(tmp_path, out)
        assert several["parameters_sha256"] == alone["parameters_sha256"]
        assert several["train_loss"] == alone["train_loss"]
        price = several["ordered_sum_overhead"]
        assert price["microbatches"] == 16
        took = f"one exchange takes {price['ordered_us']:.0f} us in the fixed order"
        assert f"microbatches=16: the same bits on any number of ranks; {took}" in said[out]
    launch(2, command("pause", "--set", "stop_after=17"), cwd=tmp_path, timeout=120).check()
    paused = summary(tmp_path, "pause")
    assert (paused["resumed_at"], paused["steps"]) == (9, 17)
    launch(3, command("pause"), cwd=tmp_path, timeout=120).check()
    resumed = summary(tmp_path, "pause")
    assert (resumed["resumed_at"], resumed["finished"]) == (17, True)
    assert resumed["parameters_sha256"] == alone["parameters_sha256"]


def test_bad_input_is_one_line_before_mpi(tmp_path):
    cases = {
        "microbatches=65": "microbatches=65 is more than the 64 samples of a global batch",
        "microbatches=0": "microbatches=0: expected a whole number of 1 or more",
        "strategy.name=parameter_server": "microbatches=16 needs the allreduce strategy",
    }
    wanted = {line: ["train", JOB, *STEPS, "--set", word] for word, line in cases.items()}
    # Without a launcher, for nothing of it is reached.
    for line, result in play_commands(wanted, tmp_path / "reports", cwd=tmp_path).items():
        assert result.returncode == 2, result.stderr
        assert line in result.stderr
        assert result.stderr.strip().count("\n") == 0
