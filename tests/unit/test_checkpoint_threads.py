"""The threads and the memory of the store: at Ctrl-C, where there are none left, and after."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from checkpoint_solo import Solo, equal, state_of

from mpidist.checkpoint import files
from mpidist.checkpoint import restore as restoring
from mpidist.checkpoint.store import CheckpointStore
from mpidist.checkpoint.threads import Worker
from mpidist.errors import NoCheckpoint

ROWS = 9000


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    """Blocks of one page, four at once: a shard is many writes and reads."""
    monkeypatch.setattr(files, "BLOCK", files.PAGE)


def damage(folder, step, path):
    """Flip a bit of the array `path` of a step."""
    shard = folder / f"step-{step:012d}" / "shard-00000.h5"
    table = json.loads(shard.with_suffix(".json").read_bytes())
    piece = next(piece for piece in table["pieces"] if piece["path"] == path)
    data = bytearray(shard.read_bytes())
    data[piece["offset"]] ^= 1
    shard.write_bytes(data)


def test_ctrl_c_while_the_last_bytes_are_written(tmp_path, monkeypatch):
    """Nothing writes any more when the file is closed: its number may be that of another one."""
    original, late = files.write_at, []

    def interrupted(descriptor, data, offset):
        if threading.current_thread().name == "mpidist-write" and offset + len(data) > ROWS * 64:
            same = os.fstat(descriptor)  # these are the last: the caller has nothing else to do
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            late.append(not os.path.samestat(os.fstat(descriptor), same))
        original(descriptor, data, offset)

    monkeypatch.setattr(files, "write_at", interrupted)
    with pytest.raises(KeyboardInterrupt), CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1, ROWS))
    assert "mpidist-write" not in [thread.name for thread in threading.enumerate()]
    assert late == [False]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("found", ["good", "damaged"])
def test_ctrl_c_while_a_thread_reads(tmp_path, monkeypatch, found):
    """What stood in the arrays is put back when nobody fills them; damage hides nothing."""
    original, begun = files.read_at, threading.Event()

    def interrupted(descriptor, view, offset, enough=None):
        count = original(descriptor, view, offset, enough)
        helps = threading.current_thread().name == "mpidist-read"
        if found == "damaged" and helps:
            assert begun.wait(20)
            view[0] ^= 1
        elif found == "damaged" and view.nbytes == 4 * files.PAGE:
            begun.set()
            time.sleep(0.3)
            raise KeyboardInterrupt
        elif helps:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return count

    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1, ROWS))
        store.save(2, state_of(2, ROWS))
        monkeypatch.setattr(files, "read_at", interrupted)
        like = state_of(9, ROWS)
        with pytest.raises(KeyboardInterrupt):
            store.restore(like)
        assert "mpidist-read" not in [thread.name for thread in threading.enumerate()]
        time.sleep(0.2)
        assert equal(like, state_of(9, ROWS))


def test_a_save_without_more_threads(tmp_path, monkeypatch):
    """It writes by itself then, as a restore reads."""

    def none_left(_):
        raise RuntimeError("can't start new thread")

    with CheckpointStore(Solo(), tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            store.save(1, state_of(1, ROWS))
        assert equal(store.restore()[1], state_of(1, ROWS))


def test_two_names_of_one_array_get_back_what_they_held(tmp_path):
    """Tied weights are overwritten twice: what the first of them held is what comes back."""
    w = np.arange(5000.0)
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, {"a": w, "b": w, "c": np.ones(9)})
        damage(tmp_path, 1, ["c"])
        one = np.full(5000, -1.0)
        with pytest.raises(NoCheckpoint, match="checksum"):
            store.restore({"a": one, "b": one, "c": np.zeros(9)})
        assert (one == -1).all()
        many = np.full(8000, -2.0)  # they may also overlap in parts
        with pytest.raises(NoCheckpoint, match="checksum"):
            store.restore({"a": many[:5000], "b": many[3000:], "c": np.zeros(9)})
        assert (many == -2).all()


def test_a_restore_keeps_no_memory(tmp_path):
    """What was overwritten is let go, where no `save_async` has taken memory for copies."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1, ROWS))
        store.restore(state_of(2, ROWS))
        assert store._buffers.copies.room([0])[0].base.nbytes == 0


def test_many_small_arrays_without_memory_for_copies(tmp_path, monkeypatch):
    """Twice is twice: arrays that share a block do not each read it."""
    state = {f"b{k}": np.full(4, float(k)) for k in range(300)}
    monkeypatch.setattr(restoring, "fits", lambda *_: False)
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state)
        read, total = os.preadv, []
        monkeypatch.setattr(os, "preadv", lambda *a: total.append(read(*a)) or total[-1])
        found = store.restore({name: np.zeros(4) for name in state})[1]
    assert equal(found, state)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.*") if path.is_file())
    assert sum(total) <= 2.5 * size


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent():
    """It has no such thread: nobody would ever tell it of the end."""
    go_on = threading.Event()
    worker = Worker(go_on.wait, "test")
    worker.start()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        worker.end()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    worker.end()
    assert status == 0
