"""Save: agree, write, commit.

    rank 0     makes .tmp-step-<nonce>
    all ranks  --agreement-->  on the step and on a plan (`planner`)
               write one shard each, then its table, each with an fsync
    all ranks  --gather-->  what their tables say
    rank 0     writes the manifest, fsync, renames the folder to step-<number>, fsync,
               and only then removes old steps
    all ranks  <--bcast--  committed, or one error for all

The rename is the commit: before it no reader looks at the folder, after it all bytes have been
on stable storage for a while. If a file system loses or tears them nevertheless, the checksums
tell: safety rests on the digests, only durability rests on fsync and rename.

Writing and committing are free of MPI, so `save_async` does both in threads: rank 0's looks for the
tables in the folder, and the step is committed while all ranks compute. What goes wrong is told by
the next call that all ranks make.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ... import __version__, events
from ...errors import CheckpointError, StorageError
from ..control import run_on_all
from ..format import manifest
from ..histories import publish
from ..place import Place
from ..storage import files, retention
from ..storage.steps import Entry
from ..storage.worker_thread import Worker
from . import shard_writer
from .planner import Begun, Planner

#: Seconds without a new byte in the folder after which a save in the background is given up.
PATIENCE_SECONDS = 600.0

_LONGEST_PAUSE = 0.1


@dataclass
class _Folder:
    """What rank 0 keeps open of a save that is under way."""

    root: int
    name: str
    resources: ExitStack


class Save:
    """One save: begun (collective), written (local, in any thread), then finished (collective).

    Made by `begin`.
    """

    _begun: Begun

    def __init__(self, comm, place: Place):
        self.comm, self.path, self._place = comm, place.path, place
        self._began, self._ended = time.perf_counter(), 0.0
        self._outcome: bytes | Exception | None = None  # the head of this rank's table, or an error
        self._committed: int | Exception | None = None  # bytes of the state, on rank 0
        self._written, self._cancelled = threading.Event(), threading.Event()
        self._thread: Worker | None = None
        self._folder: _Folder | None = None
        self._data: list = []
        #: Of the save: its number; on rank 0 its history; the name of its folder until the commit.
        self.step, self.history, self.name = -1, 0, ""

    def _open(self, nonce: int, step: int) -> None:
        """Rank 0: make the temporary folder."""
        path, keep, lock, line, _ = self._place
        lock.prepare()
        with ExitStack() as stack:
            root = stack.enter_context(files.folder(path))
            lock.take(root)
            self.history = line.begin(root, step, partial(keep.is_good, path))
            name = retention.temporary_name(step, nonce)
            files.make_folder(name, root)
            stack.callback(_discard, name, root)
            with files.folder(name, root) as folder:
                owner = retention.claim(folder)
            stack.callback(files.close, owner)
            retention.remove_dead(root)
            self._folder = _Folder(root, name, stack.pop_all())

    def write(self) -> None:
        """Write this rank's shard. No MPI; what goes wrong is kept for `finish`."""
        try:
            if not self._begun.work.writes and self._outcome is None:
                self._outcome = b""  # nobody waits for this rank: the folder may be renamed by now
            if self._outcome is None:
                with files.folder(self.path) as root, files.folder(self.name, root) as folder:
                    self._outcome = shard_writer.write(
                        folder, self.comm.rank, self._begun.work, self._data, self._place.how
                    )
        except Exception as error:
            self._outcome = error
        finally:
            self._data = []

    def start(self) -> None:
        """Write, and on rank 0 commit, in the background."""
        # Not a daemon: a process that ends while it writes waits for it, instead of tearing down
        # the interpreter under it.
        self._thread = Worker(self._background, "mpidist-save")
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads; raised by finish(), as above
            self._thread, self._outcome = None, error

    def _background(self) -> None:
        try:
            self.write()
            if isinstance(self._outcome, Exception):
                self._tell_failure()
        finally:
            self._written.set()  # rank 0 removes the folder as soon as all ranks have come so far
        if self._folder is not None and not isinstance(self._outcome, Exception):
            try:
                self._committed = self._commit(self._wait_for_tables())
            except Exception as error:
                self._committed = error
        self._ended = time.perf_counter()

    def _tell_failure(self) -> None:
        """Leave a mark for rank 0, which may wait for the table of this rank."""
        name = shard_writer.failed_name(self.comm.rank)
        with (
            suppress(OSError),
            files.folder(self.path) as root,
            files.folder(self.name, root) as folder,
        ):
            files.close(files.create(name, folder))

    def _wait_for_tables(self) -> list[bytes]:
        """Rank 0: return the heads of all writers' tables when they are there."""
        own, leader = self._folder, self._begun.leader
        assert own is not None
        assert leader is not None
        missing = list(leader.pieces)
        found: dict[int, bytes] = {}
        pause, moved, seen = 1e-3, time.monotonic(), -1
        with files.folder(own.name, own.root) as folder:
            while missing:
                there = set(files.names(folder))  # one look, however many writers there are
                for rank in list(missing):
                    name = manifest.table_name(shard_writer.shard_name(rank))
                    if name in there:
                        found[rank] = _head(name, folder, leader.pieces[rank])
                        missing.remove(rank)
                    elif shard_writer.failed_name(rank) in there:
                        raise StorageError(f"rank {rank} could not write its shard")
                size = files.total_size(folder)
                if size != seen:
                    seen, moved = size, time.monotonic()
                elif time.monotonic() - moved > PATIENCE_SECONDS:
                    raise StorageError(
                        f"ranks {missing[:8]} wrote nothing for {PATIENCE_SECONDS:.0f} s"
                    )
                if missing and self._cancelled.wait(pause):
                    raise CheckpointError("the save was given up")
                pause = min(2 * pause, _LONGEST_PAUSE)
        return [found[rank] for rank in sorted(found)]

    def finish(self, at_once: bool = False) -> None:
        """Commit, or remove everything again. Collective; raises on all ranks together.

        If the save runs in the background (`start`), this waits for it first. `at_once`: all ranks
        have begun it in the same public call.
        """
        doing, room = (
            f"save of step {self.step} to {self.path}",
            self._begun.room if at_once else None,
        )
        try:
            nbytes = run_on_all(self.comm, doing, self._table, self._end, agreed=room)
        finally:
            self.abandon()
        # One in the background may have ended long before anybody asks: see `longest_save`.
        seconds = (self._ended or time.perf_counter()) - self._began
        events.emit("checkpoint_saved", step=self.step, bytes=nbytes, seconds=round(seconds, 4))

    def _table(self) -> bytes:
        """Return the head of this rank's table when its shard is written, or raise."""
        if self._thread is not None:
            self._written.wait()
        return _told(self._outcome, "writing")

    def _end(self, tables: Sequence[bytes]) -> int:
        """Rank 0: all shards are written; commit them, unless that is being done."""
        if self._thread is None:
            return self._commit([table for table in tables if table])
        self._thread.end()
        return _told(self._committed, "the commit")

    def abandon(self) -> None:
        """Give up what is held; an uncommitted folder is removed. May be called twice."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.end()
        if self._folder is not None:
            own, self._folder = self._folder, None
            own.resources.close()

    def _commit(self, heads: Sequence[bytes]) -> int:
        """Rank 0: write the manifest and rename the folder. Returns the bytes of all arrays."""
        own, leader = self._folder, self._begun.leader
        assert own is not None  # made by _open on this rank
        assert leader is not None
        # The plan was proved when it was made; these are whole shards, of nothing but its pieces.
        tables = [
            manifest.check_head(head, files.BLOCK, digest)
            for head, digest in zip(heads, leader.pieces.values(), strict=True)
        ]
        data = manifest.encode(
            self.step,
            files.BLOCK,
            self.comm.size,
            tables,
            leader.tensors,
            self._begun.extras,
            _software(),
        )
        # What cannot be read back is not committed.
        if len(data) > manifest.MAX_BYTES:
            raise CheckpointError(
                f"the manifest has {len(data)} bytes, at most {manifest.MAX_BYTES} are allowed; "
                "keep large lists as arrays, not as extras"
            )
        manifest.tables_of(data)
        with files.folder(own.name, own.root) as folder:
            shard_writer.put(folder, manifest.NAME, data)
            files.sync(folder)
            self._place.lock.check(own.root)
            saved = publish(own.name, self.history, self.step, own.root)
            self._place.line.stand(saved)
            try:
                files.sync(own.root)
                # Only now, or a death just before would leave a folder without an owner.
                files.remove_file(retention.OWNER, folder)
                self._remove_old(own.root, saved)
            except OSError as error:
                # The new step is there: the save has not failed. Where the rename may not last,
                # the old ones are what is certain, and they stay.
                retention.stay(self.path, error)
        return leader.nbytes

    def _remove_old(self, root: int, saved: Entry) -> None:
        """Rank 0: remove what need not stay; nobody who waits for the save waits for that."""
        if self._thread is not None:
            self._place.keep.remove_old(self.path, root, saved)
        else:
            self._place.keep.remove_aside(self.path, root, saved)


def begin(
    comm,
    place: Place,
    planner: Planner,
    memory: shard_writer.WriteBuffers,
    check: Callable[[], Any],
    state: Mapping,
    copy: bool,
) -> Save:
    """Begin a save of `state` to the step that `check` returns. Collective over `comm`.

    With `copy` this rank's part of the state is copied now, so that it may change at once.
    """
    save, nonce = Save(comm, place), secrets.randbits(63)
    try:
        begun = planner.begin(comm, check, state, nonce, partial(save._open, nonce))
        save.step, work = begun.step, begun.work
        save.name = retention.temporary_name(begun.step, begun.nonce)
        save._begun = begun
        try:
            if copy:
                save._data = shard_writer.copied(work, begun.arrays, memory.copies)
            else:
                save._data = shard_writer.in_place(work, begun.arrays)
        except Exception as error:  # raised by finish(), where all ranks can raise it
            save._outcome = error
        if planner.forwards:  # bring what others hold to who writes it

            def inbox() -> list[np.ndarray]:
                if isinstance(save._outcome, Exception):
                    raise save._outcome
                return shard_writer.receive_buffers(work, comm.rank, memory.inbox)

            doing = f"save of step {save.step}"
            rooms = run_on_all(comm, doing, inbox)
            brought = shard_writer.forward_parts(comm, work, save._data, rooms)
            save._data = run_on_all(comm, doing, brought)
    except BaseException:
        save.abandon()
        raise
    return save


def _head(name: str, folder: int, digest: bytes) -> bytes:
    """Return the head of a table whose pieces are those of the plan."""
    data = files.read_small(name, folder, manifest.MAX_TABLES_BYTES)
    head = data[: data.find(b"\n") + 1]
    if hashlib.sha256(memoryview(data)[len(head) :]).digest() != digest:
        raise CheckpointError(f"{name} is not the table that was written")
    return head


def _told(outcome, doing: str):
    """Return what came of it, or raise what went wrong."""
    if isinstance(outcome, Exception):
        raise outcome
    if outcome is None:
        raise CheckpointError(f"{doing} was interrupted")
    return outcome


def _discard(name: str, root: int) -> None:
    """Remove a temporary folder if it is still there. Else the next run does it."""
    with suppress(OSError):
        if files.is_folder(name, root):
            retention.remove(name, root)


def _software() -> dict[str, str]:
    import h5py

    return {
        "mpidist": __version__,
        "numpy": np.__version__,
        "h5py": h5py.version.version,
        "hdf5": h5py.version.hdf5_version,
    }
