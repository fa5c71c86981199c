"""The ranks' half of a hand-over: whose turn it is, and which state is the newest."""

import sys

import numpy as np
import pytest

import mpidist as md
from mpidist.checkpoint.handed_copy import folder_of, restore_newest, save_copy
from mpidist.checkpoint.memory_copies import open_with_copies
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import NoCheckpoint
from mpidist.fault_tolerance import hand_over
from mpidist.launch import heartbeat
from mpidist.launch.environment import ATTEMPT_BEFORE


def state(step):
    return {"w": np.arange(3000.0) * step, "step": step}


@pytest.fixture
def launched(monkeypatch):
    """Say by which `mpidist launch` this process was started; "" is none."""
    return lambda name: monkeypatch.setenv(heartbeat.LAUNCHER, name)


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


@pytest.mark.ranks(2, further=(1,))
def test_the_newest_state(comm, folder, launched):
    """A copy that is newer than the store; not one that is older, or of an earlier launch."""
    launched("host 1 1")
    memory, path = folder / "memory", str(folder / "shared")
    with CheckpointStore(comm, path) as store:
        store.save(3, state(3))
        assert save_copy(comm, memory, path, 5, state(5))
    for handed in (heartbeat.IN_MEMORY, heartbeat.IN_STORE, ""):
        with CheckpointStore(comm, path) as store:
            found, is_copy = restore_newest(comm, memory, store, state(0), handed)
            assert (found["step"], is_copy) == (5, True)
    launched("host 2 2")
    with CheckpointStore(comm, path) as store:
        assert restore_newest(comm, memory, store, state(0), "")[0]["step"] == 3
    launched("host 1 1")
    with CheckpointStore(comm, path) as store:
        store.restore(state(0))
        store.save(7, state(7))
    with CheckpointStore(comm, path) as store:
        found, is_copy = restore_newest(comm, memory, store, state(0), "")
        assert (found["step"], is_copy) == (7, False)
    comm.Barrier()
    assert not folder_of(memory, path).exists(), "it needs memory, and nobody needs it any more"


@pytest.mark.ranks(2)
def test_a_fresh_run_finds_no_old_copy(comm, folder, launched):
    """That of a job whose `mpidist launch` was killed is still there."""
    launched("host 1 1")
    memory, path = folder / "memory", str(folder / "shared")
    assert save_copy(comm, memory, path, 5, state(5))
    launched("host 2 2")
    with CheckpointStore(comm, path, fresh="host 2 2") as store, pytest.raises(NoCheckpoint):
        restore_newest(comm, memory, store, state(0), "")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("why", ["another user", "no folder", "no module"])
def test_a_copy_that_cannot_be_made(comm, folder, launched, capfd, monkeypatch, why):
    """The state is saved to the store instead, and a line says why."""
    launched("host 1 1")
    memory = folder / "none" / "memory" if why == "no folder" else folder / "memory"
    if comm.rank == 1 and why == "no module":  # the other rank must not wait for this one
        monkeypatch.setitem(sys.modules, "mpidist.checkpoint.memory_copies", None)
    if comm.rank == 0 and why == "another user":
        memory.mkdir()
        memory.chmod(0o755)
    comm.Barrier()
    assert not save_copy(comm, memory, str(folder / "shared"), 5, state(5))
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mpidist: no ")]
    assert len(said) == (comm.rank == 0)
    texts = {"another user": "private folder", "no folder": "No such file"}
    for line in said:
        assert texts.get(why, "mpidist.checkpoint.memory_copies") in line
    assert md.allreduce(comm, np.ones(1))[0] == comm.size


@pytest.mark.ranks(1, 2)
def test_the_ranks_before_leave_while_these_are_ready(comm, folder):
    """They remove the folder of the copies when it is empty: the next copy makes it, private."""
    with open_with_copies(comm, folder / "shared", folder / "node") as new:
        with open_with_copies(comm, folder / "shared", folder / "node") as old:
            old.save(1, state(1))
        comm.Barrier()
        assert not (folder / "node").exists()
        new.restore(state(0))
        assert new.hold(2, state(2))
        assert (folder / "node").stat().st_mode & 0o777 == 0o700
        comm.Barrier()
