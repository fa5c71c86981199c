"""``mpidist launch --elastic``: living ranks go on; if they cannot, the next attempt does."""

import sys
import time
from pathlib import Path

import pytest
from supervised_jobs import finish, supervised
from tiers import exhaustive, tiers

from mpidist.elasticity import ulfm_trial
from mpidist.errors import ConfigError
from mpidist.launch.launchers import (
    find_launcher,
    launch_environment,
    launcher_command,
    launcher_kind,
)
from mpidist.launch.processes import Started, marked

PROGRAM = str(Path(__file__).with_name("programs") / "elastic_launch.py")
OPEN_MPI = launcher_kind(find_launcher())[0] == "openmpi"
with_ulfm = pytest.mark.skipif(not OPEN_MPI, reason="no ULFM in this MPI")


def elastic(folder, mode, *options, code=0, ranks=3):
    """Run the program to its end; return what was printed, and the lines of `mpidist launch`."""
    (folder / "job.toml").touch()  # of no use here
    options = ("--elastic", "-n", str(ranks), *options)
    done = finish(supervised(folder, *options, program=[sys.executable, PROGRAM, mode]), code)
    lines = [one for one in done.stderr.splitlines() if one.startswith("mpidist launch: ")]
    return done, lines


@with_ulfm
def test_a_death_is_no_failed_attempt(tmp_path):
    """And a job in which a rank has died is done if the living ranks say so."""
    done, (line,) = elastic(tmp_path, "one", "--max-restarts", "0")
    assert done.stdout.splitlines() == ["attempt 0: 2 of 3 ranks, right"] * 2
    assert "exit code 0 at step 10, 1 rank died on the way" in line
    assert line.endswith("finished")
    assert not list(tmp_path.glob(".mpidist-launch-*"))


def test_a_trial_with_a_launcher_that_ends_the_job(tmp_path, monkeypatch):
    """It is found also if one rank is killed long before the other one has come further."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = f'print("{ulfm_trial._BEGUN}"'
    slow = ulfm_trial._PROGRAM.replace(said, f"time.sleep(1); {said}")
    assert slow != ulfm_trial._PROGRAM
    monkeypatch.setattr(ulfm_trial, "_PROGRAM", slow)
    with pytest.raises(ConfigError, match="the other one did not go on"):
        ulfm_trial.check_survival(launcher_command(2), "5")


CASES = {
    "all": "all ranks have died, exit code 70",
    "hang": "could not go on after a death, exit code 70",
    "early": "exit code ",
    "few": "exit code 70 at step 5",
}


@with_ulfm
@pytest.mark.parametrize("mode", tiers(CASES, "early", "few"))
def test_an_attempt_that_cannot_go_on_is_followed_by_another(tmp_path, mode):
    """R140: killed all at once, hung in the repair, dead before it had begun, too few."""
    done, lines = elastic(tmp_path, mode, "--max-restarts", "1")
    assert done.stdout.splitlines() == ["attempt 1: 3 of 3 ranks, right"] * 3
    assert CASES[mode] in lines[-2]
    assert "again with 3 ranks" in lines[-2]
    assert lines[-1].endswith("finished")
    if mode == "hang":
        assert "could not go on after a death: REBUILD took too long; it ends" in done.stderr
    assert done.seconds < 60


@with_ulfm
def test_the_next_attempt_begins_from_memory(tmp_path):
    """At most the steps since the newest copy are done again; nothing stays in /dev/shm."""
    done, _ = elastic(tmp_path, "copies", "--max-restarts", "1")
    lines = done.stdout.splitlines()
    # The checkpoint of step 2 was on its way to the disk still, or was there.
    assert {line.partition(",")[0] for line in lines[:3]} == {"resumed at 4"}
    assert sorted(lines[3:]) == ["attempt 1: 3 of 3 ranks, right"] * 3
    folder = Path((tmp_path / "memory-folder").read_text())
    assert folder.name.startswith("mpidist-copies-")
    assert not folder.exists()


@with_ulfm
@pytest.mark.exhaustive
def test_a_stopped_rank_is_killed_and_the_others_go_on(tmp_path):
    done, lines = elastic(tmp_path, "stopped", "--heartbeat", "3", "--max-restarts", "0")
    assert done.stdout.splitlines() == ["attempt 0: 2 of 3 ranks, right"] * 2
    assert lines[0].endswith("rank 1 is killed, so that the others go on: it gave no sign")


@with_ulfm
@pytest.mark.parametrize(("mode", "code"), [("raises", 1), exhaustive("code", 75)])
def test_the_exit_code_is_that_of_the_living(tmp_path, mode, code):
    done, lines = elastic(tmp_path, mode, "--max-restarts", "0", code=code)
    assert f"exit code {code} at step {5 if code == 1 else 10}" in lines[0]
    assert done.stderr.count("ValueError: bad sample") == (code == 1)


@with_ulfm
def test_a_program_that_says_nothing_is_not_done(tmp_path):
    """Open MPI's exit code is 0 after a kill, so it proves nothing."""
    (tmp_path / "job.toml").touch()
    done = finish(supervised(tmp_path, "--elastic", "-n", "1", "--max-restarts", "0",
                             program=["true"]), 70)  # fmt: skip
    assert "no rank has said that the job is done; a program under --elastic uses" in done.stderr


@with_ulfm
def test_a_hang_in_the_repair_without_mpidist_launch(tmp_path):
    """One clear line of each rank, exit code 70, and nothing is left 5 s later."""
    launcher, *options = launcher_command(3)
    command = [launcher, "--with-ft", "ulfm", *options, sys.executable, PROGRAM, "hang"]
    job = Started(command, env=launch_environment(), cwd=tmp_path)
    job.process.wait(60)
    time.sleep(0.1)
    left = marked(job.mark)
    done = job.finish(0)
    assert (done.returncode, left) == (70, []), done
    lines = [one for one in done.stderr.splitlines() if "mpidist: error" in one]
    assert len(lines) == 2
    assert all(one.endswith("REBUILD took too long; it ends") for one in lines)


@pytest.mark.skipif(OPEN_MPI, reason="this MPI has ULFM")
def test_refused_without_ulfm(tmp_path):
    done, _ = elastic(tmp_path, "one", code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "mpidist: error: mpidist launch --elastic: mpiexec of MPICH ends the job"
    )
    assert "without --elastic works" in line
