"""`mpidist launch` on a real Slurm: a node goes down under the job, and the rest goes on."""

import json
import time

import pytest
from interpreters import ROOT, job_environment

pytestmark = pytest.mark.slurm

STEPS = 300
SCRIPT = """#!/bin/bash
#SBATCH --job-name=recovery --output=%x-%j.out --nodes=4 --ntasks-per-node=1 --no-kill
exec mpidist launch -n 4 --launcher "$LAUNCHER" -- mpidist train "$1" --set out=run "${@:2}"
"""
SETTINGS = [
    word
    for setting in (f"steps={STEPS}", "microbatches=8", "checkpoint_every=20", "log_every=1",
                    "model.channels=[4,8]", "data.distort.copies=2")
    for word in ("--set", setting)
]  # fmt: skip


def steps(folder):
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def submit(cluster, folder, python, launcher, **more):
    script = folder / "recovery.sbatch"
    script.write_text(SCRIPT)
    environ = {**job_environment(python), "LAUNCHER": launcher, **more}
    job = str(ROOT / "jobs" / "digits.toml")
    return cluster.submit(script, job, *SETTINGS, env=environ, cwd=folder)


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [("openmpi", "mpirun"), ("openmpi", "srun --mpi=pmix"), ("mpich", "srun --mpi=pmi2")],
)
def test_a_node_goes_down(cluster, kind, launcher, request, tmp_path):
    """R49, R140: the node's ranks are gone; three hosts finish, with the undisturbed weights."""
    python = request.getfixturevalue(kind)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    job = cluster.wait(submit(cluster, whole, python, launcher), 150)
    assert job.state == "COMPLETED", job.output
    number = submit(cluster, broken, python, launcher)
    try:
        deadline = time.monotonic() + 100
        while max(steps(broken), default=0) < 30:
            assert time.monotonic() < deadline, cluster.job(number).output
            time.sleep(0.05)
        cluster.run(["scontrol", "update", "nodename=n4", "state=down", "reason=test"]).check()
        job = cluster.wait(number, 150)
    finally:
        cluster.run(["scontrol", "update", "nodename=n4", "state=resume"])
    assert job.state == "COMPLETED", job.output
    assert "not there: n4" in job.output
    reference, facts = (
        json.loads((f / "run" / "summary.json").read_text()) for f in (whole, broken)
    )
    assert (facts["ranks"], facts["restarts"], facts["resizes"]) == (3, 1, 1)
    assert facts["steps"] == STEPS
    assert facts["parameters_sha256"] == reference["parameters_sha256"]
    made, resumed = steps(broken), facts["resumed_at"]
    before = len(made) - (STEPS - resumed)
    assert made == [*range(1, before + 1), *range(resumed + 1, STEPS + 1)]


def test_a_host_that_fails_again_is_left_out(cluster, openmpi, tmp_path):
    """R140: it is up, and its rank fails first, twice: three hosts finish without it."""
    fault = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": "raise@step:30,rank=3,attempt=any"}
    job = cluster.wait(submit(cluster, tmp_path, openmpi, "mpirun", **fault), 150)
    assert job.state == "COMPLETED", job.output
    assert job.output.count(", first on n4 (") == 2, job.output
    assert "left out, for ranks of this job failed there first, again and again: n4" in job.output
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (facts["ranks"], facts["restarts"], facts["resizes"]) == (3, 2, 1)


def test_asked_to_leave_and_requeued(cluster, request, tmp_path):
    """R106: USR1 reaches `mpidist launch`, the batch script itself; the job comes back."""
    python = request.getfixturevalue("openmpi")
    script = tmp_path / "recovery.sbatch"
    text = SCRIPT.replace("--no-kill", "--no-kill --requeue --open-mode=append")
    script.write_text(text.replace(" -- mpidist", " --preempted requeue -- mpidist"))
    environ = {**job_environment(python), "LAUNCHER": "mpirun"}
    job = str(ROOT / "jobs" / "digits.toml")
    number = cluster.submit(script, job, *SETTINGS, env=environ, cwd=tmp_path)
    deadline = time.monotonic() + 100
    while max(steps(tmp_path), default=0) < 30:
        assert time.monotonic() < deadline, cluster.job(number).output
        time.sleep(0.05)
    cluster.run(["scancel", "--batch", "--signal=USR1", str(number)]).check()
    job = cluster.wait(number, 200)
    assert (job.state, job.restarts) == ("COMPLETED", 1), job.output
    assert steps(tmp_path) == list(range(1, STEPS + 1)), "no step twice: it saved where it left"
    assert not list(tmp_path.glob(".mpidist-launch-*"))
