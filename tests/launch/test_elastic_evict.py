"""Stopped, hung and slow ranks of an elastic group are evicted: R45, R46; with real processes."""

import re
import sys
from pathlib import Path

import pytest
from tiers import exhaustive

from mpidist.launch.launchers import (
    find_launcher,
    launch_environment,
    launcher_command,
    launcher_kind,
)
from mpidist.launch.processes import run

PROGRAM = str(Path(__file__).with_name("programs") / "elastic_evict.py")
pytestmark = pytest.mark.skipif(
    launcher_kind(find_launcher())[0] != "openmpi", reason="no ULFM in this MPI"
)


def evict(ranks, mode, deadline, fates="", **variables):
    launcher, *options = launcher_command(ranks)
    command = [launcher, "--with-ft", "ulfm", *options, sys.executable, PROGRAM, mode, deadline]
    return run(command, env=launch_environment({"FATES": fates, **variables}))


def check(done, living, dead, evicted):
    """The living ranks have the right state, and no process of another one is left."""
    done.check()
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    counts = f"{dead} dead, {evicted} evicted, 0 left behind"
    assert told == [f"rank {r} of {len(living)}, {counts}: right" for r in living], done
    return [line for line in done.stderr.splitlines() if line.startswith("mpidist: ")]


@pytest.mark.parametrize(
    ("deadline", "fate", "patience", "words"),
    [
        ("0.5", "stop", "5", "was stopped for [01].[0-9] s"),
        exhaustive("1", "hang", "5", "did not come for 1.[0-9] s"),
        exhaustive("stopped", "stop", "0.7", "was stopped for [01].[0-9] s"),
        ("stopped", "lock", "0.7", "gave no sign for [01].[0-9] s"),
        ("auto", "hang", "5", "did not come for [12].[0-9] s"),
    ],
)
def test_a_rank_is_evicted(deadline, fate, patience, words):
    """In one line with the cause; the others repeat the step and end with the right bits."""
    lines = check(evict(4, "with", deadline, f"2:7:{fate}", PATIENCE=patience), [0, 1, 3], 1, 1)
    (line,) = lines
    told = rf"mpidist: rank 2 of 4 on \S+ {words} and is evicted at step 7; 3 ranks go on after "
    assert re.match(told, line), line


@pytest.mark.parametrize(
    ("fates", "living"),
    [
        exhaustive("0:5:stop,3:5:hang", [1, 2], id="two at once"),
        pytest.param("3:5:hang,0:5:later", [1, 2], id="who looks"),
        exhaustive("1:4:stop,2:8:hang", [0, 3], id="one after the other"),
    ],
)
def test_who_is_evicted(fates, living):
    dead = 4 - len(living)
    check(evict(4, "with", "1", fates), living, dead, dead)


def test_the_others_wait_in_a_call_of_mpi():
    """Nobody polls, so a thread of the lowest rank looks."""
    (line,) = check(evict(3, "mpi", "1", "1:7:hang"), [0, 2], 1, 1)
    assert re.search(r"did not come for 1.\d s and is evicted at step 7", line), line


@pytest.mark.exhaustive
def test_a_function_that_begins_again():
    check(evict(3, "function", "1", "1:5:stop"), [0, 2], 1, 1)


@pytest.mark.exhaustive
def test_spares():
    """A spare always waits, but nobody is late for it; and it steps in for an evicted rank."""
    done = evict(3, "function", "1", "0:5:0.7,1:5:1.3", SPARES="1")
    assert check(done, [0, 1], 0, 0) == []
    (line,) = check(evict(4, "function", "1", "1:5:stop", SPARES="1"), [0, 2, 3], 1, 1)
    assert "was stopped for 1." in line
    assert "3 ranks go on, with a spare," in line


def test_a_rank_is_stopped_while_the_others_meet_after_a_death():
    """They wait for it in the agreement."""
    lines = check(evict(4, "with", "1", "1:5:die,2:5:stop"), [0, 3], 2, 1)
    assert re.match(r"mpidist: rank 1 of 4 on \S+ died, rank 2 of 4 on \S+ was stopped", lines[0])


@pytest.mark.exhaustive
def test_a_rank_is_stopped_while_the_others_shrink():
    """Their main threads are inside MPI, so a thread of the lowest rank kills it."""
    check(evict(4, "shrink", "stopped", "1:5:die"), [0, 3], 2, 1)


def test_the_whole_job_is_stopped_and_continued():
    """By Ctrl-Z or a batch system: nobody is evicted, however long it was."""
    assert check(evict(4, "job", "1"), [0, 1, 2, 3], 0, 0) == []


@pytest.mark.parametrize(
    ("deadline", "fate"),
    [pytest.param("1", "save", id="phase"), exhaustive("stopped", "long", id="stopped")],
)
def test_a_rank_that_may_take_long(deadline, fate):
    """In a save, and in a long step if no number was given."""
    done = evict(3, "with", deadline, f"1:5:{fate}", PATIENCE="0.7")
    assert check(done, [0, 1, 2], 0, 0) == []


def test_too_few_ranks_remain():
    done = evict(3, "few", "1", "1:5:stop")
    assert done.returncode == 70, done
    (line,) = [line for line in done.stderr.splitlines() if "min_ranks" in line]
    assert re.search(r"rank 1 of 3 on \S+ \(it was stopped for 1.\d s and is evicted\) died", line)


def test_a_slow_rank_ends_itself():
    """After two windows of ten steps; it says why, and so does the line of the repair."""
    note, own, line = check(evict(3, "slow", "stopped"), [0, 2], 1, 1)
    assert "note: the others wait for rank 1" in note
    assert re.match(r"mpidist: rank 1 of 3 on \S+ needs 15.0 times as long for a step", own), own
    assert "rank 1 of 3" in line
    assert "was 15.0 times slower than the others and is evicted at step 20; 2 ranks go on" in line
