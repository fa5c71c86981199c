"""A failure of one rank ends the job and is reported once.

Left alone, a rank whose Python program raises goes to MPI_Finalize and waits there for ranks that
wait for it: the job hangs with the traceback lost among hours of silence. `install_hook` makes
plain ``python program.py`` end the whole job instead:

    rank 0   Allreduce ................................| killed by the launcher
    rank 1   ValueError -> note to all -> 0.5 s -> traceback -> Abort(1)
    rank 2   ValueError -> note to all -> 0.5 s, hears of rank 1 .| silent, killed

Of several ranks that fail alike the lowest speaks: each tells all others that it failed, and
keeps silent when it hears of a lower one while it waits. Who speaks tells that as well, and ranks
that fail later keep silent, however low. An error that only reports another rank's exception gives
way to every rank that knows the cause.

A process that a rank has forked is no rank: whatever it raises or asks for ends that process only,
and it leaves MPI alone, whose MPI_Finalize would wait for ever in it, or take its parent along.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from mpi4py import MPI

from .. import events
from ..errors import ConfigError, MpidistError
from .communicator import check_comm

#: Seconds in which a failing rank listens for lower ranks that failed as well, and rank 0 for one
#: that speaks already: MPI needs a few looks before it shows a message.
HOLD_BACK, LOOK = 0.5, 0.05

#: Seconds between the last word and MPI_Abort: MPICH's launcher stops forwarding output when it
#: hears of the abort, and about one traceback in twenty was lost without this pause. A launcher
#: that is held up itself is waited for until it has read what was said, so many seconds.
DRAIN, READ_BY = 0.15, 10.0

#: Seconds that a rank leaving by ``sys.exit(nonzero)`` waits for the others to leave as well.
LEAVE_TOGETHER = 5.0

#: Called on a rank that is about to end the job by an error of its own.
failing: list[Callable[[], None]] = []

_installed = False
_hook_before, _thread_hook_before, _original_exit = sys.excepthook, threading.excepthook, sys.exit
_exit_code = 0  # what the last sys.exit(...) asked for
_child = False  # forked by a rank
_exit_barrier = MPI.COMM_NULL  # where the ranks of the job tell each other that they leave
_unclaimed = [None]  # empty when somebody makes that; popped in one step, whatever the thread
_speaking = threading.Lock()

#: How MPICH, UCX and Open MPI name their shared memory; other files there may hold users' data.
_SEGMENTS = ("mpich_shm_", "ucx_shm_", "sm_segment.", "vader_segment.")


def install_hook(comm: MPI.Comm) -> None:
    """Let an uncaught exception on one rank end the job on all ranks. Collective over `comm`.

    Does nothing the second time. Hooks that were installed before ours still print the traceback,
    and all of the work where the job has one rank only. With a `comm` of all ranks, a lone
    ``sys.exit(nonzero)`` is noticed too; a bare ``raise SystemExit`` is not (Python tells nobody).
    """
    hook(comm)
    if claim_exit_barrier(comm):
        set_exit_barrier(comm.Dup())


def hook(comm: MPI.Comm) -> None:
    """Do the part of `install_hook` that needs no other rank. One thread at a time."""
    global _installed, _hook_before, _thread_hook_before
    check_comm(comm)
    if not _installed:
        _installed = True
        _hook_before, _thread_hook_before = sys.excepthook, threading.excepthook
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread
        os.register_at_fork(after_in_child=_become_child)
        # Now, on every rank before anything else is registered: what is registered later runs
        # earlier, and ranks that leave in different orders would wait for each other.
        atexit.register(_leave)
        if MPI.COMM_WORLD.size == 1:
            # Open MPI leaves 16 MiB behind every program that was started without a launcher.
            atexit.register(unlink_segments)
    events.verbosity()  # raises where the hook ends the job


def claim_exit_barrier(comm: MPI.Comm) -> bool:
    """Whether the job's exit barrier, of which there is one, is to be made of `comm`.

    True once, for one that has all ranks. Where threads make contexts in orders of their own, the
    answer of one process must count for all of them.
    """
    world = MPI.COMM_WORLD.size
    if comm.size == world > 1 and not comm.Is_inter():
        with contextlib.suppress(IndexError):
            _unclaimed.pop()
            return True
    return False


def first_of_job(comm: MPI.Comm) -> int:
    """Return the rank of the job's first process; 0 where it is not in `comm`."""
    mine, everyone = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    (rank,) = everyone.Translate_ranks([0], mine)
    mine.Free()
    everyone.Free()
    return max(rank, 0)  # MPI.UNDEFINED is negative


def set_exit_barrier(comm: MPI.Comm) -> None:
    """Leave by `comm`, a duplicate that all ranks have made."""
    global _exit_barrier
    _unclaimed.clear()
    _exit_barrier = comm
    sys.exit = _recording_exit
    # By now all ranks have left MPI_Init, where MPICH's ranks map their common memory. Its name is
    # of no use from then on, and would outlive a job that is killed as a whole. Open MPI's ranks
    # map each other's later, and its daemons clean up.
    unlink_segments(_SEGMENTS[:1])


# ------------------------------------------------------------------------------ forked processes


def _become_child() -> None:
    global _child, _exit_code
    _child, _exit_code = True, 0
    sys.exit = _recording_exit  # for `_leave_child`


def is_child() -> bool:
    """Whether this process was forked by a rank, and so has no part in its job."""
    return _child


def end_child(number: int) -> None:
    """End a forked process that got this signal; nothing in a rank, which has a loop to leave."""
    if _child:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _leave_child() -> None:
    """End a forked process without what would run after Python's own end: MPI_Finalize.

    What it has registered to run at exit has run: handlers run last in, first out.
    """
    _flush()
    os._exit(_exit_code & 0xFF)


# ---------------------------------------------------------------------------- uncaught exceptions


def _uncaught(kind, error, trace) -> None:
    global _exit_code
    if _child or not _job_is_alive():
        _exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
        _hook_before(kind, error, trace)
        return
    _end_job(error, lambda: _hook_before(kind, error, trace))


def _uncaught_in_thread(args) -> None:
    # SystemExit in a thread ends that thread and nothing else: that is Python's own meaning of it.
    if args.exc_type is SystemExit or _child or not _job_is_alive():
        _thread_hook_before(args)
        return
    _end_job(args.exc_value, lambda: _thread_hook_before(args))


def _job_is_alive() -> bool:
    return MPI.Is_initialized() and not MPI.Is_finalized()


def _end_job(error: BaseException, show_traceback) -> None:
    # The job is what ends, so this is one of the few places where the world is meant.
    world = MPI.COMM_WORLD
    code = exit_code(error)
    # What MPI raises is mostly that another rank is gone, or does something else.
    secondary = isinstance(error, MpidistError) and error.secondary
    if not (secondary or isinstance(error, MPI.Exception)):
        _announce()
    with _speaking:  # a second thread that fails waits here until the process is gone
        if world.size > 1 and _others_speak(world.rank, error):
            time.sleep(READ_BY + 10 * HOLD_BACK)  # the launcher ends us in the midst of this
            _abort(code)
        if isinstance(error, MpidistError) and error.quiet:
            # Another process of this launch says the same. It may be slower than this one, and
            # the launcher ends all of them when one has failed.
            time.sleep(6 * HOLD_BACK)
        elif speaks_in_one_line(error):
            print(one_line(error), file=sys.stderr)
        else:
            if world.size > 1:
                host = socket.gethostname()
                who = f"rank {world.rank} of {world.size} on {host}"
                print(f"mpidist: {who} failed and ends the job:", file=sys.stderr)
            show_traceback()
        _flush()
        if world.size > 1:
            _abort(code)
        elif code != 1 and threading.current_thread() is threading.main_thread():
            _leave_alone(code)


def _announce() -> None:
    for tell in failing:
        tell()


def unlink_segments(prefixes: tuple[str, ...] = _SEGMENTS) -> None:
    """Remove the names of the shared memory that the MPI library of this process has made.

    For a process that may be killed, or is about to be: MPICH leaves megabytes in /dev/shm behind
    a job that was aborted. The memory itself stays with whoever has it mapped.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for path in {Path(line.split()[-1]) for line in maps.splitlines() if "/dev/shm/" in line}:
        if path.name.startswith(prefixes):
            with contextlib.suppress(OSError):
                path.unlink()


def _abort(code: int) -> None:
    unlink_segments()
    wait_for_the_reader()
    time.sleep(DRAIN)
    MPI.COMM_WORLD.Abort(code)


def wait_for_the_reader(seconds: float = READ_BY) -> bool:
    """Wait up to so long until the launcher has read this process's output; whether it has."""
    deadline = time.monotonic() + seconds
    while (unread := any(map(_unread, (1, 2)))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not unread


def _unread(descriptor: int) -> int:
    """Return the bytes that a launcher has not taken yet from the pipe of an output."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        count = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(count, sys.byteorder)


def exit_code(error: BaseException) -> int:
    """Return the exit code that `error` stands for."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, MpidistError) else 1


def speaks_in_one_line(error: BaseException) -> bool:
    """Whether `error` is printed without a traceback: bad input, or raised on all ranks."""
    if events.VERBOSITY >= 2 or not isinstance(error, MpidistError):
        return False
    return error.everywhere or error.exit_code == ConfigError.exit_code


def one_line(error: BaseException) -> str:
    """Return the line that stands for `error`, with the line of the user's program."""
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] == "mpidist":
            # In a command of ours the user wrote a job file, not the line that called it.
            where = "" if module.startswith("mpidist.cli") else where
            break
        where = f" ({Path(frame.f_code.co_filename).name}:{line})"
    return f"mpidist: error: {' '.join(str(error).split())}{where}"


def _others_speak(rank: int, error: BaseException) -> bool:
    """Tell all ranks that this one failed; whether one that goes before it failed too.

    Where none did this one speaks, and tells that too.
    """
    secondary = isinstance(error, MpidistError) and error.secondary
    wait = 3 * HOLD_BACK if secondary else HOLD_BACK if rank else LOOK
    if _exit_barrier == MPI.COMM_NULL:
        time.sleep(wait + rank * 0.01)  # no channel to ask: different moments are the next best
        return False
    # Who speaks goes before all that only failed, one that knows the cause before all others.
    speaks, failed = (2, 3) if secondary else (0, 1)
    try:
        notes = _tell_all(failed)
        deadline = time.monotonic() + wait
        status = MPI.Status()
        while True:
            while _exit_barrier.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                if (status.tag, status.source) < (failed, rank):
                    return True
                _exit_barrier.Recv([bytearray(1), MPI.BYTE], status.source, status.tag)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        MPI.Request.Testall([*notes, *_tell_all(speaks)])
    except MPI.Exception:
        pass  # an MPI that is beyond notes may still be able to abort
    return False


def _tell_all(tag: int) -> list[MPI.Request]:
    # One byte goes out at once, whether or not its receiver ever looks for it.
    others = (other for other in range(_exit_barrier.size) if other != _exit_barrier.rank)
    return [_exit_barrier.Isend([b"!", MPI.BYTE], other, tag=tag) for other in others]


def _leave_alone(code: int) -> None:
    """End a job of one rank with `code`: an excepthook cannot set it, so Python is not returned to.

    With nobody to wait for, MPI is finalised and not aborted, which would print a banner.
    """
    atexit._run_exitfuncs()
    if _job_is_alive():
        MPI.Finalize()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, or never there: nothing to save


# ------------------------------------------------------------------------------ sys.exit(nonzero)


def _recording_exit(status=None):
    global _exit_code
    # Python's own rule: None is 0, a number is itself, anything else is printed and means 1.
    _exit_code = 0 if status is None else status if isinstance(status, int) else 1
    _original_exit(status)


def asked_exit_code() -> int:
    """Return what the last ``sys.exit`` of this process asked for; 0 before any."""
    return _exit_code


def _leave() -> None:
    """At exit: leave together, or, with a nonzero code, end the job that the others still run.

    With code 0 there is no deadline: a rank may write for an hour while the rest are done, and
    MPI_Finalize would wait for it as well, only hotter.
    """
    global _exit_barrier
    if _child and _job_is_alive():
        _leave_child()
    if not _job_is_alive() or _exit_barrier == MPI.COMM_NULL:
        return
    start = time.monotonic()
    try:
        everyone = _exit_barrier.Ibarrier()
        while not everyone.Test():
            waited = time.monotonic() - start
            if _exit_code and waited > LEAVE_TOGETHER:
                _leave_by_force(waited)
            time.sleep(0.0002 if waited < 0.2 else 0.01)
        _exit_barrier.Free()
    except MPI.Exception:
        pass  # a rank died: whoever noticed ends the job, there is nobody to say goodbye to
    _exit_barrier = MPI.COMM_NULL


def _leave_by_force(waited: float) -> None:
    world = MPI.COMM_WORLD
    print(
        f"mpidist: rank {world.rank} of {world.size} on {socket.gethostname()} called "
        f"sys.exit({_exit_code}) {waited:.0f} s ago and other ranks go on; it ends the job",
        file=sys.stderr,
    )
    _announce()
    _flush()
    _abort(_exit_code)
