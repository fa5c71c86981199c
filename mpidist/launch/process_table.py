"""Read from /proc whether a process is running and when it began."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def stat_of(pid) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the name of the process."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rsplit(")", 1)[1].split()


def born(pid) -> str | None:
    """Return the time at which a process began, as text; pid and time identify the process."""
    try:
        return stat_of(pid)[19]
    except (OSError, IndexError):
        return None


def is_running(pid) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return stat_of(pid)[0] not in "ZX"
    except (OSError, IndexError):
        return False


def group_is_running(group: int) -> bool:
    """Return whether a process group has a process that is not a zombie.

    A zombie stays in its group until its parent has read its exit code, which can take seconds.
    """
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError):
            if entry.name.isdigit():
                state, _, its_group = stat_of(entry.name)[:3]
                if int(its_group) == group and state not in "ZX":
                    return True
    return False


def state_and_birth(pid: int) -> tuple[str, int]:
    """Return the state letter of a process and its birth time; ("X", 0) if it is gone.

    The birth time is in clock ticks since the host was started. The call makes only three system
    calls, because it is made often.
    """
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return "X", 0
    try:
        fields = os.read(file, 1024).rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError):
        return "X", 0
    finally:
        os.close(file)
