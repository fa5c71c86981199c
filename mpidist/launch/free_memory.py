"""How much memory a process may still take: of its host, and of the control groups it is in."""

from __future__ import annotations

from pathlib import Path

_CACHES = ("active", "inactive")


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate; None where the system does not say.

    The smaller of the node's available memory and what the control groups leave.
    """
    limits = []
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
            limits += _left(root / "sys/fs/cgroup/memory", path, *names)
    return max(0, min(limits)) if limits else None


def _left(base: Path, path: str, limit: str, usage: str) -> list[int]:
    """Limit minus usage of a control group and of all its parents.

    Usage counts cached files, which the kernel drops when memory is asked for: a job that has
    read its data would seem to have nothing left.
    """
    left = []
    folder = base / path.strip("/")
    while True:
        most, used = _lines(folder / limit), _lines(folder / usage)
        if most and used and most[0] != "max":
            stat = dict(line.split() for line in _lines(folder / "memory.stat"))
            # The first version has own and total numbers; the second only totals, of other names.
            files = (
                stat.get(f"total_{kind}_file", stat.get(f"{kind}_file", 0)) for kind in _CACHES
            )
            left.append(int(most[0]) - int(used[0]) + sum(map(int, files)))
        if folder == base or base not in folder.parents:
            return left
        folder = folder.parent


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split("\n")[:-1]
    except OSError:
        return []
