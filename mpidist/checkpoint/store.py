"""`CheckpointStore`: save and restore the state of a job, on any number of ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from .. import events
from ..errors import CheckpointError, ClosedError
from ..runtime.polling import phase
from ..runtime.topology import topology_of
from . import histories, load, node_copies
from .arguments import checked_step, of_store, which, yes_or_no
from .control import all_come, by_rank_0, call, run_on_all, same_on_all
from .histories import Line
from .read.restore import Restore
from .storage import files, retention
from .storage.lock import RunLock
from .storage.retention import Keep
from .storage.steps import Entry
from .store_folder import Place
from .write.planner import Planner
from .write.save import Save, begin
from .write.shard_writer import Memory, WriteOptions
from .write.write_plan import writers_of


class Store(AbstractContextManager):
    """Base class of `CheckpointStore` and `TieredStore`.

    A ``with`` block calls `close` at its end, or `_abandon` if an exception ends the block.
    """

    def __init__(self, comm):
        self._comm, self._closed = comm, False

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self._abandon()

    @contextmanager
    def _call(self, method: str) -> Iterator[None]:
        """In a ``with`` block, send errors to other ranks, and show that this rank may be slow."""
        with phase("save"), call(self._comm, f"{type(self).__name__}.{method}"):
            yield

    @abstractmethod
    def close(self) -> None:
        """Wait for saves that are still running, and close the store. Collective."""

    @abstractmethod
    def _abandon(self) -> None:
        """Close the store on this rank alone, without messages to other ranks."""


class CheckpointStore(Store):
    """Checkpoints of one job in one folder. Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The communicator whose ranks save and restore. It must not be freed while the store is open.
    path : path-like
        A folder that all ranks can reach, the same on all ranks. The first save creates it.
    keep : int or None
        How many undamaged steps of the newest history (a series of saved steps, see Notes) to keep.
        None keeps all.
    keep_every : int, optional
        The steps whose number is a multiple of `keep_every` are kept as well. The newest step that
        was verified or restored is never removed.
    writers : "all", "node" or int
        The ranks that write files: every rank, one rank of each node, or this number of ranks. A
        rank needs memory for the data that it writes for other ranks.
    direct : bool
        Whether writes bypass the cache of the operating system, where the file system allows that.
    sha256 : bool
        Whether each shard file gets a SHA-256, which `verify` checks. Each block of a file always
        has a CRC-32.
    fresh : bool or str
        If True, the store ignores the steps that the folder already holds. The files of these steps
        stay, and `restore` with the argument `history` still reads them. A program that may be
        restarted should pass True at its first start only, or pass a name of the run (any text) at
        every start. The first start with a name ignores the older steps. Later starts with the same
        name continue from the steps of the earlier starts.

    Notes
    -----
    A save adds a step to the history (series of saved steps) of the step that this store restored
    or saved last. If the folder holds newer steps, for example after ``restore(step=900)``, the
    save begins a new history. From then on, `restore` and `keep` use the steps of this history. The
    newer steps stay on the disk, as an older history.

    All ranks call every method, and an error on one rank is raised on all ranks. Use the store in a
    ``with`` block, or call `close`.
    """

    def __init__(
        self,
        comm,
        path,
        keep: int | None = 3,
        *,
        keep_every: int | None = None,
        writers: str | int = "all",
        direct: bool = True,
        sha256: bool = False,
        fresh: bool | str = False,
    ):
        check = partial(of_store, path, keep, keep_every, writers, direct, sha256, fresh)
        given = same_on_all(comm, "CheckpointStore", check)
        self._given, self.path = given, given["path"]
        super().__init__(comm)
        self._pending: Save | None = None
        self._keep = Keep(given["keep"], given["keep_every"])
        self._lock = RunLock(self.path)
        self._line = Line(self.path, given["fresh"])
        how = WriteOptions(given["direct"], given["sha256"])
        self._place = Place(self.path, self._keep, self._lock, self._line, how, Memory(), Memory())
        self._planner: Planner | None = None

    def __repr__(self):
        return f"<CheckpointStore {self.path!r}: {self._summary()}>"

    def _summary(self) -> str:
        """Return a text: the arguments of this store, and whether it is saving or closed."""
        settings = ", ".join(f"{k}={v!r}" for k, v in self._given.items() if k != "path")
        if self._pending is not None:
            return f"{settings}; saving step {self._pending.step}"
        return f"{settings}; closed" if self._closed else settings

    def save(self, step: int, state: Mapping) -> None:
        """Save `state` as step number `step`, and return when it is committed. Collective.

        Parameters
        ----------
        step : int
            The number of the step, the same on all ranks. Saving the last step again replaces it;
            at every moment the old or the new version is complete on the disk. If the number is
            lower than that of the last step, the save begins a new history (series of saved steps).
        state : dict
            Nested dicts with string keys. An array that is not a `Shard` must be equal on all ranks
            that have it, and is written only once. This is not checked: use `md.check_replicas`.
            The `Shard` objects of all ranks must together cover their global array, without an
            overlap. JSON values must be equal on the ranks that have them.

        Raises
        ------
        CheckpointError
            When a rank cannot write, for example because the disk is full, or when shards overlap
            or leave a hole. Also if the folder holds good steps, none of which this store has
            restored, and `fresh` is not set. After a failed save nothing of the new step remains,
            and earlier steps are unchanged.
        MismatchError
            When the ranks disagree on the step, a name, a shape, a dtype or a JSON value.
        ConfigError
            When a value in `state` cannot be saved.
        """
        with events.span("checkpoint.save"), self._call("save"):
            save = self._begin(step, state)
            all_come(self._comm)
            save.write()
            self._finish(at_once=True)

    def save_async(self, step: int, state: Mapping) -> None:
        """Copy this rank's part of `state`, and save the copy in the background. Collective.

        The caller may change the state when this method returns. A thread of each rank writes the
        copy, and the step is committed as soon as all ranks have written. The next call of `save`,
        `save_async`, `restore`, `wait` or `close` waits for this, and raises the error if the
        background save has failed.
        """
        with events.span("checkpoint.save_async"), self._call("save_async"):
            self._begin(step, state, copy=True).start()

    def restore(
        self,
        like: Mapping | None = None,
        step: int | None = None,
        *,
        history: int | None = None,
        verify: bool = True,
    ):
        """Restore a step, by default the newest good one, and return (step, state). Collective.

        Parameters
        ----------
        like : dict, optional
            A state of the same model, which may be divided into shards in another way than the
            saved state. Its arrays are filled in place, and returned in new dicts with the saved
            extras (values that are not arrays). Extras that the checkpoint does not have are
            returned unchanged. If `like` is None, every rank gets every array whole.
        step : int, optional
            The number of the step to restore. None means the newest step that every rank can read:
            damaged steps are skipped, and each is reported once on stderr.
        history : int, optional
            The number of a history (series of saved steps); None means the newest history.
        verify : bool
            Whether the data are compared with their checksums.

        Raises
        ------
        NoCheckpoint
            When the folder holds no good step. The arrays of `like` are then unchanged.
        CheckpointError
            When the given `step` is damaged, or when `like` belongs to another model. If the
            message says that arrays may hold parts of a step, the caller must set the values of all
            arrays in `like` again.
        MismatchError
            When `like` is None on some ranks, and not None on others.
        """
        with self._call("restore"):
            self._finish()

            def check() -> dict:
                return {**which(step, history), "verify": yes_or_no("verify", verify)}

            with events.span("checkpoint.restore"):
                entry, state = Restore(self._comm, self._place, like, check).run()
            self._keep.verified = entry
            self._line.stand(entry)
            return entry.step, state

    def latest_step(self) -> int | None:
        """Return the number of the newest committed step, or None. Collective.

        The data of the step are not checked.
        """
        with self._call("latest_step"):
            self._settle()
            entry: Entry | None = by_rank_0(self._comm, "latest_step", self._line.latest)
            return entry and entry.step

    def continue_newest(self) -> None:
        """Record the newest committed step as restored, without reading it. Collective.

        The next save then continues the history (series of saved steps) of this step. This is for a
        run whose state has come from other ranks.
        """
        with self._call("continue_newest"):
            self._settle()
            if (entry := by_rank_0(self._comm, "continue_newest", self._line.latest)) is not None:
                self._line.stand(entry)

    def all_steps(self, *, history: int | None = None) -> list[int]:
        """Return the numbers of the committed steps of a history, ascending. Collective.

        A history is a series of saved steps; None means the newest history. The list includes the
        steps of older histories that it continues. Raises NoCheckpoint when the given `history`
        does not exist.
        """
        with self._call("all_steps"):
            self._settle()
            number = same_on_all(self._comm, "all_steps", lambda: which(None, history))["history"]
            return by_rank_0(self._comm, "all_steps", partial(self._line.all_steps, number))

    def delete(self, step: int, *, history: int | None = None) -> None:
        """Remove a step. Collective.

        `history` is the number of a history (series of saved steps); None means the newest history.
        Raises NoCheckpoint if the step does not exist, and CheckpointError if another job saves to
        the folder.
        """
        with self._call("delete"):
            self._finish()
            given = same_on_all(self._comm, "delete", lambda: which(step, history, needed=True))
            by_rank_0(self._comm, "delete", partial(self._delete, **given))

    def _delete(self, step: int, history: int | None) -> None:
        entry = self._line.first(step, history)
        assert entry is not None
        with files.folder(self.path) as root:
            self._lock.take(root)
            entries, _ = histories.everything(self.path, step, entry.history)
            # If the step was saved several times, its oldest folder is removed first. If the
            # process is killed meanwhile, the newest folder is left.
            for each in reversed(entries):
                retention.remove(each.name, root)
            files.sync(root)

    def verify(self, step: int | None = None) -> int:
        """Check every byte of a step, by default of the newest step. Collective.

        The ranks share the reading. Returns the total number of bytes that were checked. Raises
        CheckpointError if a file is damaged, and NoCheckpoint if the step does not exist.
        """
        with self._call("verify"):
            self._settle()
            step = same_on_all(self._comm, "verify", lambda: {"step": checked_step(step)})["step"]
            removed = 0
            while (checked := self._verify(step)) is None:
                removed = load.count_removed(self.path, removed)
            return checked

    def _verify(self, step: int | None) -> int | None:
        """Return the number of bytes checked; None if another job removed the step meanwhile."""
        comm = self._comm
        entry = by_rank_0(comm, "verify", partial(self._line.first, step))

        def total(answers: list) -> int | None:
            found = list(dict.fromkeys(text for damages, _ in answers for text in damages))
            if found and histories.is_gone(self.path, entry):
                return None
            if found:
                raise CheckpointError(f"{self.path}/{entry.name} is damaged: {'; '.join(found)}")
            return sum(count for _, count in answers)

        look = partial(load.damages, self.path, entry, comm.rank, comm.size)
        checked = run_on_all(comm, "verify", look, total)
        if checked is not None:
            self._keep.verified = max(entry, self._keep.verified or entry)
        return checked

    def wait(self) -> None:
        """Wait until the save that is still running, if any, is committed. Collective."""
        with self._call("wait"):
            self._finish()

    def let_go(self) -> None:
        """Wait as `wait` does, and release the lock, so that another job may save. Collective."""
        self.wait()
        self._lock.release()

    def close(self) -> None:
        """Wait for a save that is still running, and close the store. Collective.

        A second call does nothing.
        """
        if self._closed:
            return
        try:
            if self._pending is not None:
                with self._call("close"):
                    self._finish()
        finally:
            self._leave()

    def _abandon(self) -> None:
        """Close the store on this rank alone; abandon a save that is still running."""
        if self._pending is not None:
            save, self._pending = self._pending, None
            save.abandon()
        self._leave()

    def _leave(self) -> None:
        self._keep.settle()
        self._lock.release()
        self._closed = True

    def _begin(self, step, state: Mapping, copy: bool = False, alone: bool = True) -> Save:
        """Begin a save of `state`. Collective.

        With `alone`, the nodes' copies become invalid.
        """
        self._finish()
        comm = self._comm
        if self._planner is None:
            writers = self._given["writers"]
            nodes = topology_of(comm).node_of if writers == "node" else [0] * comm.size
            self._planner = Planner(writers_of(writers, list(nodes)))
        check = partial(checked_step, step, needed=True)
        self._pending = begin(comm, self._place, self._planner, check, state, copy)
        if alone and comm.rank == 0:
            node_copies.invalidate(self.path)
        return self._pending

    def _finish(self, at_once: bool = False) -> None:
        self._settle()
        if self._pending is not None:
            save, self._pending = self._pending, None
            save.finish(at_once)

    def _settle(self) -> None:
        """Wait for the removal of old steps; raise ClosedError if the store is closed."""
        if self._closed:
            raise ClosedError(f"the checkpoint store of {self.path} is closed")
        self._keep.settle()
