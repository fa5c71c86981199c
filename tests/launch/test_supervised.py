"""Under `mpidist launch`, ranks die, hang or are stopped, and the job still ends undisturbed."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from again import best_of_three
from digits_job import write_job
from python_path import python_path
from supervised_jobs import (
    ON_CORES,
    SETTINGS,
    SLOWLY,
    TRAIN,
    check_whole,
    children,
    finish,
    run,
    steps,
    summary,
    supervised,
    wait_for_step,
)
from tiers import exhaustive
from until import holds_within

from mpidist.launch import heartbeat
from mpidist.launch.processes import Started, marked, signal_all


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, "-n", "2").stderr.count("mpidist launch:") == 0
    return summary(folder)


# ------------------------------------------------------------------- what happens, side by side


def launcher_is_killed(folder):
    job = supervised(folder, "-n", "2", fault="sleep@step:50,ms=100000")
    wait_for_step(job, folder, 49)
    for pid in children(job.pid):
        os.kill(pid, signal.SIGKILL)
    return finish(job)


def asked(folder):
    """Asked twice, each time by another signal, and the same command again."""
    last = 0
    for number in (signal.SIGUSR1, signal.SIGTERM):
        job = supervised(folder, "-n", "2", fault=SLOWLY)
        wait_for_step(job, folder, last + 5)
        job.process.send_signal(number)
        finish(job, 75)
        last = max(steps(folder))
        assert not (folder / "run" / "summary.json").exists()
    return run(folder, "-n", "3")


def preempted(folder):
    job = supervised(
        folder, "-n", "2", "--preempted", "relaunch", "--max-restarts", "0",
        fault=SLOWLY,
    )  # fmt: skip
    wait_for_step(job, folder, 5)
    (control,) = folder.glob(".mpidist-launch-*")
    signal_all(
        [sign.pid for sign in heartbeat.read_heartbeats(control / "attempt-0")], signal.SIGUSR1
    )
    return finish(job)


def mpidist_launch_is_killed(folder):
    """What was said, and who was left after a minute."""
    job = supervised(folder, "-n", "2", fault=SLOWLY)
    wait_for_step(job, folder, 5)
    job.process.kill()
    holds_within(lambda: not marked(job.mark), 60, every=0.1)
    left = marked(job.mark)
    return job.finish(0), left


def server_is_killed(folder):
    """Of two workers and a server, which reaches no point of a fault while it serves."""
    tables = '[strategy]\nname = "parameter_server"\nservers = 1\n'
    write_job(folder, tables, **{k: v for k, v in SETTINGS.items() if k != "microbatches"})
    job = supervised(folder, "-n", "3", fault="sleep@step:60,ms=100000")
    wait_for_step(job, folder, 59)
    (control,) = folder.glob(".mpidist-launch-*")
    os.kill(heartbeat.read_heartbeats(control / "attempt-0")[2].pid, signal.SIGKILL)
    return finish(job)


#: Python runs this at its start: the clock of one rank is an hour ahead.
WRONG_CLOCK = """
import os, time
right = time.time
if "1" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    time.time = lambda: right() + 3600
"""


def killed_beside_a_wrong_clock(folder):
    (folder / "sitecustomize.py").write_text(WRONG_CLOCK)
    fault = "kill@exchange:60,rank=random,seed=5"
    return run(folder, "-n", "3", fault=fault, PYTHONPATH=python_path(folder))


#: Two at once; then one before the job has begun again; then one in a save.
THREE = (
    "kill@exchange:40,rank=1; kill@exchange:40,rank=2; kill@start,rank=0,attempt=1; "
    "kill@save:50,rank=1,attempt=2"
)


@pytest.fixture(scope="module")
def scenes():
    return SCENES


SCENES = {
    "rank 2 of 3 killed": killed_beside_a_wrong_clock,
    "rank 0 of 4 killed": lambda folder: run(folder, "-n", "4", fault="kill@exchange:26,rank=0"),
    "a rank stopped": lambda folder: run(
        folder, "-n", "3", "--heartbeat", "10", fault="stop@step:40,rank=1"
    ),
    "three times": lambda folder: run(folder, "-n", "3", fault=THREE),
    "server killed": server_is_killed,
    "launcher killed": launcher_is_killed,
    "always": lambda folder: run(
        folder, "-n", "2", code=1, fault="raise@step:30,rank=1,attempt=any"
    ),
    "bad input": lambda folder: run(
        folder, "-n", "2", code=2, program=[*TRAIN, "--set", "epoch=3"]
    ),
    "asked": asked,
    "preempted": preempted,
    "mpidist launch killed": mpidist_launch_is_killed,
}


def plays(*names):
    return pytest.mark.parametrize("scene", names, indirect=True)


# ------------------------------------------------------------------------------ what came of it


@pytest.mark.parametrize(
    ("scene", "step"),
    [("rank 2 of 3 killed", 60), exhaustive("rank 0 of 4 killed", 26)],
    indirect=["scene"],
)
def test_a_rank_is_killed(scene, undisturbed, step):
    """R140: `mpidist launch` goes on from the newest checkpoint, to the same bits.

    In the first scene a rank's clock is an hour ahead: clocks of different hosts are not compared.
    """
    done, folder = scene
    assert done.stderr.count("mpidist launch: attempt 0 on") == 1
    assert f"at step {step - 1}" in done.stderr
    check_whole(folder, undisturbed, step - 1)


@pytest.mark.exhaustive
@plays("three times")
def test_killed_again_while_it_comes_back(scene, undisturbed):
    """R140: two ranks at once, one at the start of the next attempt, one in a save of the third."""
    done, folder = scene
    # Of the first two one may be ended for the other before it gets there.
    assert done.stderr.count("mpidist: fault: kill at ") in (3, 4)
    facts = summary(folder)
    assert (facts["steps"], facts["restarts"]) == (120, 3)
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]
    # Step 50 was on its way to the disk.
    assert facts["resumed_at"] in (25, 50)


@plays("server killed")
def test_a_server_is_killed(scene):
    """R140: what it held comes from the checkpoint, and is not made anew."""
    _, folder = scene
    facts = summary(folder)
    assert (facts["steps"], facts["restarts"], facts["workers"]) == (120, 1, 2)
    assert facts["resumed_at"] in (25, 50)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [(line["step"], line["loss"]) for line in map(json.loads, lines)]
    before, again = (loss for step, loss in losses if step == facts["resumed_at"] + 1)
    assert again == pytest.approx(before, rel=1e-4)
    assert sorted({step for step, _ in losses}) == list(range(1, 121))


@plays("a rank stopped")
def test_a_rank_is_stopped(scene, undisturbed):
    """R56: nobody's exit tells of a rank that stands still; its missing beat does."""
    done, folder = scene
    assert "rank 1 on" in done.stderr
    assert "gave no sign for 10 s" in done.stderr
    # Ended by SIGTERM it is set going first, and may get some way yet.
    check_whole(folder, undisturbed, None)


@plays("launcher killed")
def test_the_launcher_is_killed(scene, undisturbed):
    """Open MPI's ranks would go on without it for ever, and write where the next attempt does."""
    done, folder = scene
    assert "signal 9 at step 49" in done.stderr
    check_whole(folder, undisturbed, 49)


@plays("always")
def test_the_same_failure_twice_is_the_last(scene):
    """A step that cannot be done is not tried for ever; what is known of it is kept."""
    done, folder = scene
    assert "the same failure twice at step 29" in done.stderr
    assert done.stderr.count("fault at step:30") == 2
    (kept,) = folder.glob(".mpidist-launch-*")
    history = [json.loads(line) for line in (kept / "history.jsonl").read_text().splitlines()]
    assert [line["event"] for line in history] == ["attempt", "decision"] * 2
    assert [sign.failed for sign in heartbeat.read_heartbeats(kept / "attempt-1")] == [False, True]


@plays("bad input")
def test_bad_input_is_not_tried_again(scene):
    done, _ = scene
    assert done.stderr.count("did you mean 'epochs'?") == 1
    assert "exit code 2 means bad input" in done.stderr


@pytest.mark.exhaustive
@plays("asked")
def test_asked_to_save_and_leave(scene, undisturbed):
    """R47: either signal reaches all ranks; code 75, and the same command goes on."""
    _, folder = scene
    facts = summary(folder)
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert steps(folder) == list(range(1, 121)), "no step twice: it saved the one it left at"


@plays("preempted")
def test_preempted_runs_may_go_on_at_once(scene, undisturbed):
    """R106: what saved and left comes back, and none of the restarts is spent for it."""
    done, folder = scene
    assert done.stderr.count("again with 2 ranks") == 1
    assert steps(folder) == list(range(1, 121))
    facts = summary(folder)
    assert facts["restarts"] == 1
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]


@plays("mpidist launch killed")
def test_mpidist_launch_is_killed(scene):
    """Its ranks notice, save, and leave: nobody would ever end them otherwise."""
    (done, left), folder = scene
    assert left == []
    assert "mpidist launch is gone" in done.stderr
    saved = [path.name for path in (folder / "run" / "checkpoints").glob("step-*")]
    assert saved
    assert max(steps(folder)) in [int(name[5:]) for name in saved]


def test_an_error_of_mpi_blames_nobody(tmp_path):
    """It mostly means that another rank is gone: its host is not the one to be left out."""
    program = (
        "import mpidist as md\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
        "with md.guard(comm):\n"
        "    if comm.rank == 1:\n        raise MPI.Exception(MPI.ERR_OTHER)\n"
        "    comm.Barrier()\n"
    )
    run(tmp_path, "-n", "2", "--max-restarts", "0", code=1, program=[sys.executable, "-c", program])
    (kept,) = tmp_path.glob(".mpidist-launch-*")
    assert [sign.failed for sign in heartbeat.read_heartbeats(kept / "attempt-0")] == [False, False]


def test_any_program(tmp_path):
    """A program that knows nothing of us has its exit code only; and its restarts."""
    once = "import os, sys; sys.exit(5 if os.environ['MPIDIST_ATTEMPT'] == '0' else 0)"
    done = run(tmp_path, "-n", "2", program=[sys.executable, "-c", once])
    assert "exit code 5" in done.stderr
    always = "import sys; sys.exit(5)"
    done = run(tmp_path, "-n", "2", "--max-restarts", "1", code=5,
               program=[sys.executable, "-c", always])  # fmt: skip
    assert "2 failures within an hour, and --max-restarts is 1" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [(["-n", "0"], "at least one rank"), (["-n", "2", "--min-ranks", "3"], "expected 1 to 2"),
     (["-n", "2", "--hosts", "a:0"], "--hosts"), (["-n", "2", "--preempted", "requeue"], "Slurm")],
)  # fmt: skip
def test_options_that_cannot_be(tmp_path, words, said):
    done = run(tmp_path, *words, code=2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def stragglers(folder, fault="", cores="{rank}"):
    """What rank 0's event log has of slow ranks, what was said, and when step 31 was done."""
    out = tempfile.mkdtemp(dir=folder)
    words = ["job.toml", "--set", f"out={out}", "--set", "steps=60"]
    program = [sys.executable, "-c", ON_CORES % cores, "train", *words]
    done = run(folder, "-n", "4", program=program, fault=fault)
    events, metrics = (
        [json.loads(line) for line in Path(out, name).read_text().splitlines()]
        for name in ("events/rank-0.jsonl", "metrics.jsonl")
    )
    named = [line for line in events if line["event"] == "straggler"]
    return named, done.stderr, next(line["time"] for line in metrics if line["step"] == 31)


@pytest.mark.exhaustive
def test_a_slow_rank_is_named(tmp_path):
    """R45: by rank, phase and lag, within 30 steps; and nobody is where nobody is slow.

    Nor is anybody where ranks share cores and take turns.
    """

    def named(made):
        found, said, in_time = made
        assert len(found) == 1
        slow = found[0]
        assert slow["time"] < in_time
        assert (slow["straggler"], slow["phase"]) == (2, "gradients")
        assert slow["lag_ms"] > 40
        assert "the others wait for rank 2 on" in said

    def nobody(made):
        found, said, _ = made
        assert found == []
        assert "the others wait for" not in said

    best_of_three(named, lambda: stragglers(tmp_path, "sleep@step,rank=2,ms=50"))
    best_of_three(nobody, lambda: stragglers(tmp_path))
    nobody(stragglers(tmp_path, "sleep@step,rank=2,ms=50", cores="{0, 1}"))


@pytest.mark.exhaustive
def test_bench_relaunch(tmp_path):
    """The figure of docs/benchmarks.md, of one kill."""
    words = [sys.executable, "-m", "benchmarks.relaunch", "--ranks", "2", "--rounds", "1"]
    environ = {**os.environ, "PYTHONPATH": python_path()}
    job = Started([*words, "--json", "out.json"], env=environ, cwd=tmp_path)
    done = job.finish(240).check()
    assert "from a killed rank to the next completed step, 2 ranks" in done.stdout
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert 0 < row["ours"] < 60
