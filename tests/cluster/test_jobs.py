"""The batch scripts as users submit them: real sbatch, four nodes, both MPIs."""

import json
import time
from pathlib import Path

import pytest
from interpreters import ROOT, job_environment

pytestmark = pytest.mark.slurm

JOBS = ROOT / "jobs"
DIGITS = str(JOBS / "digits.toml")
PMI = {"openmpi": "pmix", "mpich": "pmi2"}
QUICK = ["--set", "steps=5", "--set", "optimizer.lr=0.02"]
#: The sum's order is ours under "ring"; "auto" may choose differently in another run.
STEPS = 400
FIXED = ["--set", "strategy.algorithm=ring", "--set", f"steps={STEPS}"]
ONE_EACH = ["--ntasks-per-node=1"]


def site(request, kind):
    """The environment of a user of one MPI."""
    python = request.getfixturevalue(kind)
    return {**job_environment(python), "SLURM_MPI_TYPE": PMI[kind]}


def summary(job):
    """The summary.json of a job that has ended well."""
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    name = job.fields["JobName"]
    folder = Path(job.fields["WorkDir"]) / "runs" / f"{name}-{job.id}"
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_allreduce(cluster, kind, request, tmp_path):
    """R95, R1: one srun over four nodes; the start-up line says what it runs on."""
    job = cluster.sbatch(
        *(JOBS / "allreduce.sbatch", DIGITS, *QUICK),
        env=site(request, kind), cwd=tmp_path, timeout=120,
    )  # fmt: skip
    facts = summary(job)
    assert (facts["ranks"], facts["steps"]) == (8, 5)
    assert "8 ranks on 4 hosts (n1, n2, n3, n4), 2 per host" in job.output


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_servers(cluster, kind, request, tmp_path):
    """R4, R5: parameter servers and workers are ranks of one srun."""
    job = cluster.sbatch(
        *(JOBS / "servers.sbatch", DIGITS, *QUICK),
        env=site(request, kind), cwd=tmp_path, timeout=120,
    )  # fmt: skip
    facts = summary(job)
    assert (facts["ranks"], facts["workers"], facts["steps"]) == (8, 6, 5)


def test_gpu_script_is_accepted_and_reaches_the_ranks(cluster, request, tmp_path):
    """Slurm grants its GPUs; that none is behind them is told in one line, with exit code 2."""
    job = cluster.sbatch(
        *(JOBS / "gpu.sbatch", DIGITS, *QUICK),
        options=["--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1"],
        env=site(request, "openmpi"), cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert job.fields["TresPerNode"] == "gres:gpu:2"
    if job.state == "COMPLETED":
        assert summary(job)["ranks"] == 4
    else:
        assert (job.state, job.exit_code) == ("FAILED", 2), job.output
        assert job.output.count("mpidist: error: ") == 1
        assert "Traceback" not in job.output


def test_mpirun_in_place_of_srun(cluster, request, tmp_path):
    """The line that requeue.sbatch offers instead: mpirun inside the batch script."""
    script = with_mpirun(tmp_path)
    job = cluster.sbatch(
        *(script, DIGITS, *QUICK),
        env=site(request, "openmpi"), cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert summary(job)["ranks"] == 8


@pytest.mark.parametrize(("kind", "wrong", "right"),
                         [("openmpi", "none", "pmix"), ("openmpi", "pmi2", "pmix"),
                          ("mpich", "none", "pmi2"), ("mpich", "pmix", "pmi2")])  # fmt: skip
def test_wrong_pmi_is_one_line_with_the_cure(cluster, kind, wrong, right, request, tmp_path):
    """R90, R97: no silent singletons: one line of ours, from one rank, exit code 2."""
    done = cluster.run(
        ["srun", "--nodes=4", f"--mpi={wrong}", "mpidist", "train", DIGITS],
        env=site(request, kind), cwd=tmp_path,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if line.startswith("mpidist: ")]
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    # Under pmi2 Open MPI adds a notice of its own; srun always tells the exit codes.
    assert len(ours) == 1, done.stderr
    assert ours[0].startswith("mpidist: error: srun started 4 ranks")
    assert f"use srun --mpi={right}" in ours[0]
    assert not (tmp_path / "runs").exists(), "nothing may have been begun"


def test_bad_input_is_not_requeued(cluster, request, tmp_path):
    """R106: only exit code 75 goes back into the queue; an error would run in a circle."""
    job = cluster.sbatch(
        *(JOBS / "requeue.sbatch", DIGITS, "--set", "epoch=3"),
        options=ONE_EACH, env=site(request, "openmpi"), cwd=tmp_path,
    )  # fmt: skip
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 2, 0), job.output
    assert "did you mean 'epochs'?" in job.output


# ------------------------------------------------------------------ stop, requeue, resume


def with_mpirun(folder):
    """Write requeue.sbatch with its alternative `run=` line; return the path."""
    text = (JOBS / "requeue.sbatch").read_text()
    line = 'run=(srun --mpi="$PMI" --kill-on-bad-exit=0)'
    assert line in text
    script = folder / "requeue.sbatch"
    script.write_text(text.replace(line, "run=(mpirun)"))
    return script


@pytest.fixture(scope="module")
def undisturbed(cluster, request, tmp_path_factory):
    """Summary of the run that nobody stops, on the same ranks."""
    job = cluster.sbatch(
        *(JOBS / "allreduce.sbatch", DIGITS, *FIXED),
        options=ONE_EACH, env=site(request, "openmpi"),
        cwd=tmp_path_factory.mktemp("undisturbed"), timeout=200,
    )  # fmt: skip
    return summary(job)


def wait_for_steps(cluster, job, folder, steps=20):
    """Wait until a running job has logged some steps."""
    deadline = time.monotonic() + 150
    while True:
        files = list(folder.glob("runs/*/metrics.jsonl"))
        # The last line may be half written.
        lines = files[0].read_text().split("\n")[:-1] if files else []
        if lines and json.loads(lines[-1])["step"] >= steps:
            return
        assert time.monotonic() < deadline, cluster.job(job).output
        time.sleep(0.05)


def resumed_to_the_same_bits(job, reference):
    facts = summary(job)
    assert job.restarts >= 1, job.output
    assert 0 < facts["resumed_at"] < STEPS
    assert facts["steps"] == reference["steps"] == STEPS
    assert facts["parameters_sha256"] == reference["parameters_sha256"]


def test_time_limit_checkpoint_requeue_resume(cluster, undisturbed, request, tmp_path):
    """R47, R48, R106: Slurm's own time limit pauses a run; it ends with the undisturbed bits."""
    # With a limit of one minute and 55 s of warning Slurm signals at its next look at the limits,
    # which it takes every 30 s. Begin right after one, and let the run sleep from its 20th step
    # until just before the next: so the signal meets it half way on machines of any speed.
    while cluster.next_limit_check() < 28:
        time.sleep(0.2)
    job = cluster.submit(
        *(JOBS / "requeue.sbatch", DIGITS, *FIXED),
        options=[*ONE_EACH, "--time=1", "--signal=B:USR1@55"],
        env=site(request, "openmpi"), cwd=tmp_path,
    )  # fmt: skip
    wait_for_steps(cluster, job, tmp_path)
    cluster.run(["scontrol", "suspend", str(job)]).check()
    time.sleep(max(0, cluster.next_limit_check() - 0.3))
    cluster.run(["scontrol", "resume", str(job)]).check()
    resumed_to_the_same_bits(cluster.wait(job, 240), undisturbed)


@pytest.mark.parametrize(("kind", "launcher"), [("mpich", "srun"), ("openmpi", "mpirun")])
def test_stop_on_request(cluster, undisturbed, kind, launcher, request, tmp_path):
    """R47: the signal goes through either launcher, and the bits do not depend on the MPI."""
    script = JOBS / "requeue.sbatch" if launcher == "srun" else with_mpirun(tmp_path)
    job = cluster.submit(
        *(script, DIGITS, *FIXED), options=ONE_EACH, env=site(request, kind), cwd=tmp_path
    )
    wait_for_steps(cluster, job, tmp_path)
    cluster.run(["scancel", "--batch", "--signal=USR1", str(job)]).check()
    resumed_to_the_same_bits(cluster.wait(job, 200), undisturbed)
