"""Copies on the nodes: what they are good for, and when they are not taken (issue 4, point 4).

Nodes are simulated by folders: ranks that give different ones are on different nodes.
"""

import os
import shutil

import numpy as np
import pytest
from test_checkpoint_store import everywhere
from test_train import fit

import mpidist as md
from mpidist import events
from mpidist.checkpoint import histories, node_copies
from mpidist.checkpoint.storage import files, lock
from mpidist.checkpoint.write.save import Save
from mpidist.errors import CheckpointError, ConfigError, NoCheckpoint, StorageError


def state_of(comm, step):
    """Whole arrays, pieces of two kinds, and an extra that one rank alone knows."""
    w = np.arange(5000.0) * step
    box = md.Shard(
        np.full((2, 30), step + comm.rank, "f4"), (2 * comm.size, 30), (2 * comm.rank, 0)
    )
    flat = md.Shard(np.full(7, step - comm.rank, "f8"), (7 * comm.size,), 7 * comm.rank)
    more = {"seed": 3} if comm.rank == comm.size - 1 else {}
    return {"w": w, "n": np.int64(step), "own": {"box": box, "flat": flat}, "step": step, **more}


def blank(comm):
    state = state_of(comm, 0)
    for array in (state["w"], state["own"]["box"].array, state["own"]["flat"].array):
        array[...] = -1
    return state


def same(comm, found, step):
    want = state_of(comm, step)
    assert found["step"] == found["n"] == step
    assert found["seed"] == 3, "every rank gets all extras"
    assert found["w"].tobytes() == want["w"].tobytes()
    for name in ("box", "flat"):
        assert found["own"][name].array.tobytes() == want["own"][name].array.tobytes()


class Place:
    """A shared folder and two nodes with a folder each."""

    def __init__(self, comm, folder):
        self.comm, self.shared = comm, folder / "shared"
        self.nodes = [folder / "node0", folder / "node1"]
        self.mine = self.nodes[comm.rank * 2 // comm.size]

    def store(self, comm=None, **options):
        return md.TieredStore(comm or self.comm, self.shared, local=self.mine, **options)

    def copies(self):
        """The steps that each node holds."""
        return [sorted(int(p.name[5:17]) for p in node.glob("*/step-*")) for node in self.nodes]

    def killed_before_the_copy(self, step, monkeypatch, state=None):
        """What a job leaves that dies when its nodes hold `step` and the shared folder does not."""
        state = state_of(self.comm, step) if state is None else state
        with monkeypatch.context() as patch:
            patch.setattr(Save, "start", lambda self: None)
            store = self.store()
            store.restore(blank(self.comm))
            store.save(step, state)
            store.__exit__(KeyError, None, None)
        self.comm.Barrier()
        assert histories.all_steps(str(self.shared)) == [1]

    def alone(self, work):
        """Rank 0 does something to the files."""
        self.comm.Barrier()
        if self.comm.rank == 0:
            work()
        self.comm.Barrier()


@pytest.fixture
def place(comm, folder):
    if not comm:
        return None
    place = Place(comm, folder)
    store = place.store()
    store.save(1, state_of(comm, 1))
    store.wait()
    store.__exit__(KeyError, None, None)
    comm.Barrier()
    return place


@pytest.mark.ranks(2, 3, 4)
def test_the_newest_step_is_on_the_nodes(comm, place, monkeypatch):
    """A job that died before the shared folder had its last step goes on from it all the same."""
    place.killed_before_the_copy(2, monkeypatch)
    assert place.copies() == [[1, 2], [1, 2]]
    events.recent.clear()
    with place.store() as store:
        assert store.latest_step() == 1
        like = blank(comm)
        step, found = store.restore(like)
        assert step == 2
        same(comm, found, 2)
        assert found["w"] is like["w"], "in place"
        assert "checkpoint_restored_from_nodes" in [kind for _, kind, _ in events.recent]
        same(comm, store.restore(blank(comm), step=1)[1], 1)
        assert store.restore()[0] == 1, "whole arrays are in the shared folder only"
        store.save(3, state_of(comm, 3))
        store.save_async(4, state_of(comm, 4))
        store.wait()
        assert store.all_steps() == [1, 3, 4]
        assert store.verify(4) > 0
        comm.Barrier()
    assert md.load(place.shared)["step"] == 4
    comm.Barrier()
    assert not any(list(node.iterdir()) for node in place.nodes), "removed with the store"


@pytest.mark.ranks(2, 4)
def test_a_copy_that_is_newer_than_the_shared_folder_is_not_removed(comm, place, monkeypatch):
    """Not by a job that only looks."""
    place.killed_before_the_copy(2, monkeypatch)
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 2
    comm.Barrier()
    assert place.copies() == [[2], [2]]
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 2


@pytest.mark.ranks(2, 3, 4)
def test_a_lost_node(comm, place, monkeypatch):
    """The shared folder is what is left; the other node's copies are of another history then."""
    place.killed_before_the_copy(2, monkeypatch)
    place.alone(lambda: shutil.rmtree(place.nodes[1]))
    before = (place.shared / node_copies.ID).read_text()
    with place.store() as store:
        step, found = store.restore(blank(comm))
        assert step == 1
        same(comm, found, 1)
        comm.Barrier()
        assert place.copies() == [[1, 2], []], "not before this run saves"
        store.save(2, state_of(comm, 2))
        assert (place.shared / node_copies.ID).read_text() != before
        assert place.copies() == [[2], [2]]


@pytest.mark.ranks(3)
def test_a_look_at_the_shared_folder_removes_nothing(comm, place, monkeypatch):
    """An evaluation on other ranks, or of whole arrays, is not the run that has to come back."""
    place.killed_before_the_copy(2, monkeypatch)
    some = comm.Split(0 if comm.rank < 2 else 1)
    if comm.rank < 2:
        with md.TieredStore(some, place.shared, local=place.mine) as store:
            like = {"w": np.zeros(5000), "n": np.int64(0)}
            box, flat = np.zeros((6, 30), "f4"), np.zeros(21)
            assert store.restore({**like, "own": {"box": box, "flat": flat}})[0] == 1
    some.Free()
    comm.Barrier()
    with place.store() as store:
        assert store.restore()[0] == 1
        assert store.restore(blank(comm))[0] == 2


@pytest.mark.ranks(2)
def test_a_run_that_begins_anew(comm, place, monkeypatch):
    """Copies are of the run that saved them: one that did not go on from them never gets them."""
    place.killed_before_the_copy(9, monkeypatch)
    place.alone(lambda: shutil.rmtree(place.shared / "step-000000000001"))
    store = place.store()
    store.save(2, state_of(comm, 2))
    store.wait()
    store.__exit__(KeyError, None, None)
    comm.Barrier()
    assert place.copies() == [[2], [2]]
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 2


@pytest.mark.ranks(2)
def test_a_node_keeps_no_more_after_a_restore(comm, place, monkeypatch):
    """Memory is short there: what was restored goes like any other step."""
    place.killed_before_the_copy(2, monkeypatch)
    with place.store(local_keep=1) as store:
        assert store.restore(blank(comm))[0] == 2
        for step in (3, 4):
            store.save(step, state_of(comm, step))
        store.wait()
        comm.Barrier()
        assert place.copies() == [[4], [4]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["save", "save_async"])
def test_a_run_without_node_copies_in_between(comm, place, monkeypatch, method):
    """It went on from the shared folder: what nodes hold is no longer of this history."""
    place.killed_before_the_copy(3, monkeypatch)
    with md.CheckpointStore(comm, place.shared) as store:
        assert store.restore(blank(comm))[0] == 1
        getattr(store, method)(2, state_of(comm, 20))
    with place.store() as store:
        step, found = store.restore(blank(comm))
        assert step == 2
        same(comm, found, 20)


@pytest.mark.ranks(2)
def test_copies_that_cannot_be_read(comm, place, monkeypatch, capfd):
    """Said, and the shared folder is taken, as where there are none."""
    place.killed_before_the_copy(2, monkeypatch)

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(node_copies, "usable_steps", refuse) if comm.rank == 1 else None
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 1
    assert ("no copies on the nodes: rank 1 of 2" in capfd.readouterr().err) == (comm.rank == 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["unreadable", "gone"])
def test_a_copy_that_fails_while_arrays_are_filled(comm, place, monkeypatch, how):
    """Other ranks' arrays are overwritten by then: it is an error, and not that of an empty store.

    Whoever takes it for a first start would begin on arrays of which some are changed.
    """
    place.killed_before_the_copy(2, monkeypatch)
    place.alone(lambda: shutil.rmtree(place.shared / "step-000000000001"))
    with place.store() as store:
        store._open(make=False)
        restore = store._local.restore

        def fail(*args, **options):
            if how == "unreadable":
                raise OSError(5, "Input/output error")
            shutil.rmtree(store._local.path)
            return restore(*args, **options)

        if comm.rank == 1:
            monkeypatch.setattr(store._local, "restore", fail)
        kind = StorageError if how == "unreadable" else CheckpointError
        text = everywhere(comm, kind, lambda: store.restore(blank(comm)))
        assert "restore of step 2 from the nodes: rank 1 of 2" in text
        assert "set them anew" in text


@pytest.mark.ranks(2)
def test_time_is_counted_once(comm, folder):
    """A save of two stores is one save, in the spans too."""
    place = Place(comm, folder)
    events.spans.clear()
    with place.store() as store:
        store.save(1, state_of(comm, 1))
    assert {name: count for name, (count, _) in events.spans.items()} == {
        "tiers.save": 1,
        "checkpoint.save": 1,
    }


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("how", ["flip", "cut", "manifest", "gone"])
def test_a_damaged_copy(comm, place, monkeypatch, how, capfd):
    """Found on one node, before any array of any rank is filled; all go back by one step."""
    place.killed_before_the_copy(2, monkeypatch)

    def damage():
        (step,) = place.nodes[1].glob("*/step-000000000002")
        shard = sorted(step.glob("shard-*.h5"))[-1]
        file = step / "MANIFEST.json" if how == "manifest" else shard
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.unlink()
        if how != "gone":
            file.write_bytes(data[:-1] if how == "cut" else data)

    place.alone(damage)
    with place.store() as store:
        step, found = store.restore(blank(comm))
        assert step == 1
        same(comm, found, 1)
    said = capfd.readouterr().err
    assert ("no good copy of step 2 on the nodes" in said) == (how == "flip" and comm.rank == 0)


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


@pytest.mark.ranks(2, 4)
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


@pytest.mark.ranks(2, 4)
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


@pytest.mark.ranks(2, 3)
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


@pytest.mark.ranks(2, 4)
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


@pytest.mark.ranks(2, 4)
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
