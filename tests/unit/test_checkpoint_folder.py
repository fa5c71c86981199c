"""The folder of a store: which process may save there, and unusual file systems."""

import errno
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from checkpoint_solo import Solo, equal, resumed, state_of
from test_checkpoint_two_jobs import in_process

from mpidist.checkpoint.format import manifest
from mpidist.checkpoint.format.digested_json import Damaged, encode_digested
from mpidist.checkpoint.load import load_step
from mpidist.checkpoint.storage import files, lock, retention, steps
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError, StorageError

# ------------------------------------------------------------------------------- the lock


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """A data loader's worker may outlive the job that forked it; the next job need not wait."""
    forks = (
        "import os, time\nstore.save(1, state_of(1))\nchild = os.fork()\n"
        "if child == 0:\n    time.sleep(60)\n"
        "open(sys.argv[1] + '/child', 'w').write(str(child))"
    )
    with in_process(tmp_path, forks) as job:
        child = int((tmp_path / "child").read_text())
        try:
            with resumed(tmp_path) as store:
                with pytest.raises(CheckpointError, match=f"in use by process {job.pid}"):
                    store.save(2, state_of(2))
                job.kill()
                job.wait()
                os.kill(child, 0)  # it lives
                store.save(2, state_of(2))
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_may_not_save(tmp_path):
    """It is another process: its parent holds the lock."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1))
        child = os.fork()
        if child == 0:
            try:
                store.save(2, state_of(2))
                os._exit(1)
            except CheckpointError as error:
                store.close()
                os._exit(0 if f"process {os.getppid()}" in str(error) else 2)
        assert os.waitpid(child, 0)[1] == 0
        store.save(3, state_of(3))
        assert store.all_steps() == [1, 3]


def test_a_folder_that_goes_and_comes_back(tmp_path):
    """Gone is an error, and nothing is made in its place; back it is as it was."""
    folder, away = tmp_path / "store", tmp_path / "away"
    with CheckpointStore(Solo(), folder) as store:
        store.save(1, state_of(1))
        folder.rename(away)
        for method in (store.save, store.save_async):
            with pytest.raises(StorageError, match="is gone; put it back"):
                method(2, state_of(2))
        assert not folder.exists()
        away.rename(folder)
        store.save(2, state_of(2))
        assert store.all_steps() == [1, 2]


def is_held_though_gone(folder):
    """Whether this process still holds a lock file open that the folder has not any more."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.append(str(link.readlink()))
    return f"{folder.resolve() / lock.NAME} (deleted)" in found


def test_a_folder_that_is_made_anew(tmp_path, monkeypatch):
    """An empty folder is taken, with a lock of its own; but not the mount point of another disk."""
    folder = tmp_path / "store"
    with CheckpointStore(Solo(), folder) as store, CheckpointStore(Solo(), folder) as other:
        store.save(1, state_of(1))
        other.restore()
        other.save(2, state_of(2))
        held = lock._held[str(folder.resolve())]
        monkeypatch.setitem(
            lock._held, str(folder.resolve()), held._replace(device=held.device + 1)
        )
        shutil.rmtree(folder)
        folder.mkdir()
        with pytest.raises(StorageError, match="is its disk mounted"):
            store.save(3, state_of(3))
        assert not list(folder.iterdir())
        assert is_held_though_gone(folder)
        monkeypatch.undo()
        store.save(3, state_of(3))
        other.restore()
        other.save(4, state_of(4))
        assert store.all_steps() == [3, 4]
        assert not is_held_though_gone(folder)
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{k:012d}" for k in (3, 4)]


# ----------------------------------------------------------------------------- file systems


def test_dead_saves_where_there_are_no_locks(tmp_path, monkeypatch):
    """Age alone tells there, also of saves of this host."""

    def no_locks(descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "lock", no_locks)
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state_of(1))
        dead = tmp_path / retention.temporary_name(7, 7)
        dead.mkdir()
        (dead / "OWNER").write_text(f"{os.uname().nodename} 12\n")
        store.save(2, state_of(2))
        assert dead.exists()
        long_ago = tmp_path.stat().st_mtime - retention.PATIENCE_SECONDS - 60
        os.utime(dead, (long_ago, long_ago))
        store.save(3, state_of(3))
        assert not dead.exists()


@pytest.mark.parametrize("method", ["save", "save_async"])
def test_a_rename_that_may_not_last(tmp_path, monkeypatch, capfd, method):
    """The last fsync of a save fails: the step is there, and so are the old ones, which do last."""
    with CheckpointStore(Solo(), tmp_path, keep=1) as store:
        store.save(1, state_of(1))
        sync, root = files.sync, os.stat(tmp_path).st_ino  # noqa: PTH116

        def refuse(descriptor):
            if os.fstat(descriptor).st_ino == root:
                raise OSError(errno.EIO, "Input/output error")
            sync(descriptor)

        monkeypatch.setattr(files, "sync", refuse)
        getattr(store, method)(2, state_of(2))
        store.wait()
        assert store.all_steps() == [1, 2]
        assert "Input/output error" in capfd.readouterr().err
        monkeypatch.undo()
        store.save(3, state_of(3))
        assert store.all_steps() == [3]


# -------------------------------------------------------------------------------- the steps


def test_a_step_of_the_name_of_a_damaged_one(tmp_path):
    """A step was damaged and is gone; the next of its name is good, and counts as one to keep."""
    with CheckpointStore(Solo(), tmp_path, keep=2) as store:
        for step in (1, 2):
            store.save(step, state_of(step))
        shard = tmp_path / "step-000000000002" / "shard-00000.h5"
        shard.write_bytes(shard.read_bytes()[:-1])
        assert store.restore()[0] == 1
        shutil.rmtree(shard.parent)
        store.save(2, state_of(2))
        store.save(3, state_of(3))
        store.restore(step=3)
        store.save(4, state_of(4))
        assert store.all_steps() == [3, 4]
        assert not store._keep.bad


def test_a_state_without_arrays(tmp_path):
    """Extras alone are a state."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, {"step": 1, "more": {"lr": 0.5}})
        assert store.restore({"step": 0, "mine": 2}) == (
            1,
            {"step": 1, "more": {"lr": 0.5}, "mine": 2},
        )
        assert equal(load_step(tmp_path)[1], {"step": 1, "more": {"lr": 0.5}})


def test_tables_are_bounded_together(tmp_path):
    """A forged manifest may name many tables: they are not read before their sum is known."""
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, {"w": np.ones(3)})
    size, digest = manifest.MAX_BYTES, "0" * 64
    tables = [{"name": f"shard-{k:05d}.table", "size": size, "sha256": digest} for k in range(17)]
    forged = {"format": manifest.FORMAT, "version": 3, "tables": tables}
    with pytest.raises(Damaged, match="1140850688 bytes together"):
        manifest.tables_of(encode_digested(forged, "sha256"))
    (tmp_path / "step-000000000001" / manifest.NAME).write_bytes(encode_digested(forged, "sha256"))
    with pytest.raises(Damaged, match="bytes together"):
        steps.read_manifest(str(tmp_path), steps.Entry(0, 1, 0))
