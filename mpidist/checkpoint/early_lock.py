"""Refuse a second job before it writes anything into the folder of a running job.

`CheckpointStore` takes its lock at the first save. A command that writes other files, too, looks at
the lock before it writes the first of them.
"""

from __future__ import annotations

import time

from ..errors import CheckpointError, StorageError
from .control import by_rank_0
from .storage import files
from .storage.lock import RunLock, holder

#: For how many seconds a lock may still be held, because the job before is just ending.
PATIENCE_SECONDS = 3.0
_PAUSE = 0.05


def why_refused(comm, path: str, lock: RunLock | None) -> str:
    """Return why this job must not save to the folder `path`, or "" if it may. Collective.

    If `lock` is given, rank 0 also takes it, so later jobs are refused. Without `lock`, rank 0 only
    looks whether another process holds the lock. A folder that cannot be written is no reason here:
    the first save reports it.
    """

    def look() -> str:
        end = time.monotonic() + PATIENCE_SECONDS
        while (text := _look(path, lock)) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return text

    return by_rank_0(comm, "the lock of the checkpoints", look)


def _look(path: str, lock: RunLock | None) -> str:
    if lock is None:
        who = holder(path)
        return who and f"{path} is in use by {who}"
    try:
        lock.prepare()
        with files.folder(path) as root:
            lock.take(root)
    except (OSError, StorageError):
        return ""
    except CheckpointError as error:
        return str(error).partition(";")[0]
    return ""
