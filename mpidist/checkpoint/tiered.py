"""`TieredStore`: each step first into memory or a disk of every node, then into the shared folder.

    rank 0  rank 1 | rank 2  rank 3     LOCAL/ID, on each node: what its ranks hold, arrays whole
    LOCAL/ID       | LOCAL/ID           and each rank's pieces by its number; then
          PATH/step-...                 the shared folder, as `CheckpointStore` writes it

Two stores, one beside the other: a `CheckpointStore` of the ranks of a node, in a folder that only
they see, and the one of all ranks. A job that dies and comes back to its nodes goes on from the
newest step that all of them hold, which may be newer than any in the shared folder. Where a node
was lost, a copy is damaged or the ranks are others, it goes on from the shared folder, as if there
were no copies; and as what they hold is then of another history, its first save removes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from .. import events
from ..errors import ConfigError, MpidistError, NoCheckpoint, shown
from ..runtime.context import free
from ..runtime.topology import topology_of
from . import node_copies
from .arguments import path_of, steps_to_keep, which, yes_or_no
from .control import by_rank_0, call, run_on_all, same_on_all
from .format.state import Shard, leaves, tree
from .read.restore import spoiled
from .storage.steps import Entry
from .store import CheckpointStore, Store
from .write.save import Save


class TieredStore(Store):
    """Checkpoints in a folder of each node, copied to a shared one. Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    path : path-like
        The shared folder.
    keep, keep_every, writers, direct, sha256, fresh
        Of the shared folder, as in `CheckpointStore`.
    local : path-like
        Folder of a node: memory (``/dev/shm/...``) or a disk of its own. Ranks of one node that
        give different folders count as nodes of their own.
    local_keep : int
        How many steps a node keeps.

    Notes
    -----
    The methods are those of `CheckpointStore`. A node that cannot keep a copy is no error: that
    is said on stderr, and the step is saved in the shared folder alone.
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
        folders: list[Path] = []

        def check() -> dict:
            folders.append(Path(path_of("local", local)).absolute())
            if folders[0] == Path(path_of("path", path)).absolute():
                raise ConfigError(
                    f"local={shown(local)} is the shared folder; give one of the node"
                )
            return {"local_keep": steps_to_keep("local_keep", local_keep, or_none=False)}

        with call(comm, "TieredStore"):
            self._keep = same_on_all(comm, "TieredStore", check)["local_keep"]
            self._folder = folders[0]
            self.shared = CheckpointStore(
                comm, path, keep, keep_every=keep_every, writers=writers, direct=direct,
                sha256=sha256, fresh=fresh,
            )  # fmt: skip
            self.path = self.shared.path
            super().__init__(comm)
            here = (topology_of(comm).node, str(self._folder))
            places = run_on_all(comm, "TieredStore", lambda: here, lambda all: all)
            # All ranks are here: they have just agreed.
            self._node = comm.Split(places.index(here), comm.rank)
        self._local: CheckpointStore | None = None
        self._ours = False  # whether what the nodes hold is of the history that this run goes on

    def __repr__(self):
        local = f"local={str(self._folder)!r}, local_keep={self._keep}"
        return f"<TieredStore {self.path!r}: {local}, {self.shared._summary()}>"

    def save(self, step: int, state: Mapping) -> None:
        """Save `state` and return when all nodes hold it; it is then copied. Collective.

        Where a node cannot hold it, this returns when it is committed in the shared folder. What
        goes wrong there is raised by the next call, or by `wait`.
        """
        with events.span("tiers.save"), self._call("save"):
            copying = self.shared._begin(step, state, copy=True, alone=False)
            everywhere = self._hold(copying, state, CheckpointStore.save)
            copying.start()
            if not everywhere:
                self.shared.wait()

    def save_async(self, step: int, state: Mapping) -> None:
        """Copy what this rank writes, save it in the background to both. Collective."""
        with events.span("tiers.save_async"), self._call("save_async"):
            copying = self.shared._begin(step, state, copy=True, alone=False)
            self._hold(copying, state, CheckpointStore.save_async)
            copying.start()

    def restore(
        self,
        like: Mapping | None = None,
        step: int | None = None,
        *,
        history: int | None = None,
        verify: bool = True,
    ):
        """Return (step, state), from the nodes where all hold the newest step. Collective.

        As `CheckpointStore.restore`. Nodes are asked where `like` is given, and every rank has in
        it what it had at the save, on the same node, and no `history`. Each byte is checked on all
        nodes before any array is filled, also without `verify`: that is of the shared folder, and
        where a copy is damaged there is still that to go on from.
        """
        with self._call("restore"):
            self.wait()

            def check() -> dict:  # here, for the nodes are asked before the shared folder
                given = "none" if like is None else "a state"
                sure = yes_or_no("verify", verify)
                return {**which(step, history), "like": given, "verify": sure}

            def are_there() -> int:
                return int(node_copies.identity(self.path, make=False) is not None)

            given, there = same_on_all(self._comm, "restore", check, number=are_there)
            step, history = given["step"], given["history"]
            if there:
                self._open(make=False)
            if self._local is not None and like is not None and history is None:
                for of, number in self._common(like, step):
                    if self._tried(lambda: self._verify(number)):  # noqa: B023
                        state = self._from_nodes(like, number)
                        self._ours = True
                        self.shared._line.stand(Entry(of, number, 0))
                        events.emit("checkpoint_restored_from_nodes", step=number)
                        return number, state
            result = self.shared.restore(like, step, history=history, verify=given["verify"])
            self._ours = False
            return result

    def latest_step(self) -> int | None:
        """Return the newest step in the shared folder, or None. Collective."""
        return self.shared.latest_step()

    def all_steps(self, *, history: int | None = None) -> list[int]:
        """Return the steps of a history in the shared folder, ascending. Collective."""
        return self.shared.all_steps(history=history)

    def delete(self, step: int, *, history: int | None = None) -> None:
        """Do as `CheckpointStore.delete`; without `history` copies go as well. Collective."""
        with self._call("delete"):
            self.wait()
            given = same_on_all(self._comm, "delete", lambda: which(step, history, needed=True))
            self._open(make=False)
            local = self._local
            if local is not None and given["history"] is None:

                def remove() -> None:
                    with suppress(NoCheckpoint):
                        local.delete(given["step"])

                run_on_all(self._comm, "delete on the nodes", remove)
            self.shared.delete(**given)

    def verify(self, step: int | None = None) -> int:
        """Check every byte of a step in the shared folder. Collective."""
        return self.shared.verify(step)

    def wait(self) -> None:
        """Wait until what is being saved is in the shared folder as well. Collective."""
        with self._call("wait"):
            self._settle()
            self.shared.wait()

    def close(self) -> None:
        """Wait for the copy, then remove what the nodes hold, and free all. Collective.

        What is newer than the shared folder stays. A second call does nothing.
        """
        if self._closed:
            return
        newest = None
        with self._call("close"):
            try:
                self.wait()
                newest = self.shared._latest()
            finally:
                self.shared.close()
                if newest is None:
                    self._close_nodes()
                else:
                    self._close_nodes(partial(node_copies.remove, newest=newest[:2]))
                self._closed = True
                free(self._node)
                self._node.Free()

    def _abandon(self) -> None:
        """Leave without a word to the other ranks: an exception may be on this rank alone."""
        self.shared._abandon()
        if self._local is not None:
            self._local._abandon()
        self._closed = True

    # ---------------------------------------------------------------------------- on the nodes

    def _hold(self, copying: Save, state: Mapping, save: Callable) -> bool:
        """Save on every node what its ranks hold; whether all did. Collective.

        The name that the shared save has until it is committed is the mark by which copies on
        several nodes are known to be of one save.
        """
        doing, rank = f"copy of step {copying.step} on the nodes", self._comm.rank

        def begin() -> tuple[str, list]:
            problem = ""
            if self._local is not None:
                try:
                    self._local.wait()
                except MpidistError as error:
                    problem = f"copy on the nodes: rank {rank}: {error}"
            return problem, node_copies.extras(state)

        def told(answers: list[tuple[str, list]]) -> tuple[list, int]:
            problems, extras = zip(*answers, strict=True)
            if any(problems):
                _say(next(filter(None, problems)))
            return node_copies.union(extras), copying.history

        def work():
            if not self._ours:
                self._forget()
                self._ours = True
            self._open(make=True)
            extras, history = run_on_all(self._comm, doing, begin, told)
            size = self._comm.size
            mark = node_copies.copy_record(state, rank, copying.name, history, size)
            content = {
                **node_copies.arrays(state, rank),
                "extras": tree(iter(extras)),
                "mark": mark,
            }
            run_on_all(self._comm, doing, lambda: save(self._local, copying.step, content))

        return self._tried(work)

    def _settle(self) -> None:
        """Wait until the nodes hold what they are to hold, or cannot. Collective."""
        local = self._local
        if local is not None:
            self._tried(lambda: run_on_all(self._comm, "copy on the nodes", local.wait))

    def _tried(self, work: Callable[[], object]) -> bool:
        """Do `work`, collective over all ranks; what fails is said and no error. Collective.

        What a node does in it goes through `run_on_all`: its ranks know of each other only.
        """
        try:
            work()
        except MpidistError as error:
            if self._comm.rank == 0:
                _say(str(error))
            return False
        return True

    def _open(self, make: bool) -> None:
        """Open the nodes' stores, once the shared folder has an identity. Collective."""
        if self._local is None:
            look = partial(node_copies.identity, self.path, make)
            identity = by_rank_0(self._comm, "copies on the nodes", look)
            if identity is not None:
                self._local = CheckpointStore(self._node, self._folder / identity, keep=self._keep)
                # What a run has left is in the shared folder, and a node's memory is dear.
                self._local._keep.others = False

    def _common(self, like: Mapping, step: int | None) -> list[tuple[int, int]]:
        """Return what all nodes hold of one save, and is not older than the shared folder's newest.

        As (history, step), newest first; with `step`, what is of the newest history. Collective.
        """
        path, comm, line = self._local.path, self._comm, self.shared._line  # type: ignore[union-attr]
        fits = line.is_next if step is None else line.is_of

        def both(answers: list[dict[int, tuple[int, str]]]) -> list[tuple[int, int]]:
            same = set(answers[0].items()).intersection(*(one.items() for one in answers))
            copies = sorted(((history, number) for number, (history, _) in same), reverse=True)
            return [] if line.is_fresh() else [copy for copy in copies if fits(*copy)]

        def look() -> dict[int, tuple[int, str]]:
            return node_copies.usable_steps(path, step, like, comm.rank, comm.size)

        steps: list[tuple[int, int]] = []
        self._tried(lambda: steps.extend(run_on_all(comm, "copies on the nodes", look, both)))
        return steps

    def _verify(self, step: int) -> None:
        """Check every byte that the nodes hold of a step. Collective."""
        local = self._local
        assert local is not None
        run_on_all(self._comm, f"good copy of step {step} on the nodes", lambda: local.verify(step))

    def _from_nodes(self, like: Mapping, step: int) -> dict:
        """Fill the arrays of `like` from a step that is verified. Collective.

        What fails here is an error: arrays of other ranks are overwritten already.
        """
        local = self._local
        assert local is not None

        def fill() -> dict:
            extras = tree(iter(node_copies.extras(like)))
            _, state = local.restore(
                {**node_copies.arrays(like, self._comm.rank), "extras": extras}, step
            )
            local._keep.verified = None  # which stays for ever, beside what a node is to keep
            pieces = [(path, leaf) for path, leaf in leaves(like) if isinstance(leaf, Shard)]
            whole = leaves(state.get("arrays", {}))
            return tree(iter([*whole, *leaves(state["extras"]), *pieces]))

        try:
            return run_on_all(self._comm, f"restore of step {step} from the nodes", fill)
        except MpidistError as error:
            raise spoiled(error) from error

    def _forget(self) -> None:
        """Remove what the nodes hold: this run does not go on from it. Collective.

        Only before it saves, when it has the shared folder's lock: whoever restores may only look.
        """
        self._open(make=False)
        if self._local is not None:
            self._close_nodes(node_copies.remove)
            # Nodes that are not with us now keep theirs, under a name that is nobody's any more.
            rotate = partial(node_copies.rotate_id, self.path)
            by_rank_0(self._comm, "new name for copies", rotate)

    def _close_nodes(self, remove: Callable[[str], None] = lambda path: None) -> None:
        """Close the nodes' stores, then `remove` what is to go of their folders. Collective."""
        if self._local is not None:
            local, self._local = self._local, None
            local.close()
            if self._node.rank == 0:
                remove(local.path)


def _say(reason: str) -> None:
    """Say once that the nodes do not hold a copy; that is no error."""
    events.emit("checkpoint_not_held", reason=reason)
    print(f"mpidist: no {reason}", file=sys.stderr, flush=True)
