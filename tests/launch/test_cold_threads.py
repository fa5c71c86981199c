"""Two threads make the first call of a job at once: one gets an error, or both succeed (R97)."""

import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "cold_threads.py"
RANKS = 3


@pytest.fixture(scope="module")
def played(launches):
    wanted = {word: (RANKS, [sys.executable, PROGRAM, word]) for word in ("one", "two")}
    return launches(wanted, timeout=60)


def lines(run):
    """What each rank said, in rank order; the job has ended well."""
    assert not run.timed_out, run.stdout + run.stderr
    assert run.returncode == 0, run.stdout + run.stderr
    return sorted(line for line in run.stdout.splitlines() if line.startswith("rank "))


def test_on_one_communicator_the_second_is_refused(played):
    """In one line, on its rank alone; the call of the first goes on. Both had waited for ever."""
    said = lines(played["one"])
    assert said[0] == "rank 0: [('first', 3)]"
    assert said[2] == "rank 2: [('first', 3)]"
    assert said[1].startswith("rank 1: [('first', 3), ('second', 'ProtocolError: the first call: ")
    assert "another call on this communicator is under way, in another thread" in said[1]


def test_on_two_communicators_both_are_right(played):
    """In any order on each rank. They left each other on two communicators, and waited there."""
    assert lines(played["two"]) == [f"rank {r}: [(0, 3), (1, 3)]" for r in range(RANKS)]
