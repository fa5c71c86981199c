"""Two jobs in one folder: a job removes files of dead jobs, but never those of a living job."""

import errno
import fcntl
import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoint_solo import Solo, equal, no_more_threads, resumed, state_of

from mpidist.checkpoint import early_lock
from mpidist.checkpoint.load import load_step
from mpidist.checkpoint.storage import files, lock, retention
from mpidist.checkpoint.store import CheckpointStore
from mpidist.checkpoint.write import shard_writer
from mpidist.errors import CheckpointError


def test_a_living_save_is_left_alone(tmp_path, monkeypatch):
    """Temporary folders go only when their owner is dead: it holds a lock while it lives."""
    write, may_go_on, main = shard_writer.write, threading.Event(), threading.current_thread()

    def held_back(*args):
        if threading.current_thread() is not main:
            assert may_go_on.wait(30)
        return write(*args)

    monkeypatch.setattr(shard_writer, "write", held_back)
    one = CheckpointStore(Solo(), tmp_path)
    one.save_async(1, state_of(1))
    with CheckpointStore(Solo(), tmp_path) as other:
        other.save(2, state_of(2))
        assert other.all_steps() == [2]
        may_go_on.set()
        one.close()
    assert equal(load_step(tmp_path, 1)[1], state_of(1))


def in_process(folder, text):
    """Start a process that runs `text` with a store named `store`, and then waits."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from checkpoint_solo import *\n"
        "from mpidist.checkpoint.store import CheckpointStore\n"
        f"store = resumed(sys.argv[1])\n{text}\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(Path(__file__).parent)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    return child


def test_two_jobs_in_one_folder(tmp_path):
    """The second is refused with the name of the first; a dead one keeps nobody out."""
    with in_process(tmp_path, "store.save(1, state_of(1))") as first:
        with CheckpointStore(Solo(), tmp_path) as store:
            assert store.restore()[0] == 1  # reading is free
            with pytest.raises(CheckpointError, match=f"in use by process {first.pid} on "):
                store.save(2, state_of(2))
            assert store.all_steps() == [1]
            first.kill()
            first.wait()
            store.save(2, state_of(2))
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{k:012d}" for k in (1, 2)]


def test_a_look_at_the_lock_keeps_nobody_out(tmp_path):
    """Who looks has the lock for a moment."""
    (tmp_path / lock.NAME).touch()
    with (tmp_path / lock.NAME).open() as looking, CheckpointStore(Solo(), tmp_path) as store:
        fcntl.flock(looking, fcntl.LOCK_SH)
        ends = threading.Timer(0.02, fcntl.flock, (looking, fcntl.LOCK_UN))
        ends.start()
        store.save(1, state_of(1))
        ends.join()


def test_a_second_job_is_refused_before_it_writes(tmp_path, monkeypatch):
    """The command looks at the lock first; a dead job's lock keeps nobody out."""
    monkeypatch.setattr(early_lock, "PATIENCE_SECONDS", 0.1)
    path = str(tmp_path)
    assert early_lock.why_refused(Solo(), path) == ""
    with in_process(tmp_path, "store.save(1, state_of(1))") as first:
        said = early_lock.why_refused(Solo(), path)
        assert said.startswith(f"{path} is in use by process {first.pid} on ")
        first.kill()
        first.wait()
    assert (tmp_path / lock.NAME).exists()
    assert early_lock.why_refused(Solo(), path) == ""


def test_a_job_that_was_taken_over_commits_nothing(tmp_path, monkeypatch):
    """Where locks do not reach from host to host, the name in the file is the fence."""

    def no_locks(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "lock", no_locks)
    one = CheckpointStore(Solo(), tmp_path)
    one.save(1, state_of(1))
    child = in_process(
        tmp_path,
        "from mpidist.checkpoint.storage import files\n"
        "def no_locks(descriptor):\n    raise OSError(37, 'No locks available')\n"
        "files.lock = no_locks\nstore.save(2, state_of(2))",
    )
    with child:
        with pytest.raises(CheckpointError, match=f"taken over by process {child.pid} on "):
            one.save(3, state_of(3))
        child.stdin.close()
    one.close()
    assert (tmp_path / lock.NAME).exists()  # it is not ours to remove
    assert load_step(tmp_path)[0] == 2
    assert sorted(p.name for p in tmp_path.glob("step*")) == [f"step-{k:012d}" for k in (1, 2)]


def test_the_fence_is_seen_by_other_hosts(tmp_path, monkeypatch):
    """A network file system keeps what is written to itself until it is synced."""
    calls = []
    for name in ("write_at", "sync", "make_folder"):
        real = getattr(files, name)
        monkeypatch.setattr(
            files, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1]
        )
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1))
    assert calls[:3] == ["write_at", "sync", "make_folder"]


def test_dead_saves_of_other_hosts_are_left_for_an_hour(tmp_path, monkeypatch):
    """Locks may not reach from host to host, so age must agree; then they go as well."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1))
        dead = tmp_path / retention.temporary_name(7, 7)
        dead.mkdir()
        (dead / "OWNER").write_text("elsewhere 12\n")
        (dead / "shard-00000.h5").write_bytes(b"x")
        unowned = tmp_path / retention.temporary_name(8, 8)
        unowned.mkdir()
        foreign = tmp_path / ".tmp-mine"
        foreign.mkdir()
        kept = tmp_path / retention.temporary_name(9, 9)
        kept.mkdir()
        (kept / "thesis.tex").write_text("mine")
        link = tmp_path / retention.temporary_name(10, 10)
        link.symlink_to(foreign)
        (foreign / "shard-00000.h5").write_text("mine")
        store.save(2, state_of(2))
        assert dead.exists()
        assert unowned.exists()
        monkeypatch.setattr(retention, "PATIENCE_SECONDS", -1.0)
        store.save(3, state_of(3))
        assert not dead.exists()
        assert not unowned.exists()
        assert (kept / "thesis.tex").exists()
        assert (foreign / "shard-00000.h5").exists()
        assert link.is_symlink()


def test_a_folder_that_cannot_be_cleaned_does_not_stop_a_save(tmp_path, monkeypatch, capfd):
    """What fails after the commit is said, and the step is there."""
    with CheckpointStore(Solo(), tmp_path, keep=1) as store:
        store.save(1, state_of(1))

        def refuse(*_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(retention, "remove", refuse)
        store.save(2, state_of(2))
        store.wait()
        assert "old checkpoints" in capfd.readouterr().err
        monkeypatch.undo()
        assert store.restore()[0] == 2
        store.save(3, state_of(3))
        assert store.all_steps() == [2, 3]  # 2 was restored, and 3 not yet
        store.verify(3)
        store.save(4, state_of(4))
        assert store.all_steps() == [3, 4]


def test_nobody_waits_for_what_is_removed(tmp_path, monkeypatch):
    """Issue 4: a save returns when it is committed; whatever comes next finds the old step gone."""
    remove, may_go_on, removed = retention.remove, threading.Event(), []

    def held_back(name, root):
        assert may_go_on.wait(30)
        removed.append(name)
        return remove(name, root)

    with CheckpointStore(Solo(), tmp_path, keep=1) as store:
        store.save(1, state_of(1))
        monkeypatch.setattr(retention, "remove", held_back)
        store.save(2, state_of(2))
        assert not removed
        assert {p.name for p in tmp_path.glob("step-*")} == {f"step-{k:012d}" for k in (1, 2)}
        may_go_on.set()
        assert store.all_steps() == [2]
        assert removed == ["step-000000000001"]
        store.save(3, state_of(3))
        may_go_on.clear()
        threading.Timer(0.05, may_go_on.set).start()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000003"]


def test_saving_a_step_again(tmp_path):
    """The new one replaces the old one only when it is complete; the old one is gone after it."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1))
        store.save(1, state_of(8))
        assert equal(store.restore()[1], state_of(8))
        assert store.all_steps() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001.1"]


def test_a_lock_that_is_released_while_its_holder_is_asked_for(tmp_path, monkeypatch):
    """It is taken; that the file has just gone is no error."""
    read, child = files.read_small, in_process(tmp_path, "store.save(1, state_of(1))")

    def end_first(name, where, limit):
        if name == lock.NAME and child.poll() is None:
            child.kill()
            child.wait()
            (tmp_path / lock.NAME).unlink()
        return read(name, where, limit)

    monkeypatch.setattr(files, "read_small", end_first)
    with child, resumed(tmp_path) as store:
        store.save(2, state_of(2))
        assert store.all_steps() == [1, 2]


def test_one_of_two_stores_that_closes_takes_nothing_from_the_other(tmp_path, monkeypatch):
    """A thread of the other looks at any time, so what is held may not be gone for a moment."""

    class Never(dict):
        def pop(self, *_):
            raise AssertionError("nothing is held for a moment")

    tmp_path = tmp_path.resolve()
    monkeypatch.setattr(lock, "_held", Never())
    with CheckpointStore(Solo(), tmp_path) as one:
        one.save(1, state_of(1))
        with resumed(tmp_path) as other:
            other.save(2, state_of(2))
        one.save(3, state_of(3))
    assert not lock._held
    assert not (tmp_path / lock.NAME).exists()


def test_a_process_that_may_have_no_more_threads(tmp_path, monkeypatch):
    """The next call that all ranks make raises it on all of them; nothing stays behind."""

    with CheckpointStore(Solo(), tmp_path) as store:
        with monkeypatch.context() as patch:
            no_more_threads(patch)
            store.save_async(1, state_of(1))
        with pytest.raises(CheckpointError, match="can't start new thread"):
            store.wait()
        assert [p.name for p in tmp_path.iterdir()] == [lock.NAME]
        store.save_async(2, state_of(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000000002"]


def test_a_step_of_a_newer_version_does_not_fail_a_save(tmp_path):
    """It is whole for others, so it counts as one that is kept, and goes when its time comes."""
    with CheckpointStore(Solo(), tmp_path, keep=2) as store:
        for step in (1, 2):
            store.save(step, state_of(step))
    table = tmp_path / "step-000000000001" / "MANIFEST.json"
    head = table.read_bytes().rpartition(b',"sha256"')[0].replace(b'"version":2', b'"version":9')
    digest = hashlib.sha256(head).hexdigest().encode()
    table.write_bytes(head + b',"sha256":"' + digest + b'"}\n')
    with resumed(tmp_path, keep=3) as store:
        store.save(3, state_of(3))
        assert store.all_steps() == [1, 2, 3]
        store.save(4, state_of(4))
        assert store.all_steps() == [2, 3, 4]
