"""When a restore uses the copies on the nodes, and when it does not (issue 4, point 4).

Folders simulate nodes: ranks that give different folders count as ranks of different nodes.
"""

import shutil

import numpy as np
import pytest
from test_checkpoint_store import everywhere
from tiers import Place, blank, same, state_of

import mpidist as md
from mpidist import events
from mpidist.checkpoint import node_copies
from mpidist.errors import CheckpointError, StorageError


@pytest.mark.ranks(2, 4, further=(3,))
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


@pytest.mark.ranks(2, further=(4,))
def test_a_copy_that_is_newer_than_the_shared_folder_is_not_removed(comm, place, monkeypatch):
    """Not by a job that only looks."""
    place.killed_before_the_copy(2, monkeypatch)
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 2
    comm.Barrier()
    assert place.copies() == [[2], [2]]
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 2


@pytest.mark.ranks(2, 3, further=(4,))
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
        assert "reset their values" in text


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


@pytest.mark.covering
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
