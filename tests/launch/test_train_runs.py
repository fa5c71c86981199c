"""Whole runs of `mpidist train`: their files, and how they continue after a signal or a kill."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from digits_job import write_job
from until import wait_until

from mpidist.launch.launchers import launch, start
from mpidist.launch.processes import marked, signal_all

MPIDIST = [sys.executable, "-m", "mpidist"]
#: The ring, since what "auto" measures to be fastest may add in another order in the next run.
RING = '[strategy]\nalgorithm = "ring"\n'
STEPS = 400
SETTINGS = {"steps": STEPS, "checkpoint_every": 60, "log_every": 1}
#: For a run that must not be over before somebody has done something to it.
SLOW = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": "sleep@step,ms=100"}
#: What DESIGN names as the least; users' scripts read these.
SUMMARY = {
    "test_accuracy", "train_loss", "steps", "epochs", "ranks", "wall_seconds",
    "samples_per_second", "rank_hours", "resizes", "skipped_records", "parameters_sha256",
}  # fmt: skip


def train(folder, ranks, *words):
    """Run to the end and return the summary."""
    command = [*MPIDIST, "train", "job.toml", *words]
    launch(ranks, command, cwd=folder, timeout=300).check()
    settings = dict(w.split("=", 1) for w in words if w.startswith("out="))
    return summary(folder / settings.get("out", "run"))


def summary(run):
    return json.loads((run / "summary.json").read_text())


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def under_way(job, run):
    """Wait until steps are logged, and return the pids of the ranks."""
    metrics = run / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and metrics.read_text().count("\n") > 5,
        120, otherwise=job.output, job=job.process,
    )  # fmt: skip
    ranks = []
    for pid in marked(job.mark):
        # A helper of the launcher may have ended while we look.
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if command[:3] == [word.encode() for word in MPIDIST]:
                ranks.append(pid)
    return ranks


# ------------------------------------------------------------------- what happens, side by side


def other(folder):
    write_job(folder, RING, **SETTINGS)
    return train(
        folder, 3, "--set", "out=other", "--set", "steps=40", "--set", "seed=3",
        "--set", 'strategy={name="parameter_server", servers=1}', "--set", "log_every=5",
        "--set", "strategy.consistency=ssp", "--set", "strategy.staleness=2",
        "--set", 'optimizer.lr={schedule="cosine", lr=0.02}',
    )  # fmt: skip


def asked_to_stop(folder, launcher=False):
    """How it left, and the summary of the same command again."""
    write_job(folder, RING, **SETTINGS)
    job = start(3, [*MPIDIST, "train", "job.toml"], cwd=folder, env=SLOW)
    try:
        ranks = under_way(job, folder / "run")
        assert len(ranks) == 3
        if launcher:
            job.process.terminate()
        else:
            signal_all(ranks, signal.SIGUSR1)
    finally:
        result = job.finish(120)
    assert not (folder / "run" / "summary.json").exists()
    return result, train(folder, 3)


def launcher_told_to_end(folder):
    return asked_to_stop(folder, launcher=True)


def killed(folder):
    """How it left, the newest step that was saved, and the summary of a run that goes on."""
    write_job(folder, RING, **SETTINGS)
    words = ["--set", "checkpoint_every=20", "--set", "steps=1000000", "--set", "log_every=20"]
    job = start(3, [*MPIDIST, "train", "job.toml", *words], cwd=folder)
    try:
        ranks = under_way(job, folder / "run")
        memory = shared_memory(marked(job.mark))
        for pid in ranks:
            # The launcher may have ended it for the one before.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not marked(job.mark), 30, every=0.05)
        assert [path for path in memory if path.exists()] == []
    finally:
        result = job.finish(1)
    saved = max(int(path.name[5:]) for path in (folder / "run" / "checkpoints").glob("step-*"))
    return result, saved, train(folder, 2, "--set", f"steps={saved + 10}")


@pytest.fixture(scope="module")
def scenes():
    return {f.__name__: f for f in (asked_to_stop, launcher_told_to_end, killed, other)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(write_job(tmp_path_factory.mktemp("undisturbed"), RING, **SETTINGS), 3)


# ------------------------------------------------------------------------------ what came of it


@pytest.mark.parametrize("scene", ["other"], indirect=True)
def test_what_a_run_leaves(scene):
    """R104, R59: summary, metrics and events are there and can be read; --set reaches any depth."""
    facts, folder = scene
    run = folder / "other"
    assert set(facts) >= SUMMARY
    assert (facts["steps"], facts["ranks"], facts["workers"]) == (40, 3, 2)
    assert 0 < facts["test_accuracy"] <= 1
    assert len(facts["parameters_sha256"]) == 64
    assert facts["rank_hours"] == pytest.approx(3 * facts["wall_seconds"] / 3600, rel=1e-4)
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(5, 41, 5))
    assert all({"time", "loss", "compute_seconds", "exchange_seconds"} <= set(m) for m in metrics)
    for rank in range(3):
        events = lines(run / "events" / f"rank-{rank}.jsonl")
        assert events
        assert all(event["rank"] == rank and event["event"] and event["host"] for event in events)
    assert any(event["event"] == "checkpoint" for event in lines(run / "events" / "rank-0.jsonl"))
    assert list((run / "checkpoints").glob("step-*"))


def check_resumed(resumed, undisturbed):
    assert resumed["steps"] == undisturbed["steps"] == STEPS
    assert resumed["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert resumed["test_accuracy"] == undisturbed["test_accuracy"]


@pytest.mark.parametrize("scene", ["asked_to_stop"], indirect=True)
def test_signal_then_plain_rerun(scene, undisturbed):
    """R44, R47, R106: code 75, and the same command again ends with the undisturbed bits."""
    (result, resumed), _ = scene
    assert result.returncode == 75, result.stderr
    assert "Traceback" not in result.stderr
    assert 0 < resumed["resumed_at"] < STEPS
    check_resumed(resumed, undisturbed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scene", ["launcher_told_to_end"], indirect=True)
def test_mpirun_is_told_to_end(scene, undisturbed):
    """R47: SIGTERM to the launcher leaves the ranks half a second; nothing is lost but steps."""
    (result, resumed), _ = scene
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    check_resumed(resumed, undisturbed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scene", ["killed"], indirect=True)
def test_kill_of_all_ranks_then_plain_rerun(scene):
    """R140: nothing stays behind, and the same command goes on from the newest save."""
    (result, saved, resumed), _ = scene
    assert result.returncode not in (0, 75)
    # The newest may be a step whose save was cut short; then it is the one before.
    assert saved - 20 <= resumed["resumed_at"] <= saved
    assert resumed["steps"] == saved + 10


def shared_memory(pids):
    """Files of /dev/shm that these processes have mapped, by whatever name."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith("/dev/shm/"):
                    found.add(Path(path.removesuffix(" (deleted)")))
    return found
