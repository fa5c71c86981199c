"""Copies in memory between two checkpoints: what a job goes on from, and what they need."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from test_checkpoint_store import everywhere
from tiers import blank, same, state_of

import mpidist as md
from mpidist.checkpoint import memory_copies
from mpidist.checkpoint.memory_copies import MemoryCopies, open_with_copies
from mpidist.checkpoint.storage import files
from mpidist.errors import ConfigError, MismatchError


def end(store):
    """End as a job that is killed: nothing is removed."""
    store.__exit__(KeyError, None, None)
    store._comm.Barrier()


@pytest.mark.ranks(2, 4, further=(3,))
def test_a_job_goes_on_from_the_newest_copy(comm, place):
    """Nothing of them is in the shared folder."""
    store = place.store(local_keep=1)
    assert store.restore(blank(comm))[0] == 1
    for step in (2, 3, 4):
        assert store.hold(step, state_of(comm, step))
    store.wait()
    assert store.all_steps() == [1]
    assert place.copies() == [[4], [4]]
    end(store)
    with place.store(local_keep=1) as store:
        step, found = store.restore(blank(comm))
        assert step == 4
        same(comm, found, 4)
        assert store.hold(5, state_of(comm, 5))
        store.save(6, state_of(comm, 6))
        assert store.hold(7, state_of(comm, 7))
        store.wait()
        assert store.all_steps() == [1, 6]
        comm.Barrier()
        assert place.copies() == [[7], [7]]
    with place.store() as store:
        assert store.restore(blank(comm))[0] == 7


@pytest.mark.ranks(2)
def test_a_branch_begins_in_the_shared_folder(comm, place):
    """A copy of a lower step is not of the newest history before that is saved."""
    store = place.store()
    store.restore(blank(comm))
    for step in (2, 9):
        store.save(step, state_of(comm, step))
    store.restore(blank(comm), step=2)
    assert store.hold(3, state_of(comm, 30))
    assert store.hold(4, state_of(comm, 40))
    store.wait()
    end(store)
    with place.store() as store:
        assert store.all_steps() == [1, 2, 3]
        step, found = store.restore(blank(comm))
        assert step == 4
        assert found["w"].tobytes() == state_of(comm, 40)["w"].tobytes()


def whole(step):
    return {"w": np.arange(3000.0) * step, "n": np.int64(step), "step": step}


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("more", [True, False])
def test_another_number_of_ranks(comm, folder, more):
    """Whole arrays are on every node: a job that is grown or shrunk goes on from them, too."""
    few = comm.Split(0 if comm.rank < 2 else 1)
    before, after = (few, comm) if more else (comm, few)
    if before is comm or comm.rank < 2:
        store = md.TieredStore(before, folder / "shared", local=folder / "node")
        for step in (1, 2):
            assert store.hold(step, whole(step))
        store.wait()
        end(store)
    comm.Barrier()
    if after is comm or comm.rank < 2:
        with md.TieredStore(after, folder / "shared", local=folder / "node") as store:
            assert store.latest_step() == 1
            step, found = store.restore({"w": np.zeros(3000), "n": np.int64(0)})
            assert step == found["step"] == found["n"] == 2
            assert found["w"].tobytes() == whole(2)["w"].tobytes()
    few.Free()


@pytest.mark.ranks(3)
def test_another_number_of_ranks_with_shards(comm, place):
    """A copy has the pieces of the ranks that were: the shared folder can divide them anew."""
    store = place.store()
    store.restore(blank(comm))
    for step in (2, 3):
        store.hold(step, state_of(comm, step))
    store.wait()
    end(store)
    few = comm.Split(0 if comm.rank < 2 else 1)
    if comm.rank < 2:
        with md.TieredStore(few, place.shared, local=place.mine) as store:
            like = {"w": np.zeros(5000), "n": np.int64(0)}
            box, flat = np.zeros((6, 30), "f4"), np.zeros(21)
            assert store.restore({**like, "own": {"box": box, "flat": flat}})[0] == 1
    few.Free()
    comm.Barrier()


@pytest.mark.ranks(2, further=(4,))
def test_every_third_step(comm, folder):
    """And a checkpoint of the same step is a copy as well."""
    folder = folder / "node"
    with open_with_copies(comm, folder.parent / "shared", folder) as store:
        assert folder.stat().st_mode & 0o777 == 0o700
        copies, held = MemoryCopies(store, 3), []
        copies.begin(0)
        for step in range(1, 10):
            copies.keep(comm, step, lambda at=step: whole(at))
            found = sorted(int(path.name[5:17]) for path in folder.glob("*/step-*"))
            held.append(comm.bcast(found, 0))
    assert [max(one, default=0) for one in held] == [0, 0, 3, 3, 3, 6, 6, 6, 9]
    assert max(map(len, held)) <= memory_copies.COPIES, "a thread removes the older one"


@pytest.mark.ranks(3, further=(2,))
@pytest.mark.parametrize("why", ["small", "full"])
def test_too_little_memory(comm, folder, monkeypatch, capfd, why):
    """Said once; the run goes on without copies, and its checkpoints are as ever."""
    if why == "small" and comm.rank == 1:
        free = SimpleNamespace(f_bavail=10, f_frsize=4096)
        monkeypatch.setattr(memory_copies, "os", SimpleNamespace(
            statvfs=lambda path: free, geteuid=os.geteuid))  # fmt: skip
    with open_with_copies(comm, folder / "shared", folder / "node") as store:
        if why == "full":
            create = files.create

            def refuse(name, where):
                there = os.readlink(f"/proc/self/fd/{where}")  # noqa: PTH115
                if name.endswith(".h5") and "node" in there and comm.rank == 1:
                    raise OSError(28, "No space left on device")
                return create(name, where)

            monkeypatch.setattr(files, "create", refuse)
        copies = MemoryCopies(store, 1)
        for step in range(1, 5):
            copies.keep(comm, step, lambda at=step: whole(at))
        comm.Barrier()
        assert not [*(folder / "node").glob("*/step-*")]
        store.save(5, whole(5))
        store.save_async(6, whole(6))
        store.wait()
        assert store.all_steps()[-2:] == [5, 6]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mpidist: no ")]
    assert len(said) == (comm.rank == 0)
    if said:
        text = {"small": "bytes are needed on node 0, and 40960 are free", "full": "No space left"}
        assert text[why] in said[0]


@pytest.mark.ranks(2)
def test_a_folder_of_somebody_else(comm, folder):
    """Others could read the state, or put another one there."""
    place = folder / "node"
    if comm.rank == 0:
        place.mkdir(mode=0o755)
        place.chmod(0o755)
    comm.Barrier()
    text = everywhere(comm, ConfigError, lambda: open_with_copies(comm, folder / "shared", place))
    assert "is not a private folder of this user" in text


@pytest.mark.ranks(3, further=(2,))
def test_different_arguments(comm, place):
    with place.store() as store:
        store.restore(blank(comm))
        everywhere(comm, MismatchError, lambda: store.hold(2 + comm.rank, state_of(comm, 2)))
    with place.store() as store:
        store.restore(blank(comm))
        everywhere(comm, ConfigError, lambda: store.hold("x", state_of(comm, 2)))
        assert store.hold(2, state_of(comm, 2))
        comm.Barrier()
