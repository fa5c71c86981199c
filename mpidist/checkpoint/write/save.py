"""Save a step: all ranks agree on a plan and write their shards, and rank 0 commits the step.

    rank 0     makes .tmp-step-<nonce>
    all ranks  --agreement-->  on the step and on a plan (`planner`)
               write one shard each, then its table, each with an fsync
    all ranks  --gather-->  the heads of the tables
    rank 0     writes the manifest, fsync, renames the folder to step-<number>, fsync,
               and only then removes old steps
    all ranks  <--bcast--  committed, or one error for all

The rename of the temporary folder commits the step. Before the rename no reader reads the folder,
and when it happens all bytes are on stable storage.

`save_async` writes and commits in threads, which need no MPI: the thread of rank 0 commits the step
as soon as the folder has the table of each shard (a file that lists the shard's parts).
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np

from ... import __version__, events
from ...errors import CheckpointError, StorageError
from ..control import run_on_all
from ..format import manifest
from ..histories import publish
from ..storage import files, retention
from ..storage.worker_thread import Worker
from ..store_folder import Place
from . import shard_writer
from .planner import Begun, Planner

#: If no byte is added to the folder of a background save for this many seconds, the save is given
#: up.
PATIENCE_SECONDS = 600.0

_LONGEST_PAUSE = 0.1


class Save:
    """The save of one step, from its beginning until it is committed or abandoned.

    The function `begin` makes this object. Each rank then calls `write`, or `start` to write in a
    thread, and at the end `finish`, which is collective.
    """

    _begun: Begun

    def __init__(self, comm, place: Place):
        self.comm, self.path, self._place = comm, place.path, place
        self._began, self._ended = time.perf_counter(), 0.0
        self._outcome: bytes | Exception | None = None  # the head of this rank's table, or an error
        # On rank 0: the number of bytes of the committed state, or an error.
        self._committed: int | Exception | None = None
        self._written, self._cancelled = threading.Event(), threading.Event()
        self._thread: Worker | None = None
        self._data: list = []
        #: On rank 0: the open folder of the store, and what to close at the end.
        self._root, self._resources = -1, ExitStack()
        #: The number of the step; its history, on rank 0; the name of its folder until the commit.
        self.step, self.history, self.name = -1, 0, ""

    def _open(self, step: int, nonce: int) -> None:
        """Lock the store's folder and make the temporary folder of the save, on rank 0."""
        path, keep, lock, line, *_ = self._place
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
            self._root, self._resources = root, stack.pop_all()

    def write(self) -> None:
        """Write this rank's shard file, and the table file that lists the parts in it.

        Any thread may call this method. If it fails, `finish` raises the error.
        """
        try:
            if not self._begun.plan.work.writes and self._outcome is None:
                # This rank does not open the folder, which rank 0 may have renamed already.
                self._outcome = b""
            if self._outcome is None:
                with files.folder(self.path) as root, files.folder(self.name, root) as folder:
                    self._outcome = shard_writer.write(
                        folder, self.comm.rank, self._begun.plan.work, self._data, self._place.how
                    )
        except Exception as error:
            self._outcome = error
        finally:
            self._data = []

    def start(self) -> None:
        """Start a thread that writes this rank's shard and, on rank 0, commits the step."""
        # The thread is not a daemon thread: it needs the Python interpreter, which therefore waits
        # for the thread before the process ends.
        self._thread = Worker(self._background, "mpidist-save")
        try:
            self._thread.start()
        except RuntimeError as error:  # the system allows no more threads; finish() raises
            self._thread, self._outcome = None, error

    def _background(self) -> None:
        try:
            self.write()
            if isinstance(self._outcome, Exception):
                self._tell_failure()
        finally:
            self._written.set()  # rank 0 may remove the folder after this
        if self._root >= 0 and not isinstance(self._outcome, Exception):
            try:
                self._committed = self._commit(self._wait_for_tables())
            except Exception as error:
                self._committed = error
        self._ended = time.perf_counter()

    def _tell_failure(self) -> None:
        """Make a file from which rank 0 learns that this rank could not write its shard."""
        with (
            suppress(OSError),
            files.folder(self.path) as root,
            files.folder(self.name, root) as folder,
        ):
            files.close(files.create(shard_writer.failed_name(self.comm.rank), folder))

    def _wait_for_tables(self) -> list[bytes]:
        """On rank 0, wait for all table files (lists of shards' parts); return each first line."""
        leader = self._begun.plan.leader
        assert leader is not None
        missing = list(leader.pieces)
        found: dict[int, bytes] = {}
        pause, moved, seen = 1e-3, time.monotonic(), -1
        with files.folder(self.name, self._root) as folder:
            while missing:
                there = set(files.names(folder))  # one listing is enough for all ranks that write
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
        """Commit the step, or remove its temporary folder and raise an error. Collective.

        With `at_once`, the ranks do not check that all of them are in this method.
        """
        doing = f"save of step {self.step} to {self.path}"
        room = self._begun.plan.room if at_once else None
        try:
            nbytes = run_on_all(self.comm, doing, self._table, self._end, agreed=room)
        finally:
            self.abandon()
        # The event has the duration of the save itself and not the time until this call, because a
        # background save may have ended long before this call (see `longest_save`).
        seconds = (self._ended or time.perf_counter()) - self._began
        events.emit("checkpoint_saved", step=self.step, bytes=nbytes, seconds=round(seconds, 4))

    def _table(self) -> bytes:
        """Wait until this rank's shard is written; return the first line of its table."""
        if self._thread is not None:
            self._written.wait()
        return _result(self._outcome, "writing")

    def _end(self, tables: Sequence[bytes]) -> int:
        """On rank 0, make sure that the step is committed; return the bytes of all arrays."""
        if self._thread is None:
            return self._commit([table for table in tables if table])
        self._thread.end()
        return _result(self._committed, "the commit")

    def abandon(self) -> None:
        """Close open files, and remove the temporary folder unless the step is committed."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.end()
        self._resources.close()

    def _commit(self, heads: Sequence[bytes]) -> int:
        """Write the manifest and rename the folder, on rank 0; return the bytes of all arrays."""
        leader, extras = self._begun.plan.leader, self._begun.extras
        assert leader is not None
        # When the plan was made, a check proved that the planned pieces cover every array. Here
        # each table must prove that its shard is complete and has the planned pieces.
        tables = [
            manifest.check_head(head, files.BLOCK, digest)
            for head, digest in zip(heads, leader.pieces.values(), strict=True)
        ]
        data = manifest.encode(
            self.step, files.BLOCK, self.comm.size, tables, leader.tensors, extras, _software()
        )
        # A manifest that readers would refuse as too long is not committed.
        if len(data) > manifest.MAX_BYTES:
            raise CheckpointError(
                f"the manifest has {len(data)} bytes, at most {manifest.MAX_BYTES} are allowed; "
                "keep large lists as arrays, not as extras"
            )
        manifest.tables_of(data)
        keep, root = self._place.keep, self._root
        with files.folder(self.name, root) as folder:
            shard_writer.put(folder, manifest.NAME, data)
            files.sync(folder)
            self._place.lock.check(root)
            saved = publish(self.name, self.history, self.step, root)
            self._place.line.stand(saved)
            try:
                files.sync(root)
                # The file OWNER is removed only now. If the process were killed between an earlier
                # removal and the rename, the temporary folder would have no owner.
                files.remove_file(retention.OWNER, folder)
                # In a background save this thread itself removes old steps, because no rank waits
                # for it.
                remove_old = keep.remove_aside if self._thread is None else keep.remove_old
                remove_old(self.path, root, saved)
            except OSError as error:
                # The new step is in the folder, so the save has not failed. But after a crash of
                # the host, the rename may be lost, so the old steps are kept.
                retention.stay(self.path, error)
        return leader.nbytes


def begin(
    comm, place: Place, planner: Planner, check: Callable[[], Any], state: Mapping, copy: bool
) -> Save:
    """Begin a save of `state`. Collective over `comm`.

    If `copy` is true, this rank's part is copied now.
    """
    save = Save(comm, place)
    try:
        begun = planner.begin(comm, check, state, save._open)
        save.step, work = begun.step, begun.plan.work
        save.name = retention.temporary_name(begun.step, begun.nonce)
        save._begun = begun
        try:
            views = shard_writer.piece_views(work, begun.arrays)
            save._data = shard_writer.copied(work, views, place.copies) if copy else views
        except Exception as error:  # `finish` raises this error on all ranks
            save._outcome = error
        if planner.forwards:  # some ranks write pieces that other ranks hold

            def inbox() -> list[np.ndarray]:
                if isinstance(save._outcome, Exception):
                    raise save._outcome
                return shard_writer.receive_buffers(work, comm.rank, place.inbox)

            doing = f"save of step {save.step}"
            rooms = run_on_all(comm, doing, inbox)
            brought = shard_writer.forward_parts(comm, work, save._data, rooms)
            save._data = run_on_all(comm, doing, lambda: _result(brought, "forwarding"))
    except BaseException:
        save.abandon()
        raise
    return save


def _head(name: str, folder: int, digest: bytes) -> bytes:
    """Return the first line of the table `name`; raise CheckpointError for another table."""
    data = files.read_small(name, folder, manifest.MAX_TABLES_BYTES)
    head = data[: data.find(b"\n") + 1]
    if hashlib.sha256(memoryview(data)[len(head) :]).digest() != digest:
        raise CheckpointError(f"{name} is not the table that was written")
    return head


def _result(outcome, doing: str):
    """Return `outcome`, the result of a part of a save, or raise it if it is an exception."""
    if isinstance(outcome, Exception):
        raise outcome
    if outcome is None:
        raise CheckpointError(f"{doing} was interrupted")
    return outcome


def _discard(name: str, root: int) -> None:
    """Remove a temporary folder if it still exists; ignore an error."""
    with suppress(OSError):
        if files.is_folder(name, root):
            retention.remove(name, root)


def _software() -> dict[str, str]:
    """Return the versions of the software that makes the files."""
    made = {"mpidist": __version__, "numpy": np.__version__}
    # Another thread may be importing h5py just now; then it has no version yet.
    version = getattr(sys.modules.get("h5py"), "version", None)
    if version is not None:
        made |= {"h5py": version.version, "hdf5": version.hdf5_version}
    return made
