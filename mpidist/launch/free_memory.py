"""The memory that a process may still allocate, and memory that dead jobs have not freed.

`mpidist launch` and its ranks keep copies of the training state in a folder of /dev/shm. If all of
them are killed, the copies stay there until a later job of the same user begins on the host.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from .control_groups import folders_up, text_or_empty
from .heartbeat import TOUCHED_EVERY, is_at_work

_CACHES = ("active", "inactive")

#: The beginning of the name of a folder for copies, and the file in it that names its launcher.
COPIES, OWNER = "mpidist-copies-", "owner"
#: If the launcher was on another host, a folder is stale after this many seconds without a change;
#: living ranks update its time.
STALE = 60 * TOUCHED_EVERY


def remove_stale_copies(memory: Path) -> None:
    """Remove the folders of this user's dead jobs in `memory`, such as /dev/shm."""
    for folder in memory.glob(f"{COPIES}*"):
        with suppress(OSError):
            facts, launcher = folder.lstat(), text_or_empty(folder / OWNER)
            if facts.st_uid == os.geteuid() and not folder.is_symlink():
                recent = time.time() - facts.st_mtime < STALE
                if not is_at_work(launcher, elsewhere=recent):
                    shutil.rmtree(folder, ignore_errors=True)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process may still allocate, or None if the number is unknown.

    The result is the available memory of the node, or the unused memory of the process's control
    groups (groups of processes with a memory limit) if that is less.
    """
    facts = [line.split() for line in text_or_empty(root / "proc/meminfo").splitlines()]
    limits = [int(words[1]) * 1024 for words in facts if words[:1] == ["MemAvailable:"]]
    for line in text_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            limits += _left(root / "sys/fs/cgroup/memory", path, *names)
    return max(0, min(limits)) if limits else None


def _left(base: Path, path: str, limit: str, usage: str) -> list[int]:
    """Return, for a control group and each of its parents, the memory limit minus the usage.

    Cached files count as free memory, because the kernel drops them when a process needs memory.
    """
    left = []
    for folder in folders_up(base / path.strip("/"), base):
        most, used = text_or_empty(folder / limit).strip(), text_or_empty(folder / usage)
        if most and used and most != "max":
            lines = text_or_empty(folder / "memory.stat").splitlines()
            stat = dict(line.split() for line in lines)
            # Version 1 has own and total numbers. Version 2 has only totals, under other names.
            files = (
                stat.get(f"total_{kind}_file", stat.get(f"{kind}_file", 0)) for kind in _CACHES
            )
            left.append(int(most) - int(used) + sum(map(int, files)))
    return left
