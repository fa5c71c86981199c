"""How much memory a process may still allocate on its host and in its control groups."""

from __future__ import annotations

from pathlib import Path

from .control_groups import folders_up, text_or_empty

_CACHES = ("active", "inactive")


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still allocate, or None if they are unknown.

    The result is the smaller of the node's available memory and the control groups' unused memory.
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

    The usage that the kernel reports includes cached files, which the kernel drops when a process
    needs memory. Cached files therefore count as free memory; otherwise a job that has read its
    data would have no memory left.
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
