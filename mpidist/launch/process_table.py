"""Read from /proc which processes run, when they began, and which files of MPI they map."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: How the names of the shared-memory files of MPICH, and of UCX and Open MPI, begin. Other files in
#: /dev/shm may hold users' data.
MPICH_SEGMENT = "mpich_shm_"
SEGMENTS = (MPICH_SEGMENT, "ucx_shm_", "sm_segment.", "vader_segment.")


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
    """Return whether a process group has a process that is not a zombie."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError):
            if entry.name.isdigit():
                state, _, its_group = stat_of(entry.name)[:3]
                if int(its_group) == group and state not in "ZX":
                    return True
    return False


def state_and_birth(pid: int) -> tuple[str, int]:
    """Return the state letter of a process and its birth time; ("X", 0) if it is gone.

    The birth time is in clock ticks since the host was started.
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


def mpi_segments(pids: Iterable, prefixes: str | tuple[str, ...] = SEGMENTS) -> set[Path]:
    """Return the files in /dev/shm that the MPI library of these processes has mapped."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            found |= {Path(line.split()[-1]) for line in text.splitlines() if "/dev/shm/" in line}
    return {path for path in found if path.name.startswith(prefixes)}
