"""Copies on the nodes with other numbers of ranks, other runs, full folders and histories."""

import os
import shutil

import numpy as np
import pytest
from test_checkpoint_store import everywhere
from test_train import fit
from tiers import Place, blank, same, state_of

import mpidist as md
from mpidist import events
from mpidist.checkpoint import histories, node_copies
from mpidist.checkpoint.storage import files, lock
from mpidist.checkpoint.write.save import Save
from mpidist.errors import CheckpointError, ConfigError, NoCheckpoint


def usable(store, like):
    """The steps that this store would take from the nodes."""
    store._open(make=False)
    return store._common(like, None)


@pytest.mark.ranks(3)
def test_other_ranks_read_the_shared_folder(comm, place, monkeypatch):
    """Copies are of so many ranks, each with what it had; and never of two saves at once."""
    place.killed_before_the_copy(2, monkeypatch)
    some = comm.Split(0 if comm.rank < 2 else 1)
    if comm.rank < 2:
        with md.TieredStore(some, place.shared, local=place.mine) as store:
            store.wait()
            assert usable(store, blank(some)) == []
    some.Free()
    with place.store() as store:
        other = blank(comm)
        other["own"]["flat"] = md.Shard(np.zeros(7 * comm.size), (7 * comm.size,), 0)
        assert usable(store, other) == []
        assert usable(store, blank(comm)) == [(0, 2)]


@pytest.mark.ranks(2, further=(4,))
def test_copies_of_two_saves_are_not_mixed(comm, place, monkeypatch, folder):
    """A node that was away for an attempt comes back with the copy of an earlier one."""
    place.killed_before_the_copy(2, monkeypatch)
    place.alone(lambda: shutil.copytree(place.nodes[1], folder / "kept"))
    place.killed_before_the_copy(2, monkeypatch, {**state_of(comm, 2), "w": np.full(5000, 7.0)})

    def bring_back():
        shutil.rmtree(place.nodes[1])
        shutil.copytree(folder / "kept", place.nodes[1])

    place.alone(bring_back)
    with place.store() as store:
        step, found = store.restore(blank(comm))
        assert step == 1
        same(comm, found, 1)


@pytest.mark.ranks(2)
def test_another_run_in_the_same_memory(comm, place, monkeypatch, folder):
    """Nodes' folders of one name, a new shared folder: nothing of the old run is taken."""
    place.killed_before_the_copy(2, monkeypatch)
    with md.TieredStore(comm, folder / "new", local=place.mine) as store:
        with pytest.raises(NoCheckpoint):
            store.restore(blank(comm))
        store.save(9, state_of(comm, 9))
        assert store.restore(blank(comm))[0] == 9
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 2
    place.alone(lambda: (place.shared / node_copies.ID).write_text("../../etc\n"))
    with place.store() as store:
        text = everywhere(comm, CheckpointError, lambda: store.restore(blank(comm)))
        assert ".local is damaged" in text


@pytest.mark.ranks(2, further=(4,))
def test_a_node_without_room(comm, folder, capfd, monkeypatch):
    """Said once; the step is in the shared folder when `save` returns. Then the room is back."""
    place = Place(comm, folder)
    place.alone(lambda: place.nodes[1].write_text("no folder"))
    with place.store(local_keep=2) as store:
        store.save(1, state_of(comm, 1))
        assert md.load(place.shared)["step"] == 1
        store.save_async(2, state_of(comm, 2))
        store.wait()
        assert md.load(place.shared)["step"] == 2
        place.alone(place.nodes[1].unlink)
        for step in (3, 4, 5):
            store.save(step, state_of(comm, step))
        store.wait()
        comm.Barrier()
        assert place.copies() == [[4, 5], [4, 5]], "no more than asked for"
        assert store.restore(blank(comm))[0] == 5
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if "mpidist: no copy" in line]
    assert len(lines) == (2 if comm.rank == 0 else 0), said


@pytest.mark.ranks(2)
def test_a_shared_folder_without_room(comm, folder, monkeypatch):
    """An error of the next call, on all ranks; the nodes hold the step meanwhile."""
    place = Place(comm, folder)
    create = files.create

    def refuse(name, where):
        if name.endswith(".h5") and "shared" in files_path(where):
            raise OSError(28, "No space left on device")
        return create(name, where)

    with place.store() as store:
        store.save(1, state_of(comm, 1))
        store.wait()
        monkeypatch.setattr(files, "create", refuse)
        store.save(2, state_of(comm, 2))
        assert "No space left" in everywhere(comm, CheckpointError, store.wait)
        monkeypatch.undo()
        assert store.restore(blank(comm))[0] == 2
        store.save(3, state_of(comm, 3))
    assert histories.all_steps(str(place.shared)) == [1, 3]


def files_path(descriptor):
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", ["allreduce", "servers"])
def test_training(comm, folder, strategy):
    """md.train takes it for a store: a run that is stopped goes on to the same weights."""
    chosen = md.AllReduce() if strategy == "allreduce" else md.ParameterServer(1)
    expected, _ = fit(comm, strategy=chosen)
    place = Place(comm, folder)
    store = place.store()
    fit(comm, strategy=chosen, checkpoint=store, checkpoint_every=3, stop_after=10)
    store.__exit__(KeyError, None, None)
    comm.Barrier()
    assert histories.all_steps(str(place.shared))[-1] == 10, (
        "the end of a run is in the shared folder"
    )
    events.recent.clear()
    with place.store() as store:
        parameters, result = fit(comm, strategy=chosen, checkpoint=store)
    assert "checkpoint_restored_from_nodes" in [kind for _, kind, _ in events.recent]
    assert (result.resumed_at, result.steps) == (10, 24)
    for name, array in expected.items():
        np.testing.assert_allclose(parameters[name], array, atol=2e-5)
    names = {path.name for path in place.shared.iterdir()}
    assert lock.NAME not in names


def uneven(comm, step):
    """Rank 0 has nothing but whole arrays, rank 1 nothing but a piece, the others nothing."""
    if comm.rank == 0:
        return {"w": np.full(50, step, "f4"), "piece": md.Shard(np.empty((0, 3)), (4, 3), (0, 0))}
    if comm.rank == 1:
        return {"piece": md.Shard(np.full((4, 3), step, "f8"), (4, 3), (0, 0))}
    return {"step": step}


@pytest.mark.ranks(3, further=(2,))
def test_ranks_that_hold_nothing_of_a_kind(comm, folder, capfd):
    """Ranks of one node need not have the same kinds of leaves, nor any array at all."""
    place = Place(comm, folder)
    store = md.TieredStore(comm, place.shared, local=folder / "node")
    store.save(1, uneven(comm, 1))
    store.wait()
    store.save(2, {})
    store.wait()
    store.__exit__(KeyError, None, None)
    comm.Barrier()
    assert "no copy" not in capfd.readouterr().err
    events.recent.clear()
    with md.TieredStore(comm, place.shared, local=folder / "node") as store:
        step, found = store.restore(uneven(comm, 0), step=1)
        assert step == 1
        if comm.rank == 0:
            assert (found["w"] == 1).all()
        if comm.rank == 1:
            assert (found["piece"].array == 1).all()
        assert store.restore({})[0] == 2
        kinds = [kind for _, kind, _ in events.recent]
        assert kinds.count("checkpoint_restored_from_nodes") == 2


@pytest.mark.ranks(1)
def test_bad_arguments(comm, folder):
    """One line each."""
    with pytest.raises(ConfigError, match="is the shared folder"):
        md.TieredStore(comm, folder, local=folder)
    with pytest.raises(ConfigError, match="local_keep=0"):
        md.TieredStore(comm, folder, local=folder / "node", local_keep=0)


# --------------------------------------------------------------------------------- histories


def killed_with(place, monkeypatch, step, before=None, **options):
    """What is left by a job that dies when its nodes hold `step` and the shared folder does not."""
    with monkeypatch.context() as patch:
        patch.setattr(Save, "start", lambda self: None)
        store = place.store(**options)
        if before is not None:
            store.restore(blank(place.comm), step=before)
        store.save(step, state_of(place.comm, step))
        store.__exit__(KeyError, None, None)
    place.comm.Barrier()


@pytest.mark.ranks(2, further=(4,))
def test_a_beginning_that_is_on_the_nodes_alone(comm, place, monkeypatch):
    """Issue 10: its number is lower than the shared folder's, and it is the newest all the same."""
    with place.store() as store:
        store.restore(blank(comm))
        store.save(3000, state_of(comm, 3000))
    killed_with(place, monkeypatch, 10, fresh=True)
    assert histories.all_steps(str(place.shared)) == [1, 3000]
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 10
    comm.Barrier()
    assert place.copies() == [[10], [10]], "close removes what the shared folder has, and no more"
    with place.store() as store:
        step, found = store.restore(blank(comm))
        assert step == 10
        same(comm, found, 10)
        store.save(20, state_of(comm, 20))
        store.wait()
        assert store.all_steps() == [20]
        assert store.all_steps(history=0) == [1, 3000]
        assert store.restore(history=0)[0] == 3000
    with place.store(fresh=True) as store, pytest.raises(NoCheckpoint):
        store.restore(blank(comm))


@pytest.mark.ranks(2, further=(4,))
def test_a_branch_that_is_on_the_nodes_alone(comm, place, monkeypatch):
    """The run went back to 1 from 3, on the nodes: what they hold of 3 goes with the next save."""
    with place.store() as store:
        store.restore(blank(comm))
        for step in (2, 3):
            store.save(step, state_of(comm, step))
        store.wait()
        store.__exit__(KeyError, None, None)
        comm.Barrier()
    killed_with(place, monkeypatch, 30, before=2)
    assert place.copies() == [[2, 30], [2, 30]]
    with place.store() as store:
        assert store.latest_step() == 3
        assert store.restore(blank(comm))[0] == 30
        store.save(31, state_of(comm, 31))
        store.wait()
        assert store.all_steps() == [1, 2, 31]
        assert store.all_steps(history=0) == [1, 2, 3]
        store.delete(31)
        assert place.copies()[0] == [30]
        comm.Barrier()
        assert store.restore(blank(comm))[0] == 30
