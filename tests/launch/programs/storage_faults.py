"""Make real faults in the folder of a store, in a mount namespace: storage_faults.py FOLDER.

FOLDER is a tmpfs that only this namespace sees. Rank 0 makes and removes each fault with the
program mount, and all ranks then check the behaviour of the store.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
from until import wait_until

import mpidist as md
from mpidist.checkpoint.storage import lock
from mpidist.errors import StorageError

PAGE = 4096


def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)


def try_mount(*words):
    """Whether it could be mounted: what somebody writes to just now is busy."""
    return subprocess.run(["mount", *map(str, words)], check=False).returncode == 0


def unmount(folder):
    subprocess.run(["umount", "--lazy", folder], check=True)


def once(work):
    """Let rank 0 do `work` while the others wait."""
    comm.Barrier()
    if comm.rank == 0:
        work()
    comm.Barrier()


# ------------------------------------------------------------------------------------ faults


class ReadOnly:
    """The same folder once more on top of itself, read-only."""

    says = "Read-only file system"

    def __init__(self, folder):
        self.folder = folder

    def make(self):
        mount("--bind", self.folder, self.folder)
        wait_until(lambda: try_mount("-o", "remount,bind,ro", self.folder), 20)

    def mend(self):
        unmount(self.folder)


class Renamed:
    """Moved away, and back."""

    says = "is gone; put it back"

    def __init__(self, folder):
        self.folder, self.away = folder, folder.with_name(f"{folder.name}-away")

    def make(self):
        self.folder.rename(self.away)

    def mend(self):
        self.away.rename(self.folder)


class Unmounted:
    """A disk of its own that is not mounted for a while: an empty folder is in its place."""

    says = "is on another file system than it was; is its disk mounted?"

    def __init__(self, folder):
        self.folder, self.kept = folder, folder.with_name(f"{folder.name}-kept")

    def mount(self):
        self.folder.mkdir()
        mount("-t", "tmpfs", "tmpfs", self.folder)
        self.kept.mkdir()
        mount("--bind", self.folder, self.kept)  # or the tmpfs would be gone with its only mount

    def make(self):
        unmount(self.folder)

    def mend(self):
        assert not list(self.folder.iterdir()), "nothing is written into the mount point"
        mount("--bind", self.kept, self.folder)


class Full:
    """A small disk without a free page."""

    says = "No space left on device"

    def __init__(self, folder, size="600k"):
        self.folder, self.ballast = folder, folder / "ballast"
        self.size, self.free = size, 0

    def mount(self):
        self.folder.mkdir()
        mount("-t", "tmpfs", "-o", f"size={self.size}", "tmpfs", self.folder)

    def make(self):
        """Take all pages that are free now but `free`; of a job at work, those that it leaves."""
        left = max(0, os.statvfs(self.folder).f_bavail - self.free) * PAGE
        with self.ballast.open("ab", buffering=0) as file, suppress(OSError):
            file.write(bytes(left))

    def mend(self):
        self.ballast.unlink()


# ------------------------------------------------------------------------------------- checks


def state(step):
    w = np.arange(9000.0) * step
    mine = np.full((2, 50), step + comm.rank, "f4")
    return {"w": w, "box": md.Shard(mine, (2 * comm.size, 50), (2 * comm.rank, 0)), "step": step}


def same(found, step):
    assert found["step"] == step
    assert (found["w"] == np.arange(9000.0) * step).all()
    assert (found["box"] == np.repeat(step + np.arange(comm.size), 2)[:, None]).all()


def try_save(store, method, step):
    """The error that all ranks get, or None on all of them."""
    text = None
    try:
        getattr(store, method)(step, state(step))
        store.wait()
    except StorageError as error:
        text = str(error)
    assert len(set(comm.allgather(text))) == 1
    assert text is None or "\n" not in text
    # The ranks can go on with what they were doing.
    assert comm.allreduce(1) == comm.size
    return text


def names(folder):
    return sorted(p.name for p in folder.iterdir() if p.name not in (lock.NAME, "ballast"))


def one_fault(folder, kind, method):
    """Step 1 is saved, step 2 meets the fault, step 3 comes when it is mended."""
    fault = kind(folder)
    if kind in (Unmounted, Full):
        once(fault.mount)
    with md.CheckpointStore(comm, folder) as store:
        store.save(1, state(1))
        once(fault.make)
        for _ in range(2):
            text = try_save(store, method, 2)
            assert text is not None
            assert kind.says in text, text
        if kind in (ReadOnly, Full):
            same(store.restore()[1], 1)
        once(fault.mend)
        same(store.restore()[1], 1)
        assert store.verify(1) > 0
        assert try_save(store, method, 3) is None
        assert store.all_steps() == [1, 3]
        same(store.restore()[1], 3)
        comm.Barrier()
        assert names(folder) == ["step-000000000001", "step-000000000003"]
    if comm.rank == 0:
        assert not (folder / lock.NAME).exists()
        print(f"{method} {kind.__name__}: {text}", flush=True)


def at_every_write(folder, method):
    """The disk is full after so many pages, for each number until a save fits."""
    full = Full(folder)
    once(full.mount)
    with md.CheckpointStore(comm, folder, keep=None) as store:
        store.save(1, state(1))
        pages, text = -1, ""
        while text is not None:
            pages += 1
            full.free = pages
            once(full.make)
            text = try_save(store, method, 2)
            if text is not None:
                assert Full.says in text, text
                assert store.all_steps() == [1]
                comm.Barrier()
                assert names(folder) == ["step-000000000001"]
            same(store.restore(step=1)[1], 1)
            once(full.mend)
        same(store.restore(step=2)[1], 2)
        assert pages > 72000 // PAGE  # at each page of the array at least
    if comm.rank == 0:
        print(f"{method}: full after 0 to {pages - 1} pages", flush=True)


def main(base):
    for method in ("save", "save_async"):
        for kind in (ReadOnly, Renamed, Unmounted, Full):
            one_fault(base / f"{method}-{kind.__name__}", kind, method)
        at_every_write(base / f"{method}-every", method)


if __name__ == "__main__":
    from mpi4py import MPI  # storage_job.py starts a launcher, and takes the faults only

    comm = MPI.COMM_WORLD
    main(Path(sys.argv[1]))
