"""The batch scripts run as users submit them: by a real sbatch, on four nodes, with both MPIs."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from interpreters import ROOT, job_environment, python_of
from same_bits import DIGITS, SETTINGS, STEPS, UNTIL_ASKED, wait_for_steps

pytestmark = pytest.mark.slurm

JOBS = ROOT / "jobs"
PMI = {"openmpi": "pmix", "mpich": "pmi2"}
QUICK = ["--set", "steps=5", "--set", "optimizer.lr=0.02"]
ONE_EACH = ["--ntasks-per-node=1"]


def site(kind):
    """The environment of a user of one MPI."""
    return {**job_environment(python_of(kind)), "SLURM_MPI_TYPE": PMI[kind]}


def faulty(fault):
    """The environment of a run in which that happens."""
    return {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": fault}


def summary(job):
    """The summary.json of a job that has ended well."""
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    name = job.fields["JobName"]
    folder = Path(job.fields["WorkDir"]) / "runs" / f"{name}-{job.id}"
    return json.loads((folder / "summary.json").read_text())


def with_mpirun(folder):
    """Write requeue.sbatch with its alternative `run=` line; return the path."""
    text = (JOBS / "requeue.sbatch").read_text()
    line = 'run=(srun --mpi="$PMI" --kill-on-bad-exit=0)'
    assert line in text
    script = folder / "requeue.sbatch"
    script.write_text(text.replace(line, "run=(mpirun)"))
    return script


# ------------------------------------------------------------------- what happens, side by side


def batch(cluster, script, kind, *words, options=()):
    """A scene: one job to its end."""
    return lambda folder: cluster.sbatch(
        *(JOBS / script, DIGITS, *words),
        options=options, env=site(kind), cwd=folder, timeout=240,
    )  # fmt: skip


def mpirun(cluster, folder):
    return cluster.sbatch(
        *(with_mpirun(folder), DIGITS, *QUICK), env=site("openmpi"), cwd=folder, timeout=240
    )


def wrong_pmi(cluster, kind, wrong):
    """A scene: a launcher that does not speak this MPI's language."""
    return lambda folder: cluster.run(
        ["srun", "--nodes=4", f"--mpi={wrong}", "mpidist", "train", DIGITS],
        env=site(kind), cwd=folder, timeout=120,
    )  # fmt: skip


def time_limit(cluster, folder):
    # With a limit of one minute and 55 s of warning Slurm signals at its next look at the limits,
    # which it takes every 30 s. Begin long before one, and let the steps take longer than that all
    # together: so the signal meets the run half way on machines of any speed.
    while cluster.next_limit_check() < 18:
        time.sleep(0.2)
    fault = f"sleep@step,ms={33_000 // STEPS}"
    return cluster.sbatch(
        *(JOBS / "requeue.sbatch", DIGITS, *SETTINGS),
        options=[*ONE_EACH, "--time=1", "--signal=B:USR1@55"], cwd=folder,
        env={**site("openmpi"), **faulty(fault)}, timeout=240,
    )  # fmt: skip


def asked(cluster, kind, launcher):
    """A scene: the user asks the batch script for a pause."""

    def play(folder):
        script = JOBS / "requeue.sbatch" if launcher == "srun" else with_mpirun(folder)
        env = {**site(kind), **faulty(UNTIL_ASKED)}
        job = cluster.submit(*(script, DIGITS, *SETTINGS), options=ONE_EACH, env=env, cwd=folder)
        wait_for_steps(cluster, job, folder)
        cluster.run(["scancel", "--batch", "--signal=USR1", str(job)]).check()
        return cluster.wait(job, 240)

    return play


@pytest.fixture(scope="session")
def limited(cluster, tmp_path_factory):
    """What becomes of the job with a time limit: a future. It is asleep for most of a minute."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(time_limit, cluster, tmp_path_factory.mktemp("limit"))


@pytest.fixture(scope="module")
def scenes(cluster, request):
    if any(item.name.startswith("test_time_limit") for item in request.session.items):
        request.getfixturevalue("limited")  # begins now, and is looked at when others have ended
    gpu = ["--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1"]
    return {
        # The longest come first.
        "asked mpich srun": asked(cluster, "mpich", "srun"),
        "asked openmpi mpirun": asked(cluster, "openmpi", "mpirun"),
        **{
            f"{name} {kind}": batch(cluster, f"{name}.sbatch", kind, *QUICK)
            for name in ("allreduce", "servers", "servers_on_cpu_nodes")
            for kind in PMI
        },
        "gpu": batch(cluster, "gpu.sbatch", "openmpi", *QUICK, options=gpu),
        "mpirun": partial(mpirun, cluster),
        **{
            f"{kind} under {wrong}": wrong_pmi(cluster, kind, wrong)
            for kind, right in PMI.items()
            for wrong in ("none", *set(PMI.values()) - {right})
        },
        "bad input": batch(
            cluster, "requeue.sbatch", "openmpi", "--set", "epoch=3", options=ONE_EACH
        ),
    }


def plays(*names, further=()):
    """The scenes of a test; `further` ones show with the other MPI what others show of it."""
    marked = [pytest.param(name, marks=pytest.mark.exhaustive) for name in further]
    return pytest.mark.parametrize("scene", [*names, *marked], indirect=True)


# ------------------------------------------------------------------------------ what came of it


@plays("allreduce openmpi", "allreduce mpich")
def test_allreduce(scene):
    """R95, R1: one srun over four nodes; the start-up line says what it runs on."""
    job, _ = scene
    facts = summary(job)
    assert (facts["ranks"], facts["steps"]) == (8, 5)
    assert "8 ranks on 4 hosts (n1, n2, n3, n4), 2 per host" in job.output


@plays("servers openmpi", further=["servers mpich"])
def test_servers(scene):
    """R4, R5: parameter servers and workers are ranks of one srun."""
    facts = summary(scene[0])
    assert (facts["ranks"], facts["workers"], facts["steps"]) == (8, 6, 5)


@plays("servers_on_cpu_nodes mpich", further=["servers_on_cpu_nodes openmpi"])
def test_servers_on_cpu_nodes(scene):
    """R17, R122: three nodes work and serve, one of another kind only serves; one world."""
    job, _ = scene
    facts = summary(job)
    assert (facts["ranks"], facts["workers"], facts["steps"]) == (4, 3, 5)
    assert "4 ranks on 4 hosts" in job.output
    assert job.fields["NodeList"] == "n[1-3]"


@plays("gpu")
def test_gpu_script_is_accepted_and_reaches_the_ranks(scene):
    """Slurm grants its GPUs; that none is behind them is told in one line, with exit code 2."""
    job, _ = scene
    assert job.fields["TresPerNode"] == "gres:gpu:2"
    if job.state == "COMPLETED":
        assert summary(job)["ranks"] == 4
    else:
        assert (job.state, job.exit_code) == ("FAILED", 2), job.output
        assert job.output.count("mpidist: error: ") == 1
        assert "Traceback" not in job.output


@plays(further=["mpirun"])  # "asked openmpi mpirun" has this line, too
def test_mpirun_in_place_of_srun(scene):
    """The line that requeue.sbatch offers instead: mpirun inside the batch script."""
    assert summary(scene[0])["ranks"] == 8


@pytest.mark.parametrize(
    ("scene", "right"),
    [
        ("openmpi under none", "pmix"),
        ("mpich under pmix", "pmi2"),
        pytest.param("openmpi under pmi2", "pmix", marks=pytest.mark.exhaustive),
        pytest.param("mpich under none", "pmi2", marks=pytest.mark.exhaustive),
    ],
    indirect=["scene"],
)
def test_wrong_pmi_is_one_line_with_the_cure(scene, right):
    """R90, R97: no silent singletons: one line of ours, from one rank, exit code 2."""
    done, folder = scene
    ours = [line for line in done.stderr.splitlines() if line.startswith("mpidist: ")]
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    # Under pmi2 Open MPI adds a notice of its own; srun always tells the exit codes.
    assert len(ours) == 1, done.stderr
    assert ours[0].startswith("mpidist: error: srun started 4 ranks")
    assert f"use srun --mpi={right}" in ours[0]
    assert not (folder / "runs").exists(), "nothing may have been begun"


@plays("bad input")
def test_bad_input_is_not_requeued(scene):
    """R106: only exit code 75 goes back into the queue; an error would run in a circle."""
    job, _ = scene
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", 2, 0), job.output
    assert "did you mean 'epochs'?" in job.output


def resumed_to_the_same_bits(job, reference):
    facts = summary(job)
    assert job.restarts >= 1, job.output
    # Stopped a second time, on a slow machine, it may have had no more than its end to come.
    assert 0 < facts["resumed_at"] < STEPS + (job.restarts > 1)
    assert facts["steps"] == reference["steps"] == STEPS
    assert facts["parameters_sha256"] == reference["parameters_sha256"]


def test_time_limit_checkpoint_requeue_resume(limited, undisturbed):
    """R47, R48, R106: Slurm's own time limit pauses a run; it ends with the undisturbed bits."""
    resumed_to_the_same_bits(limited.result(), undisturbed)


@plays("asked mpich srun", "asked openmpi mpirun")
def test_stop_on_request(scene, undisturbed):
    """R47: the signal goes through either launcher, and the bits do not depend on the MPI."""
    resumed_to_the_same_bits(scene[0], undisturbed)
