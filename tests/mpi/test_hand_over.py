"""The ranks' half of a hand-over: whose turn it is, and which state is the newest."""

import pytest

from mpidist.fault_tolerance import hand_over
from mpidist.launch import heartbeat
from mpidist.launch.environment import ATTEMPT_BEFORE


@pytest.mark.ranks(2, 3)
def test_a_death_when_the_turn_has_come(comm, folder, monkeypatch):
    """Some of the living ranks have seen the decision, and others have not: all go on."""
    monkeypatch.setenv(ATTEMPT_BEFORE, str(folder))
    monkeypatch.setattr(hand_over, "_turn_has_come", comm.rank == 0)
    called = []
    monkeypatch.setattr(hand_over, "at_turn", [lambda: called.append(1)] * (comm.rank > 0))
    if comm.rank == 0:
        heartbeat.make_decision(folder, heartbeat.IN_MEMORY)
    comm.Barrier()
    texts = {hand_over.wait_for_turn(comm)}
    assert texts <= {"", heartbeat.IN_MEMORY}
    assert len(set(comm.allgather(*texts))) == 1
    assert not hand_over.is_waiting()
    assert called == [1] * (comm.rank > 0)
