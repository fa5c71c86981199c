"""Injected faults in saves and in saved files: the job ends or continues as documented.

The numbers of the cases are those in docs/faults.md.
"""

import json
import sys

import pytest
from digits_job import write_job
from tiers import exhaustive
from until import wait_until

from mpidist.checkpoint.histories import all_steps
from mpidist.checkpoint.load import load_step
from mpidist.launch.launchers import launch, start
from mpidist.launch.processes import end_marked

TRAIN = [sys.executable, "-m", "mpidist", "train", "job.toml"]
#: The same bits on any number of ranks; a save each 10 steps, in the background but for the last.
SETTINGS = {"steps": 40, "checkpoint_every": 10, "microbatches": 12, "keep": 10}


def environ(fault):
    return {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": fault, "OMP_NUM_THREADS": "1"}


def train(folder, ranks, fault="", options=(), **settings):
    write_job(folder, **{**SETTINGS, **settings})
    return launch(ranks, [*TRAIN, *options], env=environ(fault), cwd=folder, timeout=150)


def summary(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def saved(folder):
    return all_steps(str(folder / "run" / "checkpoints"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, 3).check()
    assert saved(folder) == [10, 20, 30, 40]
    return summary(folder)


def check_end(folder, undisturbed):
    facts = summary(folder)
    assert facts["steps"] == 40
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]
    return facts


@pytest.mark.parametrize(
    ("fault", "ranks", "steps"),
    [exhaustive("file.rename:4,rank=0", 1, {10}), ("file.write_at:4,rank=1", 2, {10}),
     exhaustive("file.remove_file:2,rank=0", 3, {20})],
)  # fmt: skip
def test_killed_while_it_saves(tmp_path, undisturbed, fault, ranks, steps):
    """Failure 5: the newest step is the one before or the one that was being saved, and whole."""
    done = train(tmp_path, 3, f"kill@{fault}")
    assert done.returncode != 0
    assert not done.timed_out
    assert f"fault: kill at {fault.partition(':')[0]}" in done.stderr
    step, state = load_step(tmp_path / "run" / "checkpoints")
    assert step in steps
    assert state["run"]["step"] == step
    train(tmp_path, ranks).check()
    assert check_end(tmp_path, undisturbed)["resumed_at"] == step


@pytest.mark.parametrize(
    "fault",
    [
        "file.write_at:4,rank=1",
        exhaustive("file.make_folder:2,rank=0"),
        exhaustive("file.sync:8,rank=0"),
    ],
)
def test_a_full_disk(tmp_path, undisturbed, fault):
    """Failure 8: no space for step 20 on one rank: all go on without it, and save the next."""
    done = train(tmp_path, 3, f"enospc@{fault}").check()
    lines = [line for line in done.stderr.splitlines() if "not saved, the run goes on" in line]
    assert len(lines) == 1
    assert "No space left on device" in lines[0]
    assert "save of step 20 to " in lines[0]
    assert "the same command resumes from step 10" in lines[0]
    assert check_end(tmp_path, undisturbed)["failed_saves"] == 1
    assert saved(tmp_path) == [10, 30, 40]
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {f"step-{step:012d}" for step in (10, 30, 40)}


def test_a_file_cut_while_it_is_written(tmp_path, undisturbed):
    """Failure 9: seen before the commit, by the size; the step is none."""
    done = train(tmp_path, 3, "truncate@file.sync:3,rank=1").check()
    assert "after writing" in done.stderr
    assert check_end(tmp_path, undisturbed)["failed_saves"] == 1
    assert saved(tmp_path) == [10, 30, 40]


@pytest.mark.exhaustive
def test_a_bit_that_flips_on_the_disk(tmp_path, undisturbed):
    """Failure 10: in what rank 1 has written of step 20, which is the newest: it is passed over."""
    fault = "flip@file.sync:3,rank=1,seed=1"
    train(tmp_path, 3, fault, stop_after=20).check()
    assert saved(tmp_path) == [10, 20]
    done = train(tmp_path, 2).check()
    assert done.stderr.count("damaged checkpoint passed over") == 1
    assert "step-000000000020" in done.stderr
    assert check_end(tmp_path, undisturbed)["resumed_at"] == 10


@pytest.mark.exhaustive
def test_killed_when_only_the_node_has_the_step(tmp_path, undisturbed):
    """Issue 4, point 4: between the commit on the node and the one in the shared folder."""
    node = tmp_path / "node"
    # Renamed by rank 0: the run's name, the node's table and step; then the shared table.
    fault = "kill@file.rename:4,rank=0"
    more = {"local": str(node), "checkpoint_every": 100}
    done = train(tmp_path, 3, fault, stop_after=20, **more)
    assert "fault: kill at file.rename" in done.stderr
    assert saved(tmp_path) == []
    assert [path.name for path in node.glob("*/step-*")] == ["step-000000000020"]
    train(tmp_path, 3, options=["--resume"], **more).check()
    assert check_end(tmp_path, undisturbed)["resumed_at"] == 20
    assert saved(tmp_path) == [40]
    assert not list(node.iterdir())
    none = train(tmp_path, 2, options=["--resume", "--set", "out=none"], **more)
    assert none.returncode == 2
    assert "no checkpoint" in none.stderr


@pytest.mark.exhaustive
def test_a_job_that_stands_still_keeps_others_out(tmp_path, undisturbed):
    """Failure 11: a second job is refused, by the name of the first, until that is dead."""
    write_job(tmp_path, **SETTINGS)
    first = start(2, TRAIN, env=environ("stop@save:20"), cwd=tmp_path)
    try:
        wait_until(lambda: saved(tmp_path) == [10], 150, job=first.process)
        second = train(tmp_path, 2)
        assert second.returncode == 2
        assert second.stderr.count("is in use by process ") == 1
        assert "--set out=DIR" in second.stderr
        assert saved(tmp_path) == [10]
        assert len(list((tmp_path / "run" / "starts").glob("*.json"))) == 1
        end_marked(first.mark)
    finally:
        first.finish(0)
    train(tmp_path, 3).check()
    assert check_end(tmp_path, undisturbed)["resumed_at"] == 10
