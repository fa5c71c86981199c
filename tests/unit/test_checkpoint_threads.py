"""The threads and the memory of a store, also after Ctrl-C and if no thread can be started."""

import copy
import json
import os
import signal
import threading
import time
import tracemalloc

import numpy as np
import pytest
from checkpoint_solo import Solo, equal, no_more_threads, state_of
from until import holds_within, wait_until

from mpidist.checkpoint.read import fill
from mpidist.checkpoint.storage import files
from mpidist.checkpoint.storage.worker_thread import Beside
from mpidist.checkpoint.store import CheckpointStore
from mpidist.checkpoint.write import checksummed_write

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
    """Nobody writes to the arrays any more when it is through; damage hides nothing."""
    original, begun, once = files.read_at, threading.Event(), threading.Lock()

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
        elif helps and once.acquire(blocking=False):  # a second Ctrl-C would wait for nobody
            begun.set()
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        elif not helps and view.nbytes == 4 * files.PAGE:
            assert begun.wait(20)  # or it would have read all before a helper has woken up
        return count

    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1, ROWS))
        store.save(2, state_of(2, ROWS))
        monkeypatch.setattr(files, "read_at", interrupted)
        like = state_of(9, ROWS)
        with pytest.raises(KeyboardInterrupt):
            store.restore(like)
        assert "mpidist-read" not in [thread.name for thread in threading.enumerate()]
        left = copy.deepcopy(like)
        time.sleep(0.2)
        assert equal(like, left)


@pytest.mark.parametrize("threaded", [True, False, None])
def test_work_beside_a_block(monkeypatch, threaded):
    """In a thread, or before the block; what it raises comes when asked for, Ctrl-C at once."""
    said = []

    def work():
        said.append(threading.current_thread() is threading.main_thread())
        raise KeyError("found")

    if threaded is None:
        no_more_threads(monkeypatch)
    beside = Beside(work, "mpidist-beside", threaded is not False)
    with beside:
        wait_until(beside.over, 20)
    assert said == [threaded is not True]
    assert not beside.abandoned
    with pytest.raises(KeyError, match="found"):
        beside.result()


def test_work_beside_a_block_that_is_left():
    """It learns that nobody wants it any more, and its end is waited for."""

    def work():
        holds_within(lambda: beside.abandoned, 20, every=0.001)
        ended.append(beside.abandoned)

    ended = []
    beside = Beside(work, "mpidist-beside")

    def leave():
        with beside:
            assert not beside.over()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert ended == [True]

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Beside(interrupted, "mpidist-beside", threaded=False):
        pytest.fail("the block is not entered")


def test_a_save_without_more_threads(tmp_path, monkeypatch):
    """It writes by itself then, as a restore reads."""

    with CheckpointStore(Solo(), tmp_path) as store:
        with monkeypatch.context() as patch:
            no_more_threads(patch)
            store.save(1, state_of(1, ROWS))
        assert equal(store.restore()[1], state_of(1, ROWS))


def test_a_restore_keeps_no_memory(tmp_path):
    """Arrays are filled where they lie: nothing of the size of the state is taken beside them."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, {"w": np.ones(1 << 20)})
        like = {"w": np.zeros(1 << 20)}
        store.restore(like)  # what is imported and built by the first
        tracemalloc.start()
        try:
            store.restore(like)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_batches_are_small_and_whole(monkeypatch):
    """Every tensor once, in order, up to the bound; one that is larger comes alone."""
    monkeypatch.setattr(fill, "STAGED", 80)
    assert fill.batches([0, 32, 48, 0, 8, 160, 16]) == [4, 5, 6, 7]
    assert fill.batches([40, 40]) == [2]
    assert fill.batches([0] * 5) == [5]  # what is filled where it lies, all at once
    assert fill.batches([]) == [0]


def test_ctrl_c_while_the_writer_starts_leaves_no_thread(monkeypatch):
    """A process that waits for its threads would not end: R56."""
    start = checksummed_write.Worker.start

    def interrupted(worker):
        start(worker)
        raise KeyboardInterrupt

    monkeypatch.setattr(checksummed_write.Worker, "start", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        checksummed_write.DoubleBufferedWriter(-1, 4096, direct=False)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
