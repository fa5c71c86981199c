"""More ranks get ready while the others train, and go on with the run: never two, never none."""

import os
import signal
import subprocess

import pytest
from supervised_jobs import MPIDIST, finish, run, steps, summary, supervised, wait_for_step
from tiers import exhaustive
from until import wait_until

from mpidist.launch import heartbeat
from mpidist.launch.heartbeat import read_heartbeats
from mpidist.launch.launchers import find_launcher, launcher_kind

OPEN_MPI = launcher_kind(find_launcher())[0] == "openmpi"
with_ulfm = pytest.mark.skipif(not OPEN_MPI, reason="no ULFM in this MPI")

#: The first attempt is slow, so that it is not over before the new ranks are ready.
SLOW = "sleep@step,ms=100,attempt=0"
#: So that there is time to do something to ranks that get ready.
HELD = f"{SLOW};sleep@start,ms=4000,attempt=1"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run(folder, "-n", "2")
    return summary(folder)


def begin(folder, *options, fault=SLOW, more=1, step=3):
    """Start a job of 2 ranks, and ask for more of them once it has done some steps."""
    job = supervised(folder, "-n", "2", "--control", "control", *options, fault=fault)
    wait_for_step(job, folder, step)
    grow(folder, more)
    return job


def grow(folder, more):
    words = [*MPIDIST, "grow", "control", "-n", str(more)]
    assert subprocess.run(words, cwd=folder, timeout=60).returncode == 0


def new_ranks(job, folder, count=3):
    """Wait until the ranks of the second attempt have begun; return their process numbers."""
    attempt, found = folder / "control" / "attempt-1", []

    def there():
        found[:] = [sign.pid for sign in read_heartbeats(attempt)] if attempt.exists() else []
        return len(found) == count

    wait_until(there, 60, otherwise=lambda: job.finish(0).stderr, job=job.process)
    return found


def check(folder, undisturbed, workers, restarts):
    """Each step once, and the bits of a run that nobody has disturbed."""
    facts = summary(folder)
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert steps(folder) == [*range(1, 121)]
    assert (facts["workers"], facts["restarts"]) == (workers, restarts)
    assert not (folder / "control").exists()


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--elastic",), marks=[with_ulfm, pytest.mark.exhaustive])]
)
def test_more_ranks_twice(tmp_path, undisturbed, options):
    """R49: two requests at once are one; a later one follows."""
    fault = "sleep@step,ms=100,attempt=0;sleep@step,ms=300,attempt=1"
    job = begin(tmp_path, *options, fault=fault)
    made = tmp_path / "control" / "attempt-1" / heartbeat.READY
    wait_until(made.exists, 60, otherwise=lambda: job.finish(0).stderr, job=job.process)
    grow(tmp_path, 1)
    done = finish(job)
    assert "asked for 1 more rank: 3 ranks get ready, and 2 go on meanwhile" in done.stderr
    assert "again with 3 ranks, which were ready" in done.stderr
    assert "asked for 1 more rank: 4 ranks get ready, and 3 go on meanwhile" in done.stderr
    check(tmp_path, undisturbed, 4, 2)


def test_a_new_rank_is_killed(tmp_path, undisturbed):
    """Before it is ready: the old ranks do not notice."""
    # An old rank is stopped until the launcher has given the new ones up: no step need be slow.
    job = begin(tmp_path, fault="stop@step:40,rank=0,attempt=0;sleep@start,ms=4000,attempt=1")
    os.kill(new_ranks(job, tmp_path)[1], signal.SIGKILL)
    wait_until(lambda: "attempt 1 is given up: " in job._read(1), 50)
    os.kill(read_heartbeats(tmp_path / "control" / "attempt-0")[0].pid, signal.SIGCONT)
    done = finish(job)
    assert "attempt 1 is given up: " in done.stderr
    assert "; 2 ranks go on" in done.stderr
    check(tmp_path, undisturbed, 2, 0)


def test_an_old_rank_is_killed(tmp_path, undisturbed):
    """While the new ones get ready: they are the next attempt, from the newest checkpoint."""
    job = begin(tmp_path, fault=HELD, step=30)
    new_ranks(job, tmp_path)
    before = max(steps(tmp_path))
    os.kill(read_heartbeats(tmp_path / "control" / "attempt-0")[1].pid, signal.SIGKILL)
    done = finish(job)
    assert "again with 3 ranks, which were ready" in done.stderr
    facts = summary(tmp_path)
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]
    # The newest may have been on its way to the disk still, but not the one of long ago.
    newest = (before + 1) // 25 * 25
    assert facts["workers"] == 3
    assert facts["resumed_at"] in {25, newest - 25, newest} - {0}


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, exhaustive(signal.SIGINT), exhaustive(signal.SIGKILL)]
)
def test_a_stop_while_ranks_get_ready(tmp_path, undisturbed, number):
    """Both attempts end, and the run is continued by the next command."""
    job = begin(tmp_path, fault=HELD)
    new_ranks(job, tmp_path)
    job.process.send_signal(number)
    if number == signal.SIGKILL:
        job.process.wait(60)
        wait_until(lambda: not heartbeat_pids(tmp_path), 60)
        job.finish(0)
    else:
        finish(job, 75)
    assert len(steps(tmp_path)) < 120
    run(tmp_path, "-n", "2", "--control", "control")
    facts = summary(tmp_path)
    assert facts["parameters_sha256"] == undisturbed["parameters_sha256"]
    if number != signal.SIGINT:  # it ends the job at once, without a save
        assert steps(tmp_path) == [*range(1, 121)]


def heartbeat_pids(folder):
    """The process numbers of all ranks that still run."""
    signs = [s for k in (0, 1) for s in read_heartbeats(folder / "control" / f"attempt-{k}")]
    return [s.pid for s in signs if heartbeat.born(s.pid) == str(s.born)]


@pytest.mark.exhaustive
def test_a_run_that_ends_first(tmp_path, undisturbed):
    """The new ranks are not needed any more."""
    fault = "sleep@step,ms=20,attempt=0;sleep@start,ms=20000,attempt=1"
    job = begin(tmp_path, fault=fault, step=100)
    finish(job)
    check(tmp_path, undisturbed, 2, 0)


def test_no_room(tmp_path, undisturbed):
    """On the hosts that were given: the ranks go on, and a line says so."""
    job = begin(tmp_path, "--hosts", "localhost:2", fault="sleep@step,ms=30,attempt=0")
    done = finish(job)
    assert "there is room for 2; 2 ranks go on" in done.stderr
    check(tmp_path, undisturbed, 2, 0)
