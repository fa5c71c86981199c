"""Runs with ``microbatches=V``: one digest on any number of ranks (issue 3, point 5)."""

import json
import sys
from pathlib import Path

from mpidist.testing.launch import launch

JOB = Path(__file__).parents[2] / "jobs" / "digits.toml"
STEPS = ["--set", "microbatches=16", "--set", "steps=24", "--set", "data.distort.copies=1"]


def train(folder, out, ranks, *words):
    """Run to the end; returns the summary and what rank 0 has printed."""
    words = [*STEPS, "--set", f"out={out}", *words]
    command = [sys.executable, "-m", "mpidist", "train", str(JOB), *words]
    result = launch(ranks, command, cwd=folder, timeout=120).check()
    return json.loads((folder / out / "summary.json").read_text()), result.stdout


def test_one_digest_at_1_3_and_4_ranks_and_after_a_resume_on_others(tmp_path):
    """One rank sends nothing, so equal to it on this MPI is equal to it on any other.

    The last of the 23 steps of an epoch has 29 samples for 16 pieces.
    """
    alone, _ = train(tmp_path, "one", 1)
    assert alone["microbatches_price"] is None
    for ranks in (3, 4):
        several, said = train(tmp_path, f"ranks{ranks}", ranks)
        assert several["parameters_sha256"] == alone["parameters_sha256"]
        assert several["train_loss"] == alone["train_loss"]
        price = several["microbatches_price"]
        assert price["microbatches"] == 16
        took = f"one exchange takes {price['ordered_us']:.0f} us in the fixed order"
        assert f"microbatches=16: the same bits on any number of ranks; {took}" in said
    train(tmp_path, "pause", 4, "--set", "stop_after=9")
    paused, _ = train(tmp_path, "pause", 2, "--set", "stop_after=17")
    assert (paused["resumed_at"], paused["steps"]) == (9, 17)
    resumed, _ = train(tmp_path, "pause", 3)
    assert (resumed["resumed_at"], resumed["finished"]) == (17, True)
    assert resumed["parameters_sha256"] == alone["parameters_sha256"]


def test_bad_input_is_one_line_before_mpi(tmp_path):
    for words, line in (
        (["microbatches=65"], "microbatches=65 is more than the 64 samples of a global batch"),
        (["microbatches=0"], "microbatches=0; expected 1 or more"),
        (["strategy.name=parameter_server"], "microbatches=16 needs the allreduce strategy"),
    ):
        command = [sys.executable, "-m", "mpidist", "train", str(JOB), *STEPS]
        for word in words:
            command += ["--set", word]
        result = launch(1, command, cwd=tmp_path, timeout=60)
        assert result.returncode == 2
        assert line in result.stderr
        assert result.stderr.strip().count("\n") == 0
