"""`mpidist launch` on a real Slurm: a node goes down, and the job continues on the others."""

import json
from functools import partial

import pytest
from interpreters import job_environment, python_of
from same_bits import DIGITS, SETTINGS, STEPS, UNTIL_ASKED, steps, wait_for_steps

pytestmark = pytest.mark.slurm

SCRIPT = """#!/bin/bash
#SBATCH --job-name=recovery --output=%x-%j.out --nodes=4 --ntasks-per-node=1 --no-kill
exec mpidist launch -n 4 --launcher "$LAUNCHER" -- mpidist train "$1" --set out=run "${@:2}"
"""


def submit(cluster, folder, kind, launcher, script=SCRIPT, fault=""):
    (folder / "recovery.sbatch").write_text(script)
    faults = {"MPIDIST_TESTING": "1", "MPIDIST_FAULT": fault}
    environ = {**job_environment(python_of(kind)), "LAUNCHER": launcher, **faults}
    return cluster.submit(folder / "recovery.sbatch", DIGITS, *SETTINGS, env=environ, cwd=folder)


def summary(folder):
    return json.loads((folder / "run" / "summary.json").read_text())


def fails_on_n4(cluster, folder):
    fault = "raise@step:30,rank=3,attempt=any"
    return cluster.wait(submit(cluster, folder, "openmpi", "mpirun", fault=fault), 240)


def asked(cluster, folder):
    text = SCRIPT.replace("--no-kill", "--no-kill --requeue --open-mode=append")
    text = text.replace(" -- mpidist", " --preempted requeue -- mpidist")
    number = submit(cluster, folder, "openmpi", "mpirun", text, UNTIL_ASKED)
    wait_for_steps(cluster, number, folder)
    cluster.run(["scancel", "--batch", "--signal=USR1", str(number)]).check()
    return cluster.wait(number, 240)


@pytest.fixture(scope="module")
def scenes(cluster):
    return {"fails on n4": partial(fails_on_n4, cluster), "asked": partial(asked, cluster)}


LAUNCHERS = [
    ("openmpi", "mpirun"),
    ("mpich", "srun --mpi=pmi2"),
    pytest.param(("openmpi", "srun --mpi=pmix"), marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module")
def n4_down(cluster, played, tmp_path_factory, request):
    """By launcher: its job, and the folder. After the scenes, which need all nodes.

    All have lost the same node at the same moment.
    """
    numbers, ends = {}, {}
    items = [item for item in request.session.items if item.module is request.module]
    given = [item.callspec.params for item in items if hasattr(item, "callspec")]
    for each in [params["each"] for params in given if "each" in params]:
        folder = tmp_path_factory.mktemp("down")
        try:
            # In its first attempt each step takes so long that no job is over before all run.
            numbers[each] = submit(cluster, folder, *each, fault="sleep@step,ms=200"), folder
        except pytest.skip.Exception as reason:
            ends[each] = reason
    try:
        for number, folder in numbers.values():
            wait_for_steps(cluster, number, folder)
        cluster.run(["scontrol", "update", "nodename=n4", "state=down", "reason=test"]).check()
        for each, (number, folder) in numbers.items():
            ends[each] = cluster.wait(number, 240), folder
    finally:
        # Where one has failed the others must not stay in the way of the tests that come.
        cluster.run(["scancel", *(str(number) for number, _ in numbers.values())])
        cluster.run(["scontrol", "update", "nodename=n4", "state=resume"])
    return ends


@pytest.mark.parametrize("each", LAUNCHERS, ids="-".join)
def test_a_node_goes_down(n4_down, undisturbed, each):
    """R49, R140: the node's ranks are gone; three hosts finish, with the undisturbed weights."""
    if isinstance(n4_down[each], pytest.skip.Exception):
        raise n4_down[each]
    job, folder = n4_down[each]
    assert job.state == "COMPLETED", job.output
    assert "not there: n4" in job.output
    facts = summary(folder)
    assert (facts["ranks"], facts["restarts"], facts["resizes"]) == (3, 1, 1)
    assert facts["steps"] == STEPS
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]
    made, resumed = steps(folder), facts["resumed_at"]
    before = len(made) - (STEPS - resumed)
    assert made == [*range(1, before + 1), *range(resumed + 1, STEPS + 1)]


@pytest.mark.parametrize("scene", ["fails on n4"], indirect=True)
def test_a_host_that_fails_again_is_left_out(scene, undisturbed):
    """R140: it is up, and its rank fails first, twice: three hosts finish without it."""
    job, folder = scene
    assert job.state == "COMPLETED", job.output
    assert job.output.count(", first on n4 (") == 2, job.output
    why = "because ranks of this job were the first to fail there, again and again"
    assert f"left out, {why}: n4" in job.output
    facts = summary(folder)
    assert (facts["ranks"], facts["restarts"], facts["resizes"]) == (3, 2, 1)
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]


@pytest.mark.parametrize("scene", ["asked"], indirect=True)
def test_asked_to_leave_and_requeued(scene):
    """R106: USR1 reaches `mpidist launch`, the batch script itself; the job comes back."""
    job, folder = scene
    assert (job.state, job.restarts) == ("COMPLETED", 1), job.output
    assert steps(folder) == list(range(1, STEPS + 1)), "no step twice: it saved where it left"
    assert not list(folder.glob(".mpidist-launch-*"))
