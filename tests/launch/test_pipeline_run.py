"""`mpidist train` with a pipeline: the bits of allreduce, also after kills and hangs (R60, R88)."""

import json
import signal
import sys

import pytest
from commands import play_commands
from digits_job import write_job
from supervised_jobs import SETTINGS, SLOWLY, finish, run, summary, supervised, wait_for_step
from tiers import tiers

from mpidist.launch.launchers import launch, launch_environment

TRAIN = [sys.executable, "-m", "mpidist", "train", "job.toml"]
PIPELINE = '[strategy]\nname = "pipeline"\n'
#: Forward and backward passes, sends and receives of 12 microbatches.
ACTIONS = 48
#: Long enough for checkpoints before and after a kill in the middle.
SHORT = {**SETTINGS, "steps": 40, "checkpoint_every": 8}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The summary of the same run with allreduce on one rank."""
    folder = write_job(tmp_path_factory.mktemp("alone"), **SHORT)
    launch(1, TRAIN, cwd=folder, timeout=120).check()
    return summary(folder)


def check(folder, alone, ranks):
    found = summary(folder)
    for name in ("parameters_sha256", "test_accuracy", "steps"):
        assert found[name] == alone[name], name
    assert found["ranks"] == ranks
    return found


GRIDS = {
    "two": (2, "cuts = [2]"),
    "measured": (3, ""),
    "grid": (4, "cuts = [1]"),
    "uneven": (4, "cuts = [3]\nreplicas = [3, 1]\nschedule = 'gpipe'"),
    "interleaved": (2, "cuts = [1, 2, 3]\nchunks = 2\nschedule = 'interleaved'"),
}


@pytest.mark.exhaustive
def test_grids_of_a_job_file(tmp_path, alone, launches):
    jobs = {}
    for name, (ranks, words) in GRIDS.items():
        folder = tmp_path / name
        folder.mkdir()
        write_job(folder, PIPELINE + words + "\n", **SHORT)
        jobs[name] = (ranks, [*TRAIN[:-1], f"{name}/job.toml", "--set", f"out={name}/run"])
    for result in launches(jobs, cwd=tmp_path).values():
        result.check()
    drawn = {n: ["pipeline", "trace", f"{n}/run", "--out", f"{n}.json"] for n in GRIDS}
    for each in play_commands(drawn, tmp_path / "reports", cwd=tmp_path).values():
        each.check()
    for name, (ranks, _) in GRIDS.items():
        check(tmp_path / name, alone, ranks)
        trace = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        spans = [one for one in trace if one["ph"] == "X"]
        assert {one["tid"] for one in spans} == set(range(ranks))
        # Each microbatch goes forward and backward through each chunk.
        chunks = {one["args"]["chunk"] for one in spans}
        assert len(spans) == 2 * len(chunks) * SETTINGS["microbatches"]


@pytest.mark.parametrize("action", tiers(range(0, ACTIONS, 7), 0, 7, 14, 21, 28, 42))
def test_a_kill_at_an_action_of_a_step(tmp_path, alone, action):
    """Each at another action of a step, and each time the next attempt ends with the same bits."""
    write_job(tmp_path, PIPELINE + "cuts = [2]\n", **SHORT)
    fault = f"kill@action:{20 * ACTIONS + action},rank={action % 2}"
    run(tmp_path, "-n", "2", fault=fault)
    assert check(tmp_path, alone, 2)["restarts"] == 1


@pytest.mark.exhaustive
def test_a_split_layer_is_resumed_whole(tmp_path):
    """A kill in the run with split layers; its last checkpoint then is one of a whole model."""
    words = PIPELINE + "stages = 1\nsplit_ranks = 2\n"
    write_job(tmp_path, words + "split = {dense1 = 'columns', dense2 = 'rows'}\n", **SETTINGS)
    run(tmp_path, "-n", "2", fault="kill@step:70,rank=1")
    split = summary(tmp_path)
    assert (split["restarts"], split["pipeline"]["split_ranks"]) == (1, 2)
    more = ["--set", "strategy.name=allreduce", "--set", "steps=130"]
    launch(1, [*TRAIN, *more], cwd=tmp_path, timeout=60).check()
    whole = summary(tmp_path)
    assert (whole["resumed_at"], whole["ranks"]) == (120, 1)
    assert min(whole["test_accuracy"], split["test_accuracy"]) > 0.8


def test_a_stage_that_raises_ends_all_ranks(tmp_path):
    """One traceback, that of the rank that failed; nobody hangs."""
    write_job(tmp_path, PIPELINE + "cuts = [1, 3]\n", **SETTINGS)
    fault = launch_environment() | {
        "MPIDIST_TESTING": "1",
        "MPIDIST_FAULT": "raise@action:300,rank=1",
    }
    result = launch(3, TRAIN, cwd=tmp_path, timeout=60, env=fault)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert "RuntimeError: fault at action:300 on rank 1" in result.stderr


def test_the_report_of_a_hang_names_stage_microbatch_and_action(tmp_path):
    write_job(tmp_path, PIPELINE + "cuts = [2]\n", **SETTINGS, watch_seconds=3)
    fault = launch_environment() | {
        "MPIDIST_TESTING": "1",
        "MPIDIST_FAULT": "stop@action:300,rank=0",
    }
    result = launch(2, TRAIN, cwd=tmp_path, timeout=60, env=fault)
    assert result.returncode == 70
    assert "absent: rank 0" in result.stderr
    assert "newest event: pipeline_wait stage=1 replica=0 action=F of microbatch" in result.stderr


def test_a_stop_is_resumed(tmp_path, alone):
    """SIGTERM to `mpidist launch`: all stages save the same step, and the next start goes on."""
    write_job(tmp_path, PIPELINE + "cuts = [2]\n", **SHORT)
    job = supervised(tmp_path, "-n", "2", fault=SLOWLY)
    wait_for_step(job, tmp_path, 5)
    job.process.send_signal(signal.SIGTERM)
    finish(job, 75)
    run(tmp_path, "-n", "2")
    assert check(tmp_path, alone, 2)["resumed_at"] >= 5


def test_bad_input_is_one_line_before_mpi(tmp_path):
    cases = (
        (["strategy.cuts=[3, 2]"], "cuts=[3, 2]; expected rising numbers from 1 on"),
        (["strategy.cuts=[4]"], "the model has 4 layers, so the last cut is 3 at most"),
        (["strategy.stages=5"], "5 parts for the 4 layers of the model"),
        (["strategy.replicas=[2, 2]"], "are 4 ranks, and the job has 2"),
        (["strategy.schedule=interleaved", "strategy.cuts=[1, 2, 3]", "strategy.chunks=2",
          "microbatches=7"], "needs a multiple of the 2 stages; the next one is 8"),
        (["strategy.flush=4"], "flush=4 is for the schedule 'pipedream', not '1f1b'"),
        (["microbatches=0"], "microbatches=0: expected a whole number"),
        (["elastic.min_ranks=1"], "elastic: Pipeline cannot go on after a death"),
        (["optimizer.clip_norm=1.0"], "clip_norm is a norm over all layers"),
        (["strategy.split.dense7=rows", "strategy.stages=2"], "no dense layer 'dense7'"),
        (["strategy.split.dense2=row", "strategy.stages=2"], "'row'; expected 'columns' or 'rows'"),
        (["strategy.split.dense2=columns", "strategy.stages=3"], "2 ranks are no multiple of the"),
    )  # fmt: skip
    write_job(tmp_path, PIPELINE, **SETTINGS)
    wanted = {
        line: ["train", "job.toml", *(word for one in words for word in ("--set", one))]
        for words, line in cases
    }
    ranks = {"OMPI_COMM_WORLD_SIZE": "2"}  # which says here that the job has 2 ranks
    # One of several ranks starts MPI when it has spoken, for the others might wait there.
    ends = play_commands(wanted, tmp_path / "a", cwd=tmp_path, env=ranks, without="")
    for line, result in ends.items():
        assert result.returncode == 2, result.stderr
        # mpi4py on MPICH warns of the variable.
        (said,) = [one for one in result.stderr.splitlines() if one.startswith("mpidist: ")]
        assert line in said
        assert "Traceback" not in result.stderr
    write_job(tmp_path, PIPELINE, **{k: v for k, v in SETTINGS.items() if k != "microbatches"})
    (result,) = play_commands({0: wanted[line][:2]}, tmp_path / "b", cwd=tmp_path).values()
    assert result.returncode == 2
    assert "a pipeline needs microbatches" in result.stderr
