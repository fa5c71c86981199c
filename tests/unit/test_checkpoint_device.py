"""Checkpoints of device arrays without a GPU: copied through the host, and filled in place."""

import os

import fake_cupy
import numpy as np
import pytest
from checkpoint_solo import Solo

from mpidist.checkpoint.format.state import Shard
from mpidist.checkpoint.load import load
from mpidist.checkpoint.read import fill
from mpidist.checkpoint.read.reader import Reader
from mpidist.checkpoint.storage import files
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError


@pytest.fixture
def cupy():
    with fake_cupy.installed() as module:
        yield module


def values(*shape):
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype("f4")


@pytest.mark.parametrize("method", ["save", "save_async"])
def test_device_state(tmp_path, cupy, method):
    """Arrays, strided views, scalars and both kinds of shards, saved from and to a device."""
    padded = cupy.asarray(np.full((6, 8), -1, "f4"))
    padded.memory[:, ::2] = values(6, 4)
    state = {
        "w": cupy.asarray(values(5, 3)),
        "t": cupy.asarray(values(4, 3).T),
        "view": padded[:, ::2],
        "loss": cupy.asarray(np.float64(0.25)),
        "box": Shard(cupy.asarray(values(3, 2)), (3, 2), (0, 0)),
        "flat": Shard(cupy.asarray(values(9)), (3, 3), 0),
    }
    state["w"] += 1  # still queued when the save begins
    with CheckpointStore(Solo(), tmp_path) as store:
        getattr(store, method)(1, state)
        state["w"] += 1  # after the copy was taken
        store.wait()
        got = load(tmp_path)
        assert (got["w"] == values(5, 3) + 1).all()
        assert (got["t"] == values(4, 3).T).all()
        assert (got["view"] == values(6, 4)).all()
        assert got["loss"] == 0.25
        assert (got["flat"] == values(3, 3)).all()
        like = {
            name: Shard(cupy.empty(leaf.array.shape, "f4"), leaf.global_shape, leaf.start)
            if isinstance(leaf, Shard)
            else cupy.empty(leaf.shape, leaf.dtype)
            for name, leaf in state.items()
        }
        wide = cupy.asarray(np.full((6, 8), -1, "f4"))
        like["view"] = wide[:, ::2]
        _, filled = store.restore(like)
    for name, leaf in filled.items():
        array = leaf.array if isinstance(leaf, Shard) else leaf
        assert array.memory.tobytes() == got[name].tobytes(), name
        assert leaf is like[name]
    assert (wide.memory[:, ::2] == values(6, 4)).all()
    assert (wide.memory[:, 1::2] == -1).all()


def test_many_small_arrays_through_little_memory(tmp_path, cupy, monkeypatch):
    """A device's arrays come to host memory some at a time; few blocks are read more than once."""
    monkeypatch.setattr(files, "BLOCK", files.PAGE)
    monkeypatch.setattr(fill, "STAGED", 8 * files.PAGE)
    taken, original = [], fill.host_empty
    monkeypatch.setattr(
        fill, "host_empty", lambda *a, **k: taken.append(original(*a, **k)) or taken[-1]
    )
    original_read, most = Reader.read, []

    def counted(self, *args, **settings):
        most.append(sum(array.nbytes for array in taken))
        taken.clear()
        original_read(self, *args, **settings)

    monkeypatch.setattr(Reader, "read", counted)
    state = {f"b{k}": np.full(40, float(k)) for k in range(900)}
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state)
        read, total = os.preadv, []
        monkeypatch.setattr(os, "preadv", lambda *a: total.append(read(*a)) or total[-1])
        like = {name: cupy.asarray(np.zeros(40)) for name in state}
        found = store.restore(like)[1]
    assert all((found[name].get() == state[name]).all() for name in state)
    assert len(most) > 5
    assert max(most) <= 8 * files.PAGE
    shard = next(tmp_path.glob("step-*/shard-00000.h5")).stat().st_size
    assert sum(total) <= 1.2 * shard


def test_memory_that_is_not_there_is_an_error_of_all_ranks(tmp_path, cupy, monkeypatch):
    """No rank is left alone in the next call: the error goes through all of them."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, {"w": values(5)})

        def no_memory(*_, **__):
            raise MemoryError

        monkeypatch.setattr(fill, "host_empty", no_memory)
        with pytest.raises(CheckpointError, match="MemoryError") as caught:
            store.restore({"w": cupy.asarray(values(5))})
        assert caught.value.everywhere
