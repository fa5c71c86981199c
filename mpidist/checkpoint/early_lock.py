"""Refuse a second job before it writes anything into the folder of a running job.

`mpidist train` looks at the lock of the checkpoints before it writes its first file.
"""

from __future__ import annotations

import time

from .control import by_rank_0
from .storage.lock import holder

#: For how many seconds a lock may still be held, because the job before is just ending.
PATIENCE_SECONDS = 3.0
_PAUSE = 0.05


def why_refused(comm, path: str) -> str:
    """Return why this job must not save to the folder `path`, or "" if it may. Collective."""

    # The lock is not taken here. On a file system that does not share locks between hosts, this job
    # would take the lock of a running job, which would then stop at its next save.
    def look() -> str:
        end = time.monotonic() + PATIENCE_SECONDS
        while (who := holder(path)) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return who and f"{path} is in use by {who}"

    return by_rank_0(comm, "the lock of the checkpoints", look)
