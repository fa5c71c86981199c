"""A store on several ranks: errors reach all ranks, mismatches are named, saves may overlap."""

import resource
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from until import wait_until

import mpidist as md
from mpidist.checkpoint.storage import files, lock
from mpidist.checkpoint.store import CheckpointStore
from mpidist.checkpoint.write import save
from mpidist.checkpoint.write import shard_writer as shard
from mpidist.errors import (
    CheckpointError,
    ProtocolError,
)


def names(folder):
    """What lies in a store, but for the lock of those that are open."""
    return sorted(path.name for path in folder.iterdir() if path.name != lock.NAME)


def state_of(step):
    rng = np.random.default_rng(step)
    return {
        "parameters": {"w": rng.standard_normal((40, 9)), "b": rng.standard_normal(9)},
        "step": step,
        "losses": [0.5, float("nan"), None, {"name": "x"}],
    }


def blank():
    return {"parameters": {"w": np.zeros((40, 9)), "b": np.zeros(9)}, "step": -1}


def same(state, step):
    expected = state_of(step)
    assert state["step"] == step
    assert repr(state["losses"]) == repr(expected["losses"])
    for name, array in expected["parameters"].items():
        assert state["parameters"][name].tobytes() == array.tobytes()


def everywhere(comm, kind, work):
    """The text of the error that `work` raises on all ranks: of one class, the same text."""
    with pytest.raises(kind) as caught:
        work()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert caught.value.everywhere
    return texts[0]


@pytest.mark.ranks(1, 3)
def test_save_restore_keep(comm, folder):
    """R52, R53: what was saved comes back, in place, and only `keep` steps stay."""
    with CheckpointStore(comm, folder / "new" / "store", keep=2) as store:
        assert store.all_steps() == []
        assert store.latest_step() is None
        for step in (1, 2, 3):
            store.save(step, state_of(step))
        assert store.all_steps() == [2, 3]
        assert store.latest_step() == 3
        like = blank()
        step, state = store.restore(like)
        assert step == 3
        same(state, 3)
        assert state["parameters"]["w"] is like["parameters"]["w"]
        assert store.restore(blank(), step=np.int64(2))[0] == 2
        same(md.load(store.path), 3)
    store.close()
    with pytest.raises(ProtocolError, match="closed"):
        store.save(4, state_of(4))


@pytest.mark.ranks(2)
def test_async_gives_the_same_bytes(comm, folder):
    """R58: the copy is taken before the call returns; the files equal those of a plain save."""
    with CheckpointStore(comm, folder / "a") as store:
        state = state_of(5)
        store.save_async(5, state)
        for array in state["parameters"].values():
            array[...] = -7
        store.wait()
        assert store.all_steps() == [5]
        store.save_async(6, state_of(6))  # committed by close
    with CheckpointStore(comm, folder / "b") as store:
        store.save(5, state_of(5))
        store.save_async(6, state_of(6))
        assert store.restore(blank())[0] == 6
        store.save_async(7, state_of(7))
        store.save(8, state_of(8))
        assert store.all_steps() == [6, 7, 8]
    if comm.rank == 0:
        for one in sorted((folder / "a").rglob("step-*/*")):
            if one.parent.name.endswith("6"):
                assert one.read_bytes() == (folder / "b" / one.parent.name / one.name).read_bytes()
        with CheckpointStore(MPI.COMM_SELF, folder / "a") as store:
            same(store.restore(step=5)[1], 5)


@pytest.mark.ranks(3, further=(1,))
def test_a_save_in_the_background_commits_by_itself(comm, folder, monkeypatch):
    """Issue 4, point 4: no rank makes another call of the store, and one is slow to write."""
    write = shard.write

    def slow(*args):
        time.sleep(0.2)
        return write(*args)

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shard, "write", slow)
    with CheckpointStore(comm, folder) as store:
        for step in (1, 2):  # the second one uses the first one's memory again
            state = state_of(step)
            store.save_async(step, state)
            for array in state["parameters"].values():
                array[...] = -7
            wait_until((folder / f"step-{step:012d}" / "MANIFEST.json").exists, 30)
            same(md.load(folder), step)
        comm.Barrier()


@pytest.mark.ranks(2)
def test_interrupted_async_is_invisible(comm, folder, monkeypatch):
    """An exception on one rank alone neither hangs nor commits; the background thread is over."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, state_of(1))
    before = set(threading.enumerate())

    def killed(*args):
        raise OSError(5, "as good as dead")

    try:
        with CheckpointStore(comm, folder) as store:
            store.restore()
            if comm.rank == 1:
                monkeypatch.setattr(shard, "write", killed)
                monkeypatch.setattr(save.Save, "_tell_failure", lambda self: None)
            store.save_async(2, state_of(2))
            if comm.rank == 1:
                raise KeyError("user")
            time.sleep(0.1)
            store._abandon()  # what the launcher's abort does to the others
    except KeyError:
        assert comm.rank == 1
    assert set(threading.enumerate()) <= before
    comm.Barrier()
    assert names(folder) == ["step-000000000001"]
    with CheckpointStore(comm, folder) as store:
        same(store.restore()[1], 1)


@pytest.mark.ranks(2, 3)
def test_a_writer_that_fails_is_not_waited_for(comm, folder, monkeypatch):
    """Rank 0's thread learns of it from the folder, before any rank makes another call."""

    def full(*args):
        raise OSError(28, "No space left on device")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shard, "write", full)
    with CheckpointStore(comm, folder) as store:
        store.save_async(1, state_of(1))
        if comm.rank == 0:
            store._pending._thread.join(30)
            assert not store._pending._thread.is_alive()
        comm.Barrier()
        text = everywhere(comm, CheckpointError, store.wait)
        assert f"rank {comm.size - 1} of {comm.size}" in text
        assert "No space left on device" in text
        comm.Barrier()
        assert names(folder) == []


@pytest.mark.ranks(2)
def test_a_writer_that_says_nothing_is_given_up(comm, folder, monkeypatch):
    """A thread of rank 0 never waits for ever for another's shard."""
    monkeypatch.setattr(save, "PATIENCE_SECONDS", 0.2)
    gone = threading.Event()
    if comm.rank == 1:
        monkeypatch.setattr(shard, "write", lambda *args: gone.wait(60) and b"")
    with CheckpointStore(comm, folder) as store:
        store.save_async(1, state_of(1))
        if comm.rank == 0:
            store._pending._thread.join(30)
        comm.Barrier()
        gone.set()
        text = everywhere(comm, CheckpointError, store.wait)
        assert "ranks [1] wrote nothing" in text
        comm.Barrier()
        assert names(folder) == []


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("method", ["save", "save_async"])
def test_a_full_disk_on_one_rank(comm, folder, method):
    """The same CheckpointError on all ranks, no litter, earlier steps intact, later saves work."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, state_of(1))
        big = {"parameters": {"w": np.ones(90_000)}}
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.rank == comm.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))

        def work():
            getattr(store, method)(2, big)
            store.wait()

        try:
            text = everywhere(comm, CheckpointError, work)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert f"rank {comm.size - 1} of {comm.size}" in text
        assert "File too large" in text
        comm.Barrier()
        assert names(folder) == ["step-000000000001"]
        same(store.restore()[1], 1)
        store.save(2, state_of(2))
        same(store.restore()[1], 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", ["make_folder", "create", "write_at", "sync", "rename"])
def test_no_space_at_any_call(comm, folder, call, monkeypatch):
    """ENOSPC from any call of rank 0 is one error on all ranks, and the store goes on."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, state_of(1))

        def refuse(*_):
            raise OSError(28, "No space left on device")

        if comm.rank == 0:
            monkeypatch.setattr(files, call, refuse)
        text = everywhere(comm, CheckpointError, lambda: store.save(2, state_of(2)))
        assert "No space left on device" in text
        monkeypatch.undo()
        store.save(3, state_of(3))
        assert store.all_steps() == [1, 3]
        if comm.rank == 0:
            assert all(not name.startswith(".") for name in names(folder))
