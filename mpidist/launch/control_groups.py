"""The control group that holds a process: its limit of memory, and whom the kernel killed for it.

Version 2 counts in ``memory.events`` (also for the groups below), version 1 in
``memory.oom_control``; both are read by whoever may see the group's folder. No MPI here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

#: File of the limit and file of the events: version 2, then version 1.
_FILES = (("memory.max", "memory.events"), ("memory.limit_in_bytes", "memory.oom_control"))
#: Version 1 writes "no limit" as a number that no machine has.
_NO_LIMIT = 1 << 60


class ControlGroup(NamedTuple):
    """The memory control group of a process: its folder, and the top of the tree it is in."""

    folder: Path
    top: Path

    def kills(self) -> int | None:
        """How many of its processes the kernel has killed; None if that is not counted."""
        for _, events in _FILES:
            found = re.search(r"^oom_kill (\d+)", _text(self.folder / events), re.MULTILINE)
            if found:
                return int(found[1])
        return None

    def limit(self) -> int | None:
        """Bytes that it and the groups above it allow; None for no limit."""
        limits = []
        folder = self.folder
        while True:
            for name, _ in _FILES:
                said = _text(folder / name).strip()
                if said.isdigit() and int(said) < _NO_LIMIT:
                    limits.append(int(said))
            if folder == self.top or self.top not in folder.parents:
                return min(limits, default=None)
            folder = folder.parent


def group_of(pid: int | str = "self", root: Path = Path("/")) -> ControlGroup | None:
    """Return the memory control group of a process, or None if none is visible."""
    for line in _text(root / f"proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = top / path.strip("/")
        # In a container the path may be that of the host, and the folder seen as the top.
        for place in (folder, top):
            if any((place / name).exists() for names in _FILES for name in names):
                return ControlGroup(place, top)
    return None


def peak_memory(pid: int | str = "self", root: Path = Path("/")) -> int:
    """Return the most bytes of memory that a process has held at once; 0 if unknown."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", _text(root / f"proc/{pid}/status"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
