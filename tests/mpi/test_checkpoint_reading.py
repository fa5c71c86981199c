"""A restore on another number of ranks reads hardly more bytes than the state has."""

import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import mpidist as md
from mpidist.checkpoint.read import fill, read_once, restore
from mpidist.checkpoint.read.reader import Reader
from mpidist.checkpoint.storage import files
from mpidist.errors import CheckpointError, StorageError
from mpidist.partition import BlockPartition

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import fake_cupy

#: As 1 GiB in blocks of 1 MiB.
ELEMENTS, BLOCK = 1 << 20, 8 << 10


class Counter:
    """Counts what the system says it has read from files of checkpoints."""

    def __init__(self, monkeypatch):
        self.total, lock, read = 0, threading.Lock(), files.os.preadv

        def counted(*args):
            count = read(*args)
            with lock:
                self.total += count
            return count

        monkeypatch.setattr(files.os, "preadv", counted)

    def of_all(self, comm):
        total, self.total = comm.allreduce(self.total), 0
        return total


def state_of(comm, blank=False):
    """Half replicated, in arrays of all sizes, half cut over the ranks."""
    low, high = BlockPartition(ELEMENTS, comm.size).range(comm.rank)
    sizes = [3, 1000, 70_001, 0, ELEMENTS - 71_004]
    cuts = np.cumsum([0, *sizes])
    values = np.arange(ELEMENTS, dtype="f4")
    whole = {f"w{k}": values[a:b].copy() for k, (a, b) in enumerate(pairwise(cuts))}
    block = -values[low:high]
    if blank:
        block = np.zeros_like(block)
        for array in whole.values():
            array[...] = 0
    momentum = md.Shard(block, (ELEMENTS,), low)
    return {"parameters": whole, "momentum": {"w": momentum}}


def check(state, comm):
    expected = state_of(comm)
    for name, array in expected["parameters"].items():
        np.testing.assert_array_equal(state["parameters"][name], array)
    np.testing.assert_array_equal(state["momentum"]["w"].array, expected["momentum"]["w"].array)


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3, 5, 8)
@pytest.mark.parametrize("writers", ["all", 1, 3])
def test_bytes_read_on_any_number_of_ranks(comm, folder, monkeypatch, writers):
    """Issue 4: at q ranks at most 1.02 of the state's bytes, manifest and tables included."""
    monkeypatch.setattr(files, "BLOCK", BLOCK)
    with md.CheckpointStore(comm, folder, writers=writers) as store:
        store.save(1, state_of(comm))
        counter = Counter(monkeypatch)
        state = store.restore(state_of(comm, blank=True))[1]
        read = counter.of_all(comm)
    check(state, comm)
    assert 1.0 <= read / (2 * 4 * ELEMENTS) <= 1.02


@pytest.mark.covering
@pytest.mark.ranks(3, 5, 8)
@pytest.mark.parametrize("saved_by", [1, 2])
def test_bytes_read_on_more_ranks_than_saved(comm, folder, monkeypatch, saved_by):
    """The same where the cuts of who reads are not those of who wrote."""
    monkeypatch.setattr(files, "BLOCK", BLOCK)
    few = comm.Split(int(comm.rank >= saved_by), comm.rank)
    try:
        if comm.rank < saved_by:
            with md.CheckpointStore(few, folder) as store:
                store.save(1, state_of(few))
    finally:
        few.Free()
    comm.Barrier()
    counter = Counter(monkeypatch)
    with md.CheckpointStore(comm, folder) as store:
        state = store.restore(state_of(comm, blank=True))[1]
        read = counter.of_all(comm)
        check(state, comm)
        whole = store.restore()[1]
        every = counter.of_all(comm)
    assert 1.0 <= read / (2 * 4 * ELEMENTS) <= 1.02
    # Without `like` every rank gets every array: read once all the same.
    np.testing.assert_array_equal(whole["momentum"]["w"], -np.arange(ELEMENTS, dtype="f4"))
    assert 1.0 <= every / (2 * 4 * ELEMENTS) <= 1.02


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("saved", ["whole", "tiles"])
@pytest.mark.parametrize("staged", [None, 0])
def test_what_is_passed_on(comm, folder, monkeypatch, saved, staged):
    """Large parts travel as they lie, in pieces, some at a time; small ones and rows together.

    Also where one rank has to fill its arrays by and by.
    """
    if staged is not None:
        monkeypatch.setattr(fill, "STAGED", staged)
    monkeypatch.setattr(files, "BLOCK", BLOCK)
    monkeypatch.setattr(read_once, "_LARGE", 20_000)
    monkeypatch.setattr(read_once, "_MESSAGE", 7_000)
    monkeypatch.setattr(read_once, "_IN_FLIGHT", 3)
    w = np.arange(600_000.0).reshape(600, 1000)
    low, high = BlockPartition(1000, comm.size).range(comm.rank)
    tile = md.Shard(w[:, low:high].copy(), w.shape, (0, low))
    state = {"w": w if saved == "whole" else tile, "b": np.arange(2500), "c": np.arange(7) > 3}
    state |= {"s": np.float64(3), "t": np.int64(5)}
    with md.CheckpointStore(comm, folder) as store:
        store.save(1, state)
        like = {"w": np.zeros_like(w), "b": np.zeros(2500, int), "c": np.zeros(7, bool)}
        like["s"] = np.float64(0) if comm.rank else np.zeros(())
        like["t"] = np.int64(0)
        for got in (store.restore(like)[1], store.restore()[1]):
            np.testing.assert_array_equal(got["w"], w)
            np.testing.assert_array_equal(got["b"], state["b"])
            np.testing.assert_array_equal(got["c"], state["c"])
            assert (got["s"], got["t"]) == (3, 5)


@pytest.mark.ranks(2, further=(3,))
def test_damage_in_what_another_rank_reads(comm, folder, monkeypatch):
    """The rank that reads a block for all finds it; all go back to the step before."""
    monkeypatch.setattr(files, "BLOCK", BLOCK)
    with md.CheckpointStore(comm, folder) as store:
        for step in (1, 2):
            store.save(step, state_of(comm))
        comm.Barrier()
        for place in (0.1, 0.9):
            path = folder / "step-000000000002" / "shard-00001.h5"
            if comm.rank == 0:
                data = bytearray(path.read_bytes())
                data[int(place * len(data))] ^= 1
                path.write_bytes(data)
            comm.Barrier()
            step, state = store.restore(state_of(comm, blank=True))
            assert step == 1
            check(state, comm)
            comm.Barrier()


@pytest.mark.ranks(3, further=(2,))
def test_a_rank_that_reads_slowly(comm, folder, monkeypatch):
    """What it is to pass on goes when it has come, not before, whatever the others have by then."""
    monkeypatch.setattr(files, "BLOCK", BLOCK)
    monkeypatch.setattr(read_once, "_LARGE", 20_000)
    with md.CheckpointStore(comm, folder) as store:
        store.save(1, state_of(comm))
        read, slow = files.os.preadv, comm.rank == 1
        monkeypatch.setattr(files.os, "preadv", lambda *a: time.sleep(0.01 * slow) or read(*a))
        check(store.restore(state_of(comm, blank=True))[1], comm)


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
def test_a_rank_that_cannot_read(comm, folder, monkeypatch, error):
    """The others get what it had to pass on as it is, and all learn what became of it."""
    monkeypatch.setattr(files, "BLOCK", BLOCK)
    monkeypatch.setattr(read_once, "_LARGE", 20_000)
    with md.CheckpointStore(comm, folder) as store:
        store.save(1, state_of(comm))
        with monkeypatch.context() as patch:
            if comm.rank == 1:

                def broken(*_):
                    raise error

                patch.setattr(files.os, "preadv", broken)
            with pytest.raises(md.MpidistError, match="reset their values before use") as caught:
                store.restore(state_of(comm, blank=True))
        assert len(set(comm.allgather(str(caught.value)))) == 1
        check(store.restore(state_of(comm, blank=True))[1], comm)


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["Filling", "message_room"])
@pytest.mark.parametrize("few", [0, 2048])
def test_a_rank_without_memory_for_its_plan(comm, folder, monkeypatch, where, few):
    """All learn of it, with the outcome or before, and the store goes on."""
    monkeypatch.setattr(restore, "_FEW", few)

    def fail(*_):
        raise MemoryError("no room for a plan")

    with md.CheckpointStore(comm, folder) as store:
        state = state_of(comm)
        if few and where == "Filling":  # a small plan of whole arrays takes next to nothing
            del state["parameters"]
        like = {name: state_of(comm, blank=True)[name] for name in state}
        store.save(1, state)
        with monkeypatch.context() as patch:
            if comm.rank == 1:
                patch.setattr(restore, where, fail)
            with pytest.raises(StorageError, match=r"rank 1 of .*no room for a plan") as caught:
                store.restore(like)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        store.save(2, state)
        got = store.restore(like)[1]
        np.testing.assert_array_equal(got["momentum"]["w"].array, state["momentum"]["w"].array)


@pytest.mark.ranks(2, 3)
def test_arrays_that_only_some_want_or_want_otherwise(comm, folder):
    """A rank without an array, and one whose array has strides, read for themselves."""
    with md.CheckpointStore(comm, folder) as store:
        state = {"a": np.arange(5000.0), "b": np.arange(600.0).reshape(20, 30), "c": np.arange(9)}
        store.save(1, state)
        like = {"c": np.zeros(9, int)}
        if comm.rank:
            like["a"] = np.zeros(5000)
        like["b"] = np.zeros((30, 20)).T if comm.rank == 0 else np.zeros((20, 30))
        got = store.restore(like)[1]
        for name in got:
            np.testing.assert_array_equal(got[name], state[name])
        assert ("a" in got) == (comm.rank > 0)
        comm.Barrier()


@pytest.mark.ranks(1, 3, further=(2,))
@pytest.mark.parametrize("good", [1, 2])
def test_two_names_of_one_array(comm, folder, monkeypatch, good):
    """Tied weights, which several ranks read and pass on under both names."""
    monkeypatch.setattr(files, "BLOCK", BLOCK)
    monkeypatch.setattr(read_once, "_LARGE", 20_000)
    with md.CheckpointStore(comm, folder) as store:
        for step in (1, 2):
            w = np.arange(70_000.0) * step
            store.save(step, {"a": w, "b": w, "c": np.ones(5)})
        if comm.rank == 0 and good == 1:
            path = sorted((folder / "step-000000000002").glob("*.h5"))[-1]
            data = bytearray(path.read_bytes())
            data[data.rindex(np.ones(1).tobytes())] ^= 1  # in c, behind all others
            path.write_bytes(data)
        comm.Barrier()
        one = np.full(70_000, -1.0)
        step, state = store.restore({"a": one, "b": one, "c": np.zeros(5)})
        assert step == good
        np.testing.assert_array_equal(one, np.arange(70_000.0) * good)
        assert state["a"] is one
        assert state["b"] is one


@pytest.fixture
def batches(monkeypatch):
    """A host with little memory for what lies on a device; a list of the batches."""
    monkeypatch.setattr(files, "BLOCK", files.PAGE)
    monkeypatch.setattr(fill, "STAGED", 8 * files.PAGE)
    seen, read = [], Reader.read
    monkeypatch.setattr(Reader, "read", lambda *a, **k: seen.append(1) or read(*a, **k))
    return seen


@pytest.mark.ranks(3)
def test_one_rank_has_a_device(comm, folder, monkeypatch, batches):
    """It takes arrays some at a time, so all do; what goes wrong on the way ends all ranks."""
    values = {f"w{k}": np.full(4000, float(k)) for k in range(20)}
    original, count = fill.host_empty, 0

    def no_memory(*args, **kwargs):
        nonlocal count
        count += 1
        if count == 5:
            raise MemoryError("no host memory")
        return original(*args, **kwargs)

    with fake_cupy.installed() as cupy, md.CheckpointStore(comm, folder) as store:
        store.save(1, values)
        kind = cupy.asarray if comm.rank == 1 else np.array
        like = {name: kind(np.zeros(4000)) for name in reversed(values)}
        monkeypatch.setattr(fill, "host_empty", no_memory)
        with pytest.raises(StorageError, match=r"no host memory.*reset their values") as caught:
            store.restore(like)
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert len(batches) == 4  # each array is nearly as large as what may be staged
        got = store.restore(like)[1]
        assert comm.allgather(len(batches)) == [24] * 3
        for name, array in got.items():
            host = array.get() if comm.rank == 1 else array
            np.testing.assert_array_equal(host, values[name])
        comm.Barrier()
        if comm.rank == 0:
            path = folder / "step-000000000001" / "shard-00002.h5"
            data = bytearray(path.read_bytes())
            data[data.rindex(np.full(1, 19.0).tobytes())] ^= 1  # in the last array
            path.write_bytes(data)
        comm.Barrier()
        with pytest.raises(CheckpointError, match=r"checksum; arrays may hold.*reset their values"):
            store.restore(like)
        assert len(batches) == 24 + 20  # what was read is passed on, good or bad


@pytest.mark.ranks(3)
def test_batches_of_what_a_rank_holds(comm, folder, batches):
    """Shards on devices, and arrays of the host, are not cut as if each rank staged all of them."""

    def shards(values):
        return {f"s{k:02}": md.Shard(values(k), (3 * 1024,), 1024 * comm.rank) for k in range(16)}

    with fake_cupy.installed() as cupy, md.CheckpointStore(comm, folder) as store:
        state = shards(lambda k: np.full(1024, k + comm.rank / 10))
        store.save(1, {**state, "host": np.ones(100_000)})
        like = shards(lambda _: cupy.asarray(np.zeros(1024)))
        got = store.restore({**like, "host": np.zeros(100_000)})[1]
        for name, shard in state.items():
            np.testing.assert_array_equal(got[name].array.get(), shard.array)
        assert (got["host"] == 1).all()
        assert len(batches) == 4
