"""The ranks of a test wait for each other asleep, and all hear whether one of them has failed."""

import time

import pytest
from meeting import Meeting


def nothing():
    pass


@pytest.mark.ranks(1, 2, 5)
def test_all_hear_who_has_something_to_tell(comm):
    """Also where a rank is at the next meeting already, before another has left this one."""
    meeting = Meeting(comm)
    for k in range(200):
        told = k % 7 == comm.rank
        assert meeting.meet(told, nothing) == (k % 7 < comm.size)


@pytest.mark.ranks(2, 3)
def test_nobody_goes_on_before_the_last_has_come(comm, folder):
    meeting, looks = Meeting(comm), []

    def look():
        looks.append(True)

    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.02)
            (folder / str(late)).touch()
        assert not meeting.meet(None, look)
        assert (folder / str(late)).exists()
    assert looks


@pytest.fixture
def fails_on_one(comm):
    if comm.rank == comm.size - 1:
        raise KeyError("on one rank alone")


@pytest.mark.xfail(raises=(pytest.fail.Exception, KeyError), strict=True)
@pytest.mark.ranks(2, 3)
def test_a_fixture_that_fails_on_one_rank_fails_the_test_on_all(fails_on_one):
    """Else the others would pass each further meeting of this size one too early."""
