"""`CheckpointStore`: save and restore the state of a job, on any number of ranks.

A thin face: `save.py` is how a step is written and committed, `restore.py` how the newest good
one is found and read, `load.py` the same without MPI.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

from .. import events
from ..errors import CheckpointError, ClosedError
from ..runtime.topology import topology_of
from . import histories, load, node_copies
from .arguments import of_store, wanted, which, yes_or_no
from .control import all_come, by_rank_0, call, run_on_all, same_on_all
from .histories import Line
from .place import Place, WriteOptions
from .read.restore import Restore
from .storage import files, retention
from .storage.lock import RunLock
from .storage.retention import Keep
from .storage.steps import Entry
from .write.planner import Planner
from .write.save import Save, begin
from .write.shard_writer import Memory, WriteBuffers
from .write.write_plan import writers_of


class Store(ABC):
    """What stores share: ``with`` ends in `close`, after an exception in `_abandon`."""

    def __init__(self, comm):
        self._comm, self._closed = comm, False

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _call(self, method: str):
        """Return the ``with`` of a public method: what it raises here the other ranks hear."""
        return call(self._comm, f"{type(self).__name__}.{method}")

    @abstractmethod
    def close(self) -> None:
        """End together with the other ranks. Collective."""

    @abstractmethod
    def _abandon(self) -> None:
        """Leave without a word to the other ranks."""


class CheckpointStore(Store):
    """Checkpoints of one job in one folder. Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Its ranks save and restore together. It must live as long as the store is open.
    path : path-like
        Folder that all ranks can reach; made at the first save. The same on all ranks.
    keep : int or None
        How many good steps of the newest history to keep; None keeps all.
    keep_every : int, optional
        Keep the steps whose number is a multiple of this as well. The newest step that was
        verified or restored is never removed.
    writers : "all", "node" or int
        Who writes files: every rank, one rank of each node, or so many ranks. The others send
        what only they hold to a writer, which needs the memory for it.
    direct : bool
        Write past the system's cache where the file system can: no copy there, and no wait for it
        to be written out at the end.
    sha256 : bool
        Keep a SHA-256 of each shard, which `verify` checks, beside the CRC-32 of each block.
    fresh : bool or str
        Begin anew: what the folder holds is set aside. It stays, and is what `history` numbers;
        without that, this store has nothing until it has saved. A program that is started again
        gives True to its first attempt alone, or to all the same text, which names the run: the
        later ones then go on with what was begun under it.

    Notes
    -----
    A save continues the step that this store has restored or saved last. Where newer ones are
    there, as after ``restore(step=900)``, it begins a branch: `restore`, `keep` and readers follow
    that from then on, and the steps that it has left stay, as another history.

    Every method is called by all ranks, and what goes wrong on one is raised on all. Use it with
    ``with``, or call `close`.
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
        given = same_on_all(
            comm,
            "CheckpointStore",
            lambda: of_store(path, keep, keep_every, writers, direct, sha256, fresh),
        )
        self._given, self.path = given, given["path"]
        super().__init__(comm)
        self._pending: Save | None = None
        self._keep = Keep(given["keep"], given["keep_every"])
        self._lock = RunLock(self.path)
        self._line = Line(self.path, given["fresh"])
        how = WriteOptions(given["direct"], given["sha256"])
        self._place = Place(self.path, self._keep, self._lock, self._line, how)
        self._buffers = WriteBuffers(Memory(), Memory())
        self._writers = given["writers"]
        self._planner: Planner | None = None

    def __repr__(self):
        return f"<CheckpointStore {self.path!r}: {self._summary()}>"

    def _summary(self) -> str:
        """Say in one line what this store was given, and what it is doing."""
        settings = ", ".join(f"{k}={v!r}" for k, v in self._given.items() if k != "path")
        if self._pending is not None:
            return f"{settings}; saving step {self._pending.step}"
        return f"{settings}; closed" if self._closed else settings

    def save(self, step: int, state: Mapping) -> None:
        """Save `state` as `step` and return when it is committed. Collective.

        Parameters
        ----------
        step : int
            The same on all ranks. Saving the last step again replaces it, without a moment in
            which neither is there; a lower number than the last one's begins a branch.
        state : dict
            Nested dicts with string keys. Arrays are replicated state: equal on the ranks that
            have them, written once. Each of those ranks writes a part, and their values are not
            compared, which would take longer than the save: where they differ, parts of several
            are saved. `md.check_replicas` finds out; `md.train` calls it before each save.
            Shards are pieces, which must tile their global array.
            JSON values (extras) must be equal on the ranks that have them.

        Raises
        ------
        CheckpointError
            When a rank cannot write (a full disk, ...), or shards overlap or leave a hole; when the
            folder holds good steps, and this store has neither restored one nor been told that it
            begins anew (`fresh`). Nothing of the step remains, earlier steps are as they were.
        MismatchError
            When the ranks disagree on the step, a name, a shape, a dtype or an extra.
        ConfigError
            When a leaf cannot be saved.
        """
        with events.span("checkpoint.save"), self._call("save"):
            save = self._begin(step, state)
            all_come(self._comm)
            save.write()
            self._finish(at_once=True)

    def save_async(self, step: int, state: Mapping) -> None:
        """Copy what this rank writes of `state`, save it in the background. Collective.

        The state may be changed when this returns. The step is committed as soon as all ranks
        have written their parts, whatever they do meanwhile, by threads that make no MPI calls.
        The next `save`, `save_async`, `restore`, `wait` or `close` waits for that, and raises
        what went wrong.
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
        """Return (step, state) of a step, by default the newest good one. Collective.

        Parameters
        ----------
        like : dict, optional
            A state of this model on these ranks, in any layout: its arrays, and those of its
            shards, are filled in place and returned in new dicts, with the extras that were
            saved. Extras that the checkpoint does not have keep their value. None gives every
            rank every array whole.
        step : int, optional
            None takes the newest step that every rank can read; damaged ones are passed over,
            which is said once on stderr.
        history : int, optional
            Its number, for one that was left or set aside; None is the newest.
        verify : bool
            Whether numbers are compared with their checksums. False trusts the disk with them;
            what lies where is still read from digested tables, and sizes are compared.

        Raises
        ------
        NoCheckpoint
            When there is none, or none that is good; `like` is then unchanged.
        CheckpointError
            When `step` was given and is damaged, or `like` is of another model: the message
            names what differs. Where arrays may have been filled in part by then, since numbers
            failed their checksums on the way, or memory, the message says so: set them anew.
        MismatchError
            When `like` is None on some ranks only.
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
        """Return the newest committed step, or None; its data are not checked. Collective."""
        with self._call("latest_step"):
            self._settle()
            entry = self._latest()
            return entry and entry.step

    def _latest(self) -> Entry | None:
        return by_rank_0(self._comm, "latest_step", self._line.latest)

    def all_steps(self, *, history: int | None = None) -> list[int]:
        """Return the committed steps of a history, ascending. Collective.

        By default the newest; those that it continues are among them, a save under way is not.
        Raises NoCheckpoint where `history` is given and is not there; it names those that are.
        """
        with self._call("all_steps"):
            self._settle()
            number = same_on_all(self._comm, "all_steps", lambda: which(None, history))["history"]
            return by_rank_0(self._comm, "all_steps", partial(self._line.all_steps, number))

    def delete(self, step: int, *, history: int | None = None) -> None:
        """Remove a step, by default of the newest history. Collective.

        Where it was the last step of that history, the one before is the newest again. Raises
        NoCheckpoint where there is no such step, CheckpointError where another job saves here.
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
            for each in reversed(entries):  # the older ones first, or a kill would bring them back
                retention.remove(each.name, root)
            files.sync(root)

    def verify(self, step: int | None = None) -> int:
        """Check every byte of a step, by default the newest. Collective.

        Each rank reads some of the files. Returns the bytes looked at; raises CheckpointError
        that names the damage, NoCheckpoint where there is no such step.
        """
        with self._call("verify"):
            self._settle()
            step = same_on_all(self._comm, "verify", lambda: {"step": wanted(step)})["step"]
            looked_at, removed = None, 0
            while looked_at is None:
                entry, looked_at = self._verify(step)
                if looked_at is None:  # on all ranks alike
                    removed = load.count_removed(self.path, removed)
            self._keep.verified = max(entry, self._keep.verified or entry)
            return looked_at

    def _verify(self, step: int | None) -> tuple[Entry, int | None]:
        """Return the entry that was checked, and how many bytes, or None if it was removed."""
        comm = self._comm
        entry = by_rank_0(comm, "verify", partial(self._line.first, step))

        def total(answers: list) -> int | None:
            found = list(dict.fromkeys(text for damages, _ in answers for text in damages))
            if found and histories.is_gone(self.path, entry):
                return None
            if found:
                raise CheckpointError(f"{self.path}/{entry.name} is damaged: {'; '.join(found)}")
            return sum(count for _, count in answers)

        return entry, run_on_all(
            comm, "verify", lambda: load.damages(self.path, entry, comm.rank, comm.size), total
        )

    def wait(self) -> None:
        """Wait until the save that is under way is committed, if there is one. Collective."""
        with self._call("wait"):
            self._finish()

    def close(self) -> None:
        """Wait for the save that is under way. Collective; a second call does nothing."""
        if self._closed:
            return
        try:
            if self._pending is not None:
                with self._call("close"):
                    self._finish()
        finally:
            self._leave()

    def _abandon(self) -> None:
        """Leave without a word to the other ranks: an exception may be on this rank alone.

        A save under way is given up, unless it is committed already.
        """
        if self._pending is not None:
            save, self._pending = self._pending, None
            save.abandon()
        self._leave()

    def _leave(self) -> None:
        self._keep.settle()
        self._lock.release()
        self._closed = True

    def _begin(self, step, state: Mapping, copy: bool = False, alone: bool = True) -> Save:
        """Begin a save; of one that is `alone` the nodes hold nothing. Collective."""
        self._finish()
        if self._planner is None:
            self._planner = Planner(writers_of(self._writers, self._nodes()))
        self._pending = begin(
            self._comm,
            self._place,
            self._planner,
            self._buffers,
            partial(wanted, step, needed=True),
            state,
            copy,
        )
        if alone and self._comm.rank == 0:
            node_copies.invalidate(self.path)
        return self._pending

    def _nodes(self) -> list[int]:
        """Return the node of each rank. Collective where that matters."""
        if self._writers != "node":
            return [0] * self._comm.size
        return list(topology_of(self._comm).node_of)

    def _finish(self, at_once: bool = False) -> None:
        self._settle()
        if self._pending is not None:
            save, self._pending = self._pending, None
            save.finish(at_once)

    def _settle(self) -> None:
        """Raise if the store is closed; let nothing of a save before be going on."""
        if self._closed:
            raise ClosedError(f"the checkpoint store of {self.path} is closed")
        self._keep.settle()
