"""After a SIGKILL at any system call of a save, the store has step k or k+1, undamaged.

The killed process is a fork, so that no interpreter must be started for each system call.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint_solo import Solo, equal, resumed, state_of

from mpidist.checkpoint.load import load_step
from mpidist.checkpoint.storage import files, retention
from mpidist.checkpoint.store import CheckpointStore


def kill_at(number, after=False):
    """Make the calling process kill itself before, or right after, the n-th change to the disk."""
    count = 0

    def wrap(function):
        def call(*args):
            nonlocal count
            count += 1
            if count == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args)
            if count == number and after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in files.CHANGES:
        setattr(files, name, wrap(getattr(files, name)))


def in_child(work):
    """Run `work` in a fork; returns the signal that ended it, or 0."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def save(folder, step, method="save"):
    store = resumed(folder, keep=2)
    getattr(store, method)(step, state_of(step))
    store.close()


@pytest.mark.parametrize(
    ("after", "method"),
    [
        (False, "save"),
        (True, "save_async"),
        pytest.param(False, "save_async", marks=pytest.mark.exhaustive),
        pytest.param(True, "save", marks=pytest.mark.exhaustive),
    ],
)
def test_kill_at_every_call(tmp_path, monkeypatch, after, method):
    """R52: for each call n: kill there, then load, save again, and find no litter."""
    monkeypatch.setattr(files, "BLOCK", 512)  # a shard is several writes
    # A folder whose owner died before it could sign is left alone for an hour: now.
    monkeypatch.setattr(retention, "PATIENCE_SECONDS", -1.0)
    number, ended = 0, signal.SIGKILL
    committed = 0
    begun = tmp_path / "begun"
    for step in (1, 2):
        save(begun, step)
    while ended == signal.SIGKILL:
        number += 1
        # A copy, for what is waited for in a save is the disk.
        folder = shutil.copytree(begun, tmp_path / str(number))

        def work(folder=folder, number=number):
            kill_at(number, after)
            save(folder, 3, method)

        ended = in_child(work)
        step, state = load_step(folder)
        assert step in (2, 3)
        assert equal(state, state_of(step))
        committed += step == 3
        like = state_of(50)
        with CheckpointStore(Solo(), folder, keep=2) as store:
            assert store.restore(like)[0] == step
            assert equal(store.restore(like)[1], state_of(step))
            store.verify(step)
            store.save(4, state_of(4))
            assert store.all_steps() == [step, 4]
            assert store.restore()[0] == 4
        assert sorted(p.name for p in folder.iterdir()) == [
            f"step-{step:012d}",
            "step-000000000004",
        ]
    assert number > 20  # every call of a save, the removal of old steps included
    assert 3 <= committed < number


@pytest.mark.parametrize(
    "method", [pytest.param("save", marks=pytest.mark.exhaustive), "save_async"]
)
def test_kill_at_every_write_past_the_cache(tmp_path, monkeypatch, method):
    """The same where blocks are pages: a thread writes them past the system's cache."""
    monkeypatch.setattr(files, "BLOCK", files.PAGE)
    monkeypatch.setattr(files, "GROUP", 1)
    monkeypatch.setattr(retention, "PATIENCE_SECONDS", -1.0)
    begun = tmp_path / "begun"
    with CheckpointStore(Solo(), begun) as store:
        store.save(1, state_of(1, 500))
    for number in range(1, 80):
        folder = shutil.copytree(begun, tmp_path / str(number))

        def work(folder=folder, number=number):
            kill_at(number)
            with resumed(folder) as store:
                getattr(store, method)(2, state_of(2, 500))

        ended = in_child(work)
        step, state = load_step(folder)
        assert equal(state, state_of(step, 500))
        with CheckpointStore(Solo(), folder) as store:
            assert store.restore(state_of(9, 500))[0] == step
            store.save(3, state_of(3, 500))
        assert not list(folder.glob(".tmp*"))
        if not ended:
            break
    assert step == 2
    assert number > 30


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))]
)
def test_kill_at_any_time(tmp_path, seed):
    """The same with a real process and a clock: whatever it was doing."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from checkpoint_solo import *\n"
        "from mpidist.checkpoint.store import CheckpointStore\n"
        "store = resumed(sys.argv[1], keep=2)\n"
        "step = (store.latest_step() or 0) + 1\n"
        "store.save(step, state_of(step, 3000))\n"  # however slow, one is there to be loaded
        "print('ready', flush=True)\n"
        "while True:\n"
        "    step += 1\n"
        "    (store.save_async if step % 2 else store.save)(step, state_of(step, 3000))\n"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", code, str(tmp_path), here]
    newest = 0
    for attempt in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(random.Random(10 * seed + attempt).uniform(0.05, 0.25))
            child.kill()
        step, state = load_step(tmp_path)
        assert step >= newest > -1
        assert equal(state, state_of(step, 3000))
        newest = step
