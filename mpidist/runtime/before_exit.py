"""The last actions of a process that ends without the clean-up of MPI or of Python.

The process prints its error, removes the names of its shared-memory files, waits until the launcher
has read its output, and flushes its open files.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import os
import stat
import sys
import termios
import time
import traceback
from pathlib import Path

from mpi4py import MPI

#: The most seconds that a rank waits until a slow launcher has read its output.
READ_BY = 10.0

#: How the names of the shared-memory files of MPICH, UCX and Open MPI begin. Other files in
#: /dev/shm may hold users' data.
SEGMENTS = ("mpich_shm_", "ucx_shm_", "sm_segment.", "vader_segment.")


def unlink_segments(prefixes: tuple[str, ...] = SEGMENTS) -> None:
    """Remove the names of the shared-memory files that the MPI library of this process has made.

    A process calls this function before it may be killed, because MPICH leaves megabytes in
    /dev/shm when a job is aborted. The memory itself lives on in the processes that have mapped it.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for path in {Path(line.split()[-1]) for line in maps.splitlines() if "/dev/shm/" in line}:
        if path.name.startswith(prefixes):
            with contextlib.suppress(OSError):
                path.unlink()


def wait_for_the_reader(seconds: float = READ_BY) -> bool:
    """Wait until the launcher has read the output of this process; return whether it has."""
    deadline = time.monotonic() + seconds
    while (unread := any(map(_unread, (1, 2)))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not unread


def _unread(descriptor: int) -> int:
    """Return how many bytes of an output pipe the launcher has not read yet."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            count = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
            return int.from_bytes(count, sys.byteorder)
    return 0


def flush_files() -> None:
    """Flush all open files of this process, as Python does when it ends."""
    # Text files come first, because they write into binary files.
    for kind in (io.TextIOBase, io.BufferedIOBase):
        for each in gc.get_objects():
            if isinstance(each, kind):
                # A file may be closed, read-only or broken.
                with contextlib.suppress(Exception):
                    each.flush()


#: The state of Open MPI after MPI_Finalize, in its `ompi_mpi_state`.
_FINALIZED = 5


def one_line(error: BaseException) -> str:
    """Return the text of `error` in one line, with the line number in the user's program."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "mpidist":
            # The user of an mpidist command has written a job file, not the line that called here.
            where = "" if module.startswith("mpidist.cli") else where
            break
        where = f" ({Path(frame.f_code.co_filename).name}:{line})"
    return f"mpidist: error: {' '.join(str(error).split())}{where}"


def end_process(code: int, *, now: bool) -> None:
    """At exit, end this process without MPI_Finalize, which may never return after a death.

    Python itself goes on to end the process, and knows the exit code of a ``raise SystemExit(4)``.
    If that cannot be, or if it must be `now`, the process ends here with exit code `code`.
    """
    if now or not _leave_out_finalize():
        flush_files()
        os._exit(code)


def _leave_out_finalize() -> bool:
    """Make Python's own end of this process leave out MPI_Finalize; return whether that works."""
    try:
        # mpi4py does not finalise an MPI that says it has been finalised.
        ctypes.c_int32.in_dll(ctypes.CDLL(MPI.__file__), "ompi_mpi_state").value = _FINALIZED
        # The C library calls _exit(code) before the exit functions of MPI's libraries.
        libc = ctypes.CDLL(None)
        libc.fflush(None)  # what libraries in C have written
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    except (OSError, ValueError, AttributeError):  # another MPI, or another C library
        return False
    return MPI.Is_finalized()


def flush_streams() -> None:
    """Write what stdout and stderr still hold in memory."""
    for stream in (sys.stdout, sys.stderr):
        # A stream that is closed or missing has nothing to flush.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
