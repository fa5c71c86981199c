"""The control group of a process: its memory limit, and its kills for lack of memory.

If memory is lacking, the OOM killer of Linux kills a process. A control group counts how many of
its processes were killed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

#: The names of the files with the memory limit and with the event counts, for control groups of
#: version 2 and of version 1.
_FILES = (("memory.max", "memory.events"), ("memory.limit_in_bytes", "memory.oom_control"))
#: If there is no limit, version 1 writes a number of bytes that no machine has: this number or
#: more.
_NO_LIMIT = 1 << 60


class ControlGroup(NamedTuple):
    """The memory control group of a process: its folder, and the topmost folder of all groups."""

    folder: Path
    top: Path

    def kills(self) -> int | None:
        """Return how many processes of the group the OOM killer has killed; None if unknown."""
        for _, events in _FILES:
            text = text_or_empty(self.folder / events)
            if found := re.search(r"^oom_kill (\d+)", text, re.MULTILINE):
                return int(found[1])
        return None

    def limit(self) -> int | None:
        """Return the memory limit of the group in bytes, or None if there is no limit."""
        files = [at / name for at in folders_up(self.folder, self.top) for name, _ in _FILES]
        texts = [text_or_empty(file).strip() for file in files]
        limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
        return min(limits, default=None)


def folders_up(folder: Path, top: Path) -> list[Path]:
    """Return a list of `folder` and its parents, up to and including `top`."""
    return [folder, *(one for one in folder.parents if top in (one, *one.parents))]


def group_of(pid: int | str = "self", root: Path = Path("/")) -> ControlGroup | None:
    """Return the memory control group of a process, or None if its files cannot be seen."""
    for line in text_or_empty(root / f"proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = top / path.strip("/")
        # In a container, /proc may have the path of the group on the host. The folder of the group
        # is then `top`.
        for place in (folder, top):
            if any((place / name).exists() for names in _FILES for name in names):
                return ControlGroup(place, top)
    return None


def peak_memory(pid: int | str = "self", root: Path = Path("/")) -> int:
    """Return the largest number of bytes of memory that a process has held; 0 if unknown."""
    text = text_or_empty(root / f"proc/{pid}/status")
    found = re.search(r"^VmHWM:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def text_or_empty(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
