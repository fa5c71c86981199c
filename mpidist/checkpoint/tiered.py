"""`TieredStore`: save each step to memory or a disk of every node, then to the shared folder.

    rank 0  rank 1 | rank 2  rank 3     LOCAL/ID on each node: whole arrays of its ranks, and the
    LOCAL/ID       | LOCAL/ID           pieces of each rank under the number of the rank
          PATH/step-...                 the shared folder, as `CheckpointStore` writes it

A restarted job continues from the newest step of which all its nodes hold a copy. If every array is
whole on its ranks (none is divided into `Shard` parts), the restarted job may have another number
of ranks. If the copies cannot be used, the job continues from the shared folder, and its first save
removes the copies.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .. import events
from ..errors import ConfigError, MpidistError, NoCheckpoint, shown
from ..runtime.context import free
from ..runtime.topology import topology_of
from . import node_copies
from .arguments import checked_number, checked_path, checked_step, which, yes_or_no
from .control import by_rank_0, call, report_no_copy, run_on_all, same_on_all
from .format.state import Shard, leaves, tree
from .read.restore import spoiled
from .storage.steps import Entry
from .store import CheckpointStore, Store
from .write.save import Save


class _Copy(NamedTuple):
    """A step that is saved on the nodes only: its number, its name, and its history."""

    step: int
    name: str
    history: int


class TieredStore(Store):
    """Checkpoints in a folder of each node and in a shared folder. Collective over `comm`.

    The class has the same methods as `CheckpointStore`. If a node cannot keep a copy, the store
    reports the reason on stderr, and saves the step only in the shared folder.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    path : path-like
        The shared folder.
    keep, keep_every, writers, direct, sha256, fresh
        Arguments for the shared folder, which the docstring of `CheckpointStore` explains.
    local : path-like
        A folder of the node, in memory (``/dev/shm/...``) or on a disk of the node. Ranks of one
        node that pass different folders count as ranks of different nodes.
    local_keep : int
        How many steps a node keeps.
    """

    def __init__(
        self,
        comm,
        path,
        keep: int | None = 3,
        *,
        local,
        local_keep: int = 2,
        keep_every: int | None = None,
        writers: str | int = "all",
        direct: bool = True,
        sha256: bool = False,
        fresh: bool | str = False,
    ):
        def check() -> dict:
            self.folder = Path(checked_path("local", local)).absolute()
            if self.folder == Path(checked_path("path", path)).absolute():
                raise ConfigError(
                    f"local={shown(local)} is the shared folder; give a folder of the node"
                )
            expected = "a number of steps of 1 or more"
            return {"local_keep": checked_number("local_keep", local_keep, 1, expected)}

        with call(comm, "TieredStore"):
            self._keep = same_on_all(comm, "TieredStore", check)["local_keep"]
            self.shared = CheckpointStore(
                comm, path, keep, keep_every=keep_every, writers=writers, direct=direct,
                sha256=sha256, fresh=fresh,
            )  # fmt: skip
            self.path = self.shared.path
            super().__init__(comm)
            here = (topology_of(comm).node, str(self.folder))
            places = run_on_all(comm, "TieredStore", lambda: here, lambda all: all)
            # `Split` blocks until all ranks call it, but all ranks have just agreed to call it.
            self._node = comm.Split(places.index(here), comm.rank)
        self._local: Any = None  # a CheckpointStore, once the shared folder has an identity
        self._ours = False  # whether this run continues the history of the nodes' copies
        # The history of the newest copy on the nodes; None if the next copy may not continue it.
        self._history: int | None = None
        self._holds = True  # False as soon as there is no room for copies

    def __repr__(self):
        local = f"local={str(self.folder)!r}, local_keep={self._keep}"
        return f"<TieredStore {self.path!r}: {local}, {self.shared._summary()}>"

    def save(self, step: int, state: Mapping) -> None:
        """Save `state` on the nodes, and begin the save to the shared folder. Collective.

        Returns when all nodes hold the step. If a node cannot hold the step, returns when the
        shared folder holds it. If the save to the shared folder fails, the next call of the store
        raises the error.
        """
        if not self._holds:
            self.shared.save(step, state)
            return
        with events.span("tiers.save"), self._call("save"):
            copying = self.shared._begin(step, state, copy=True, alone=False)
            everywhere = self._hold(copying, state, CheckpointStore.save)
            copying.start()
            if not everywhere:
                self.shared.wait()

    def save_async(self, step: int, state: Mapping) -> None:
        """Copy this rank's part of `state`; save the copy in the background. Collective.

        The step is saved on the nodes and in the shared folder.
        """
        if not self._holds:
            self.shared.save_async(step, state)
            return
        with events.span("tiers.save_async"), self._call("save_async"):
            copying = self.shared._begin(step, state, copy=True, alone=False)
            self._hold(copying, state, CheckpointStore.save_async)
            copying.start()

    def hold(self, step: int, state: Mapping) -> bool:
        """Save `state` on the nodes only; return whether all nodes hold the step. Collective.

        If this run has neither saved a step nor begun with the nodes' copies, the step is also
        saved in the shared folder.
        """
        with events.span("tiers.hold"), self._call("hold"):
            check = partial(checked_step, step, needed=True)
            same_on_all(self._comm, "hold", lambda: {"step": check()})
            # Only a save to the shared folder may begin a history, or remove copies of another
            # history.
            if self._history is None:
                copying = self.shared._begin(step, state, copy=True, alone=False)
                held = self._hold(copying, state, CheckpointStore.save)
                copying.start()
                return held
            name = f"{step}-{secrets.token_hex(8)}"  # all ranks use the name that rank 0 has drawn
            return self._hold(_Copy(step, name, self._history), state, CheckpointStore.save)

    def stop_holding(self) -> None:
        """Remove the nodes' checkpoints; from now on save in the shared folder only. Collective."""
        with self._call("stop_holding"):
            self.wait()
            self._open(make=False)
            self._close_nodes((math.inf,))
            self._holds = False

    def restore(
        self,
        like: Mapping | None = None,
        step: int | None = None,
        *,
        history: int | None = None,
        verify: bool = True,
    ):
        """Restore a step and return (step, state), as `CheckpointStore.restore` does. Collective.

        The state is read from the nodes' copies if these conditions hold:

        - All nodes hold a copy of the wanted step, by default of the newest step.
        - `history` is None.
        - Each rank runs on the node on which it saved the step.
        - `like` has the same arrays as the state that this rank saved.
        - The copies are undamaged: every byte is checked before an array is filled.

        Otherwise, and if `like` is None, the state is read from the shared folder. The argument
        `verify` applies only to the shared folder.
        """
        with self._call("restore"):
            self.wait()

            def check() -> dict:  # checked now: `shared` would check only after the copies are read
                given = {"like": "none" if like is None else "a state"}
                return {**which(step, history), **given, "verify": yes_or_no("verify", verify)}

            look = partial(node_copies.identity, self.path, make=False)
            given, there = same_on_all(self._comm, "restore", check, number=lambda: bool(look()))
            step, history = given["step"], given["history"]
            if there:
                self._open(make=False)
            if self._local is not None and like is not None and history is None:
                for of, number in self._common(like, step):
                    if self._is_good(number):
                        state = self._from_nodes(like, number)
                        # After the restore of an older step, a save begins a branch.
                        self._ours, self._history = True, of if step is None else None
                        self.shared._line.stand(Entry(of, number, 0))
                        events.emit("checkpoint_restored_from_nodes", step=number)
                        return number, state
            result = self.shared.restore(like, step, history=history, verify=given["verify"])
            self._ours, self._history = False, None
            return result

    def latest_step(self) -> int | None:
        """Return the newest committed step in the shared folder, or None. Collective."""
        return self.shared.latest_step()

    def continue_newest(self) -> None:
        """Record the newest committed step as restored, without reading it. Collective.

        The next save then continues the history (series of saved steps) of this step.
        """
        self.shared.continue_newest()

    def all_steps(self, *, history: int | None = None) -> list[int]:
        """Return the numbers of the committed steps in the shared folder, ascending. Collective.

        `history` is the number of a history (series of saved steps); None means the newest history.
        """
        return self.shared.all_steps(history=history)

    def delete(self, step: int, *, history: int | None = None) -> None:
        """Remove a step from the shared folder, as `CheckpointStore.delete` does. Collective.

        The copies of the step on the nodes are removed too, but not if `history` (the number of a
        series of saved steps) is given.
        """
        with self._call("delete"):
            self.wait()
            given = same_on_all(self._comm, "delete", lambda: which(step, history, needed=True))
            self._open(make=False)
            self._history = None
            if self._local is not None and given["history"] is None:

                def remove() -> None:
                    with suppress(NoCheckpoint):
                        self._local.delete(given["step"])

                run_on_all(self._comm, "delete on the nodes", remove)
            self.shared.delete(**given)

    def verify(self, step: int | None = None) -> int:
        """Check every byte of a step in the shared folder, by default of the newest. Collective."""
        return self.shared.verify(step)

    def wait(self) -> None:
        """Wait until a running save is committed in the shared folder. Collective."""
        with self._call("wait"):
            if self._local is not None:
                with self._reported():
                    run_on_all(self._comm, "copy on the nodes", self._local.wait)
            self.shared.wait()

    def let_go(self) -> None:
        """Wait as `wait` does, and release the lock, so that another job may save. Collective."""
        with self._call("let_go"):
            self.wait()
            self.shared.let_go()

    def close(self) -> None:
        """Wait for running saves, remove the nodes' checkpoints, and close the store. Collective.

        A checkpoint on the nodes that is newer than the newest one in the shared folder stays.
        """
        if self._closed:
            return
        newest = None
        with self._call("close"):
            try:
                self.wait()
                newest = by_rank_0(self._comm, "close", self.shared._line.latest)
            finally:
                self.shared.close()
                self._close_nodes(newest and newest[:2])
                self._closed = True
                free(self._node)
                self._node.Free()

    def _abandon(self) -> None:
        """Close the store on this rank alone; other ranks may not have raised an exception."""
        self.shared._abandon()
        if self._local is not None:
            self._local._abandon()
        self._closed = True

    # ---------------------------------------------------------------------------- on the nodes

    def _hold(self, copying: Save | _Copy, state: Mapping, save: Callable) -> bool:
        """Save on every node its ranks' state; return whether all nodes succeeded. Collective."""
        comm, doing = self._comm, f"copy of step {copying.step} on the nodes"

        def begin() -> tuple[str, list]:
            problem = ""
            try:
                if self._local is not None:
                    self._local.wait()
            except MpidistError as error:
                problem = f"copy on the nodes: rank {comm.rank}: {error}"
            return problem, node_copies.extras(state)

        def decide(answers: list[tuple[str, list]]) -> tuple[dict, str, int]:
            problems, extras = zip(*answers, strict=True)
            if any(problems):
                report_no_copy(next(filter(None, problems)))
            found = {path: leaf for one in extras for path, leaf in one}
            return found, copying.name, copying.history

        with self._reported():
            if not self._ours:
                self._forget()
                self._ours = True
            self._open(make=True)
            extras, name, history = run_on_all(comm, doing, begin, decide)
            copy = node_copies.copy_record(comm, state, extras, name, history)
            run_on_all(comm, doing, lambda: save(self._local, copying.step, copy))
            self._history = history
            return True
        return False

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Report an error in the ``with`` block, which all ranks enter, on stderr; suppress it."""
        try:
            yield
        except MpidistError as error:
            if self._comm.rank == 0:
                report_no_copy(str(error))

    def _open(self, make: bool) -> None:
        """Open the stores of the nodes, if the shared folder has the identity of a run. Collective.

        With `make`, a missing identity is written.
        """
        if self._local is None:
            look = partial(node_copies.identity, self.path, make)
            identity = by_rank_0(self._comm, "copies on the nodes", look)
            if identity is not None:
                self._local = CheckpointStore(self._node, self.folder / identity, keep=self._keep)
                # A node does not keep steps of other histories, because its memory is small, and
                # the shared folder has these steps.
                self._local._keep.others = False

    def _common(self, like: Mapping, step: int | None) -> list[tuple[int, int]]:
        """Return the steps that all nodes hold, newest first, as (history, step). Collective."""
        comm, line = self._comm, self.shared._line
        fits = line.is_next if step is None else line.is_of

        def both(answers: list[dict[int, tuple[int, str]]]) -> list[tuple[int, int]]:
            same = set(answers[0].items()).intersection(*(one.items() for one in answers))
            copies = sorted(((history, number) for number, (history, _) in same), reverse=True)
            return [] if line.is_fresh() else [copy for copy in copies if fits(*copy)]

        with self._reported():
            look = partial(node_copies.usable_steps, comm, self._local.path, step, like)
            return run_on_all(comm, "copies on the nodes", look, both)
        return []

    def _is_good(self, step: int) -> bool:
        """Whether the nodes' copies of a step are undamaged; checks every byte. Collective."""
        with self._reported():
            doing = f"good copy of step {step} on the nodes"
            run_on_all(self._comm, doing, lambda: self._local.verify(step))
            return True
        return False

    def _from_nodes(self, like: Mapping, step: int) -> dict:
        """Fill the arrays of `like` from the nodes' verified copies of a step. Collective."""

        def fill() -> dict:
            extras = tree(iter(node_copies.extras(like)))
            arrays = node_copies.arrays(like, self._comm.rank)
            _, state = self._local.restore({**arrays, "extras": extras}, step)
            self._local._keep.verified = None  # otherwise the node would keep this step for ever
            pieces = [(path, leaf) for path, leaf in leaves(like) if isinstance(leaf, Shard)]
            whole = leaves(state.get("arrays", {}))
            return tree(iter([*whole, *leaves(state["extras"]), *pieces]))

        try:
            return run_on_all(self._comm, f"restore of step {step} from the nodes", fill)
        except MpidistError as error:
            raise spoiled(error) from error

    def _forget(self) -> None:
        """Remove the copies on all nodes, because this run did not continue them. Collective."""
        # Only called by saves, which hold the lock of the shared folder.
        self._open(make=False)
        if self._local is not None:
            self._close_nodes((math.inf,))
            # Nodes that are not part of this job keep their copies. With the new identity, no run
            # uses these copies again.
            rotate = partial(node_copies.rotate_id, self.path)
            by_rank_0(self._comm, "new name for copies", rotate)

    def _close_nodes(self, newest: tuple[float, ...] | None) -> None:
        """Close the nodes' stores; remove copies up to `newest`, a (history, step). Collective."""
        if self._local is not None:
            local, self._local = self._local, None
            local.close()
            if self._node.rank == 0 and newest is not None:
                node_copies.remove_copies(local.path, newest)
