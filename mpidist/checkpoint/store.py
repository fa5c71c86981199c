"""`CheckpointStore`: save and restore the state of a job, on any number of ranks.

A thin face: `save.py` is how a step is written and committed, `restore.py` how the newest good
one is found and read, `load.py` the same without MPI.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from mpidist import events
from mpidist.abort import install_hook
from mpidist.checkpoint import held, load, steps
from mpidist.checkpoint.lock import RunLock
from mpidist.checkpoint.plan import writers_of
from mpidist.checkpoint.restore import Reading, restore
from mpidist.checkpoint.retention import Keep
from mpidist.checkpoint.save import Save
from mpidist.checkpoint.shard import Buffers, How, Memory
from mpidist.checkpoint.steps import MAX_STEP
from mpidist.checkpoint.together import together
from mpidist.errors import CheckpointError, ClosedError, ConfigError, MismatchError
from mpidist.topology import Topology


class Scoped(ABC):
    """``with`` for stores: `close` at the end, `_abandon` after an exception."""

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self._abandon()

    @abstractmethod
    def close(self) -> None:
        """End together with the other ranks. Collective."""

    @abstractmethod
    def _abandon(self) -> None:
        """Leave without a word to the other ranks. Local."""


class CheckpointStore(Scoped):
    """Checkpoints of one job in one folder. Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        Its ranks save and restore together; duplicated, so the store's messages are its own.
    path : path-like
        Folder that all ranks can reach; made at the first save. The same on all ranks.
    keep : int or None
        How many good steps to keep; None keeps all.
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

    Notes
    -----
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
    ):
        self.path = str(Path(path).absolute())
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and (not _is_integer(value) or value < 1):
                raise ConfigError(
                    f"{name}={value!r}; expected a number of steps of 1 or more, or None"
                )
        if writers not in ("all", "node") and not (_is_integer(writers) and int(writers) > 0):
            raise ConfigError(f"writers={writers!r}; expected 'all', 'node' or a number from 1")
        install_hook(comm)
        self._comm = comm.Dup()
        self._pending: Save | None = None
        self._keep = Keep(keep, keep_every)
        self._lock = RunLock(self.path)
        self._buffers = Buffers(Memory(), Memory())
        self._how = How(bool(direct), bool(sha256))
        self._writers = writers
        self._writer_of: list[int] | None = None

    def save(self, step: int, state: Mapping) -> None:
        """Save `state` as `step` and return when it is committed. Collective.

        Parameters
        ----------
        step : int
            The same on all ranks. Saving a step again replaces it, without a moment in which
            neither is there.
        state : dict
            Nested dicts with string keys. Arrays are replicated state: equal on the ranks that
            have them, written once. shards are pieces, which must tile their global array.
            JSON values (extras) must be equal on the ranks that have them.

        Raises
        ------
        CheckpointError
            When a rank cannot write (a full disk, ...), or shards overlap or leave a hole.
            Nothing of the step remains, earlier steps are as they were.
        MismatchError
            When the ranks disagree on the step, a name, a shape, a dtype or an extra.
        ConfigError
            When a leaf cannot be saved.
        """
        with events.span("checkpoint.save"):
            self._begin_alone(step, state, copy=False).write()
            self._finish()

    def save_async(self, step: int, state: Mapping) -> None:
        """Copy what this rank writes of `state`, save it in the background. Collective.

        The state may be changed when this returns. The step is committed as soon as all ranks
        have written their parts, whatever they do meanwhile, by threads that make no MPI calls.
        The next `save`, `save_async`, `restore`, `wait` or `close` waits for that, and raises
        what went wrong.
        """
        with events.span("checkpoint.save_async"):
            self._begin_alone(step, state, copy=True).start()

    def restore(self, like: Mapping | None = None, step: int | None = None, *, verify: bool = True):
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
        self._finish()
        self._agree("restore", step)
        with events.span("checkpoint.restore"):
            how = Reading(bool(verify), self._how.direct)
            entry, state = restore(self._comm, self.path, like, step, self._keep.bad, how)
        self._keep.verified = entry
        return entry.step, state

    def latest_step(self) -> int | None:
        """Return the newest committed step, or None; its data are not checked. Collective."""
        found = self.all_steps()
        return found[-1] if found else None

    def all_steps(self) -> list[int]:
        """Return the committed steps, ascending. Collective. A save under way is not among them."""
        self._settle()
        return together(self._comm, "all_steps", lambda: None, lambda _: steps.all_steps(self.path))

    def verify(self, step: int | None = None) -> int:
        """Check every byte of a step, by default the newest. Collective.

        Each rank reads some of the files. Returns the bytes looked at; raises CheckpointError
        that names the damage, NoCheckpoint where there is no such step.
        """
        self._settle()
        comm = self._comm
        self._agree("verify", step)
        entry = together(
            comm, "verify", lambda: None, lambda _: steps.candidates(self.path, step)[0]
        )

        def total(answers: list) -> int:
            found = list(dict.fromkeys(text for damages, _ in answers for text in damages))
            if found:
                raise CheckpointError(f"{self.path}/{entry.name} is damaged: {'; '.join(found)}")
            return sum(count for _, count in answers)

        looked_at = together(
            comm, "verify", lambda: load.damages(self.path, entry, comm.rank, comm.size), total
        )
        self._keep.verified = max(entry, self._keep.verified or entry)
        return looked_at

    def wait(self) -> None:
        """Wait until the save that is under way is committed, if there is one. Collective."""
        self._finish()

    def close(self) -> None:
        """Wait for the save that is under way and free the communicator. Collective.

        A second call does nothing.
        """
        if self._comm is None:
            return
        try:
            self._finish()
        finally:
            self._keep.settle()
            self._lock.release()
            self._comm.Free()
            self._comm = None

    def _abandon(self) -> None:
        """Leave without a word to the other ranks: an exception may be on this rank alone.

        The communicator is not freed, since that would wait for them; a save under way is given
        up, unless it is committed already.
        """
        if self._pending is not None:
            save, self._pending = self._pending, None
            save.abandon()
        self._keep.settle()
        self._lock.release()
        self._comm = None

    def _begin_alone(self, step, state: Mapping, copy: bool) -> Save:
        """Begin a save of which the nodes hold nothing. Collective."""
        save = self._begin(step, state, copy)
        if self._comm.rank == 0:
            held.disown(self.path)
        return save

    def _begin(self, step, state: Mapping, copy: bool) -> Save:
        self._finish()
        self._agree("save", step, given=True)
        if self._writer_of is None:
            self._writer_of = writers_of(self._writers, self._nodes())
        self._pending = Save(
            self._comm,
            self.path,
            operator.index(step),
            state,
            self._keep,
            self._lock,
            self._writer_of,
            self._buffers,
            self._how,
            copy,
        )
        return self._pending

    def _nodes(self) -> list[int]:
        """Return the node of each rank. Collective where that matters."""
        if self._writers != "node":
            return [0] * self._comm.size
        with Topology(self._comm) as topology:
            return list(topology.node_of)

    def _finish(self) -> None:
        self._settle()
        if self._pending is not None:
            save, self._pending = self._pending, None
            save.finish()

    def _agree(self, doing: str, step, given: bool = False) -> None:
        """Raise on all ranks unless they all mean the same, possible step. Collective."""

        def local():
            possible = _is_integer(step) and 0 <= step <= MAX_STEP
            if not possible and (given or step is not None):
                raise ConfigError(f"step={step!r}; expected an integer from 0 to {MAX_STEP}")
            return step, self.path

        def same(given: list) -> None:
            for rank, (other, path) in enumerate(given):
                if (other, path) != given[0]:
                    raise MismatchError(
                        f"{doing}: rank {rank} means step {other} in {path}, rank 0 step "
                        f"{given[0][0]} in {given[0][1]}; all ranks must pass the same"
                    )

        together(self._comm, doing, local, same)

    def _settle(self) -> None:
        """Raise if the store is closed; let nothing of a save before be going on. Local."""
        if self._comm is None:
            raise ClosedError(f"the checkpoint store of {self.path} is closed")
        self._keep.settle()


def _is_integer(value) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
