"""Whole runs of `mpidist train`: what they write, and how they go on after a signal and a kill."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from mpidist.testing.launch import launch, start
from mpidist.testing.process import marked, signal_all

MPIDIST = [sys.executable, "-m", "mpidist"]
#: The ring, since what "auto" measures to be fastest may add in another order in the next run.
JOB = """
global_batch = 60
steps = 3000
checkpoint_every = 500
out = "run"
[data]
name = "digits"
[model]
name = "mlp"
sizes = [[1, 8, 8], 24, 10]
[optimizer]
name = "momentum"
lr = 0.02
[strategy]
algorithm = "ring"
"""
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
    deadline = time.monotonic() + 120
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 5):
        assert time.monotonic() < deadline, job.output()
        assert job.process.poll() is None, job.output()
        time.sleep(0.01)
    ranks = []
    for pid in marked(job.mark):
        # A helper of the launcher may have ended while we look.
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if command[:3] == [word.encode() for word in MPIDIST]:
                ranks.append(pid)
    return ranks


def test_what_a_run_leaves(tmp_path):
    """R104, R59: summary, metrics and events are there and can be read; --set reaches any depth."""
    (tmp_path / "job.toml").write_text(JOB)
    facts = train(
        tmp_path, 3, "--set", "out=other", "--set", "steps=40", "--set", "seed=3",
        "--set", 'strategy={name="parameter_server", servers=1}', "--set", "log_every=5",
        "--set", "strategy.consistency=ssp", "--set", "strategy.staleness=2",
        "--set", 'optimizer.lr={schedule="cosine", lr=0.02}',
    )  # fmt: skip
    run = tmp_path / "other"
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


def test_signal_then_plain_rerun(tmp_path):
    """R44, R47, R106: code 75, and the same command again ends with the undisturbed bits."""
    (tmp_path / "job.toml").write_text(JOB)
    undisturbed = train(tmp_path, 3, "--set", "out=undisturbed")
    assert undisturbed["steps"] == 3000
    job = start(3, [*MPIDIST, "train", "job.toml"], cwd=tmp_path)
    try:
        ranks = under_way(job, tmp_path / "run")
        assert len(ranks) == 3
        signal_all(ranks, signal.SIGUSR1)
    finally:
        result = job.finish(120)
    assert result.returncode == 75, result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
    resumed = train(tmp_path, 3)
    assert 0 < resumed["resumed_at"] < 3000
    assert resumed["steps"] == 3000
    assert resumed["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert resumed["test_accuracy"] == undisturbed["test_accuracy"]


def test_kill_of_all_ranks_then_plain_rerun(tmp_path):
    """R140: nothing stays behind after 5 s, and the same command goes on from the newest save."""
    (tmp_path / "job.toml").write_text(JOB)
    words = ["--set", "checkpoint_every=20", "--set", "steps=1000000"]
    job = start(3, [*MPIDIST, "train", "job.toml", *words], cwd=tmp_path)
    try:
        ranks = under_way(job, tmp_path / "run")
        memory = shared_memory(marked(job.mark))
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while marked(job.mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked(job.mark) == []
        assert [path for path in memory if path.exists()] == []
    finally:
        result = job.finish(1)
    assert result.returncode not in (0, 75)
    saved = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    resumed = train(tmp_path, 2, "--set", f"steps={saved + 10}")
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
