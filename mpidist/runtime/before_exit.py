"""The last actions of a process that ends without the clean-up of MPI or of Python."""

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

from ..launch.process_table import SEGMENTS, mpi_segments

#: A rank waits at most this many seconds until a slow launcher has read its output.
READ_BY = 10.0


def unlink_segments(prefixes: str | tuple[str, ...] = SEGMENTS) -> None:
    """Remove the names of the shared-memory files that the MPI library of this process has made.

    The names begin with `prefixes`.
    """
    for path in mpi_segments(["self"], prefixes):
        with contextlib.suppress(OSError):
            path.unlink()


def wait_for_the_reader(seconds: float = READ_BY) -> bool:
    """Wait at most `seconds` until the launcher has read all output; return whether it has."""
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


#: The value of Open MPI's variable `ompi_mpi_state` after MPI_Finalize.
_FINALIZED = 5


def one_line(error: BaseException) -> str:
    """Return the text of `error` in one line, with the line number in the user's program."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "mpidist":
            # The user of an mpidist command has written a job file, and not the Python line that
            # has called mpidist.
            where = "" if module.startswith("mpidist.cli") else where
            break
        where = f" ({Path(frame.f_code.co_filename).name}:{line})"
    return f"mpidist: error: {' '.join(str(error).split())}{where}"


def end_process(code: int, *, now: bool) -> None:
    """At exit, end this process without MPI_Finalize, which may never return after a death.

    If `now` is true, the process ends in this function, with exit code `code`. If `now` is false,
    the function arranges that Python leaves out MPI_Finalize when it ends the process, and returns.
    If this is impossible, the process ends in this function, too.
    """
    if now or not _leave_out_finalize():
        flush_files()
        os._exit(code)


def _leave_out_finalize() -> bool:
    """Make sure that Python ends this process without MPI_Finalize; return whether that works."""
    try:
        # If MPI says that it has been finalised, mpi4py does not finalise it again.
        ctypes.c_int32.in_dll(ctypes.CDLL(MPI.__file__), "ompi_mpi_state").value = _FINALIZED
        # The C library calls _exit(code) before the exit functions of MPI's libraries.
        libc = ctypes.CDLL(None)
        libc.fflush(None)  # write the output of libraries in C that is still in memory
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    except (OSError, ValueError, AttributeError):  # another MPI, or another C library
        return False
    return MPI.Is_finalized()


def flush_streams() -> None:
    """Write the output of stdout and stderr that is still in memory."""
    for stream in (sys.stdout, sys.stderr):
        # A stream that is closed or missing has nothing to flush.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
