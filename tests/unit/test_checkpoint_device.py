"""Device arrays without a GPU: staged through the host, waited for, and filled in place."""

import fake_cupy
import numpy as np
import pytest
from checkpoint_solo import Solo

from mpidist.checkpoint import restore as restoring
from mpidist.checkpoint.layout import Shard
from mpidist.checkpoint.load import load
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError, NoCheckpoint


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


def test_a_restore_that_finds_nothing_good_takes_no_device_memory(tmp_path, cupy, monkeypatch):
    """A device that is full of the model has no room for a second one: the host keeps it."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, {"a": cupy.asarray(values(5)), "w": cupy.asarray(values(4, 3))})
        shard = next(tmp_path.glob("step-*/shard-00000.h5"))
        shard.write_bytes(shard.read_bytes().replace(values(4, 3).tobytes(), bytes(48)))
        like = {"a": cupy.asarray(values(5) + 9), "w": cupy.asarray(values(3, 4).T + 9)}
        monkeypatch.setattr(cupy.ndarray, "copy", None)
        monkeypatch.setattr(restoring, "fits", lambda *_: True)
        with pytest.raises(NoCheckpoint, match="checksum"):
            store.restore(like)
    assert (like["a"].get() == values(5) + 9).all()
    assert (like["w"].get() == values(3, 4).T + 9).all()


def test_copies_that_do_not_fit_are_an_error_of_all_ranks(tmp_path, monkeypatch):
    """No rank is left alone in the next call: the error goes through all of them."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, {"w": values(5)})

        def no_memory(arrays):
            raise MemoryError

        monkeypatch.setattr(restoring, "Backup", no_memory)
        with pytest.raises(CheckpointError, match="MemoryError") as caught:
            store.restore({"w": values(5)})
        assert caught.value.everywhere
