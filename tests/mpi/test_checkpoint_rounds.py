"""Count the small collective calls of a save, and of a restore of a store without damage."""

import numpy as np
import pytest

import mpidist as md
from mpidist.checkpoint.write.save import Save
from mpidist.errors import MismatchError
from mpidist.runtime.context import of

#: What all ranks call together on a communicator of control.
COLLECTIVES = ("Iallreduce", "Igather", "Igatherv", "Ibcast", "Iscatter", "Iscatterv", "Ibarrier")


class Counted:
    """A communicator that keeps the names of its collectives."""

    def __init__(self, comm):
        self._comm, self.calls = comm, []

    def __getattr__(self, name):
        if name in COLLECTIVES:
            self.calls.append(name)
        return getattr(self._comm, name)


@pytest.fixture
def calls(comm, monkeypatch):
    """The collectives of control on `comm`, as a list that the test empties."""
    context = of(comm)
    counted = Counted(context.control)
    monkeypatch.setattr(context, "control", counted)
    return counted.calls


def replicated(comm, value: float) -> dict:
    return {
        "parameters": {f"w{k}": np.full((50, 20), value + k) for k in range(40)},
        "scalar": np.float64(value),
        "step": int(value),
        "lr": [0.1, 0.2],
    }


def sharded(comm, value: float) -> dict:
    part = np.full((30, 4), value + comm.rank)
    return {
        **replicated(comm, value),
        "m": md.Shard(part, (30 * comm.size, 4), (30 * comm.rank, 0)),
    }


def taken(calls: list) -> list:
    found, calls[:] = calls[:], []
    return found


@pytest.mark.ranks(3, further=(4,))
@pytest.mark.parametrize("state", [replicated, sharded])
def test_a_restore(comm, folder, calls, state):
    """The agreement on arguments and on what is wanted; rank 0's answer; the outcome."""
    with md.CheckpointStore(comm, folder) as store:
        store.save(1, state(comm, 1.0))
        taken(calls)
        like = state(comm, 0.0)
        assert store.restore(like)[0] == 1
        assert taken(calls) == ["Iallreduce", "Ibcast", "Iallreduce"]
        assert store.restore(like, 1, verify=False)[0] == 1
        assert taken(calls) == ["Iallreduce", "Ibcast", "Iallreduce"]
        assert (like["parameters"]["w3"] == 4.0).all()
        store.restore()  # new arrays: has every rank the memory?
        assert taken(calls) == ["Iallreduce", "Ibcast", "Iallreduce", "Iallreduce", "Iallreduce"]


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("state", [replicated, sharded])
def test_a_save(comm, folder, calls, state):
    """The agreement on the step and the plan; what the tables say; the outcome."""
    with md.CheckpointStore(comm, folder) as store:
        assert taken(calls) == ["Iallreduce"]
        store.save(1, state(comm, 1.0))
        first = taken(calls)
        if state is replicated:  # each rank plans for ranks that hold what it holds
            assert first == ["Iallreduce", "Igather", "Ibcast"]
        for step in (2, 3):
            store.save(step, state(comm, float(step)))
            assert taken(calls) == ["Iallreduce", "Igather", "Ibcast"]
        like = state(comm, 0.0)
        assert store.restore(like)[0] == 3
        assert (like["parameters"]["w3"] == 6.0).all()
        taken(calls)
        store.save(4, like)
        assert taken(calls) == ["Iallreduce", "Igather", "Ibcast"]
        store.save_async(5, like)
        assert taken(calls) == ["Iallreduce"]
        store.wait()
        assert taken(calls) == ["Iallreduce", "Igather", "Ibcast"]
    assert md.load(folder, 5)["parameters"]["w3"][0, 0] == 6.0


@pytest.mark.ranks(3, further=(4,))
def test_a_store_with_copies_on_nodes(comm, folder, calls):
    """A save has one more: who holds what, told to all, and the outcome on the nodes.

    The end of the shared save comes with the next call, the rounds of a node are its own.
    """
    local = folder / "local"
    with md.TieredStore(comm, folder / "shared", local=local, fresh=True) as store:
        for step in (1, 2, 3):
            store.save(step, replicated(comm, float(step)))
            found = taken(calls)
            store.wait()
            taken(calls)
        assert found == ["Iallreduce", "Iallreduce", "Ibcast", "Iallreduce"]


@pytest.mark.ranks(3, further=(4,))
def test_a_store_for_which_nodes_hold_nothing(comm, folder, calls):
    """A restore has one more: are there copies at all?"""
    with md.CheckpointStore(comm, folder / "shared") as store:
        store.save(1, replicated(comm, 1.0))
    with md.TieredStore(comm, folder / "shared", local=folder / "local") as store:
        taken(calls)
        assert store.restore(replicated(comm, 0.0))[0] == 1
        assert taken(calls) == ["Iallreduce", "Iallreduce", "Ibcast", "Iallreduce"]


@pytest.mark.ranks(3, 4)
def test_a_rank_that_leaves_a_save_is_named_whatever_it_does_next(comm, folder, monkeypatch):
    """The others wait in a round without an agreement, which its next operation must not meet."""
    mine = comm.Dup()
    write = Save.write

    def interrupted(save):
        if mine.rank == 0:
            raise KeyboardInterrupt("stopped by the test")
        write(save)

    store = md.CheckpointStore(mine, folder)
    monkeypatch.setattr(Save, "write", interrupted)
    with pytest.raises((KeyboardInterrupt, MismatchError), match="stopped by the test"):
        store.save(1, replicated(mine, 1.0))
    with pytest.raises(MismatchError, match="KeyboardInterrupt: stopped by the test"):
        md.allreduce(mine, np.ones(3))
    store._abandon()
