"""The copy of a state that a job leaves in memory for its next start by `mpidist launch`.

The copy is a checkpoint in a folder of /dev/shm, so any number of ranks of its host can restore it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError, ConfigError, NoCheckpoint
from ..launch.heartbeat import IN_MEMORY, launched_by
from .control import by_rank_0, report_no_copy, run_on_all


def folder_of(memory: Path, path: str) -> Path:
    """Return the folder in which a job leaves a copy of its state for its next start.

    `memory` is a folder in /dev/shm, and `path` is the job's checkpoint store.
    """
    name = hashlib.sha256(f"{launched_by()} {path}".encode()).hexdigest()
    return memory / f"handed-{name[:16]}"


def save_copy(comm, memory: Path, path: str, step: int, state: Mapping) -> bool:
    """Save `state` in memory for the next start of the job. Collective.

    Returns whether the copy was made; if not, a printed line says why.
    """

    def prepare() -> tuple:
        # Imported here: most runs leave no copy for a next attempt. And inside `run_on_all`: if an
        # import fails on one rank, the other ranks must not wait for this rank.
        from .memory_copies import fits_in_memory, make_private
        from .store import CheckpointStore

        make_private(memory)
        return fits_in_memory, CheckpointStore

    folder = folder_of(memory, path)
    try:
        fits_in_memory, open_store = run_on_all(comm, "hand-over: folder", prepare)
        by_rank_0(comm, "hand-over: folder", lambda: remove_copy(memory, path))
        if not fits_in_memory(comm, folder, state, copies=1):
            return False
        with open_store(comm, folder, keep=1, direct=False) as store:
            store.save(step, state)
    except (CheckpointError, ConfigError) as error:  # raised on all ranks
        if comm.rank == 0:
            report_no_copy(f"copy in memory for the next attempt: {error}")
        return False
    return True


def restore_newest(comm, memory: Path | None, store, like: dict, handed: str) -> tuple[dict, bool]:
    """Return the newest state, and whether it is from a copy in memory, not from `store`.

    Collective. `handed` says where the program, which has now been started again, left the state
    when it ended: `IN_MEMORY` (in the memory of the host), `IN_STORE` (in the checkpoint store), or
    "" if unknown. Raises NoCheckpoint.
    """
    if memory is None or not hasattr(store, "let_go"):
        return store.restore(like)[1], False
    step = state = missing = None
    if handed != IN_MEMORY:
        try:
            step, state = store.restore(like)
        except NoCheckpoint as error:
            missing = error
    copy = restore_copy(comm, memory, store.path, like, step)
    if copy is not None:
        store.continue_newest()
        return copy[1], True
    if missing is not None:
        raise missing
    return store.restore(like)[1] if state is None else state, False


def restore_copy(comm, memory: Path, path: str, like: Mapping, newer_than: int | None):
    """Restore the state from the copy in memory, made before the job was restarted. Collective.

    Returns (step, state), and fills the arrays of `like` in place. Returns None if there is no good
    copy, or if its step is not above the step `newer_than`.
    """
    folder = folder_of(memory, path)
    there = run_on_all(comm, "hand-over: copy", lambda: any(folder.glob("step-*")), all)
    if not there:
        return None
    from .store import CheckpointStore  # cannot fail: the run has a store, so it is imported

    with CheckpointStore(comm, folder) as store:
        newest = store.latest_step()
        if newest is None or (newer_than is not None and newest <= newer_than):
            remove_copy(memory, path)
            return None
        try:
            return store.restore(like)
        except NoCheckpoint:  # the copy is damaged
            return None


def remove_copy(memory: Path, path: str) -> None:
    """Remove the copy of the state that an earlier start of the job left in memory, if any.

    Any ranks of the host may call this function.
    """
    shutil.rmtree(folder_of(memory, path), ignore_errors=True)
