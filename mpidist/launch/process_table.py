"""Is that process still there, and still the same one? What /proc tells, without MPI."""

from __future__ import annotations

from pathlib import Path


def stat_of(pid) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may hold anything."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rsplit(")", 1)[1].split()


def born(pid) -> str | None:
    """Return when a process began: with its number this names it for ever."""
    try:
        return stat_of(pid)[19]
    except (OSError, IndexError):
        return None


def is_running(pid) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return stat_of(pid)[0] not in "ZX"
    except (OSError, IndexError):
        return False
