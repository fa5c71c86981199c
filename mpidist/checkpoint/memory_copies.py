"""Copies of the state in the memory of each node, from which a restarted job continues.

    step    100   105   110   115   120        checkpoint_every = 100, a copy at every 5th step
    disk    x
    memory  x     x     x     x     x          all ranks are killed in step 123: the next attempt
                                               begins with step 120, and not with step 100

A `TieredStore` makes the copies in a folder of /dev/shm. A node's copy has the arrays that are
complete on every rank. Of arrays that are divided among ranks, it has the parts of the node's own
ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError
from ..launch.free_memory import available_memory, remove_stale_copies
from ..runtime.topology import topology_of
from .control import report_no_copy, run_on_all
from .format.state import Shard, array_of, has_array, leaves
from .interval import SaveInterval
from .tiered import TieredStore

#: A node has at most two copies: the step that it keeps, and the next step while it is written.
COPIES = 2


def open_with_copies(
    comm, path, folder: Path | None, *, keep: int | None = 3, fresh: bool | str = False
) -> TieredStore:
    """Open the checkpoint store of a run that also keeps copies of its state in memory.

    Collective. The copies are in `folder`, a folder of /dev/shm on each node. Raises ConfigError if
    `folder` is None or not private to this user.
    """
    run_on_all(comm, "copies in memory", lambda: make_private(folder))
    return _CopiesStore(comm, path, keep, local=folder, local_keep=COPIES - 1, fresh=fresh)


class _CopiesStore(TieredStore):
    """A `TieredStore` whose `close` also removes its folder on each node, if no copy is left."""

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self.folder.rmdir()

    def _open(self, make: bool) -> None:
        if make and self._local is None:
            # The previous attempt may have removed the folder when it ended, while this attempt was
            # getting ready (`fault_tolerance.hand_over`).
            run_on_all(self._comm, "copies in memory", lambda: make_private(self.folder))
        super()._open(make)


def make_private(folder: Path | None) -> None:
    """Make a folder that no other user of the node can read or replace.

    The rank that creates the folder also removes copies of checkpoints that dead jobs have left
    beside it.
    """
    if folder is None:
        raise ConfigError(
            "folder is None: this job was not started by mpidist launch, which makes a folder for "
            "copies in memory; start it with mpidist launch, or pass a folder of the node"
        )
    folder = Path(folder)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        remove_stale_copies(folder.parent)
    facts = folder.lstat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o170077 != 0o040000:
        raise ConfigError(f"{folder} is not a private folder of this user; remove it")


class MemoryCopies:
    """Copies the state of a loop to the memory of the nodes, at intervals of `every`.

    `every` is a number of steps, a time such as "10m", or "auto 1h", which is the best interval for
    one failure an hour.
    """

    def __init__(self, store: TieredStore, every: int | str):
        self._store, self._interval = store, SaveInterval(every)
        self._fits: bool | None = None

    def begin(self, step: int) -> None:
        """Begin the loop at `step`; the steps until the next copy are counted from there."""
        self._interval.begin(step)

    def keep(self, comm, step: int, state: Callable[[], Mapping]) -> None:
        """Copy ``state()`` to the nodes' memory if a copy is due at `step`. Collective.

        If the nodes have too little memory, a message is printed once, and no copies are made.
        """
        if self._fits is False or not self._interval.due(step):
            return
        began, found = time.monotonic(), state()
        if self._fits is None:
            self._fits = fits_in_memory(comm, self._store.folder, found)
        self._fits = self._fits and self._store.hold(step, found)
        if self._fits:
            self._interval.saved(comm, step, time.monotonic() - began)
        else:
            self._store.stop_holding()


def fits_in_memory(comm, folder: Path, state: Mapping, copies: int = COPIES) -> bool:
    """Return whether all nodes have memory for `copies` copies of `state`; if not, print why.

    Collective over `comm`.
    """
    node = topology_of(comm).node

    def look() -> tuple[int, int, int, int]:
        pieces = whole = 0
        for _, leaf in leaves(state):
            if has_array(leaf):
                count = array_of(leaf).nbytes
                pieces, whole = (pieces + count, whole) if isinstance(leaf, Shard) else (
                    pieces, whole + count)  # fmt: skip
        free = os.statvfs(folder.parent)
        left = free.f_bavail * free.f_frsize
        known = available_memory()
        return node, pieces, whole, left if known is None else min(left, known)

    def compare(answers: list[tuple[int, int, int, int]]) -> str:
        for each in sorted({one[0] for one in answers}):
            _, pieces, whole, free = zip(*(one for one in answers if one[0] == each), strict=True)
            need = copies * (sum(pieces) + max(whole))
            if need > min(free):
                return f"{need} bytes are needed on node {each}, and {min(free)} are free"
        return ""

    text = run_on_all(comm, "copies in memory", look, compare)
    if text and comm.rank == 0:
        report_no_copy(f"copies in memory: {text}; the run goes on without them")
    return not text
