"""End the whole job when one rank fails, and print the error once.

Without this module, a rank whose program raises an exception waits in MPI_Finalize for the other
ranks, which wait for this rank, and the job hangs. With `install_hook`, an exception on one rank
ends the whole job, even if the program runs as plain ``python program.py``:

    rank 0   Allreduce ................................| killed by the launcher
    rank 1   ValueError -> note to all -> 0.5 s -> traceback -> Abort(1)
    rank 2   ValueError -> note to all -> 0.5 s, note of rank 1 ..| silent, killed

A note is a message of one byte. If several ranks fail, the lowest of them prints its error. An
error that only reports another rank's exception is not printed if a rank that knows the cause has
failed, too. An exception in a process that a rank has forked ends only that process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import events
from ..errors import ConfigError, MpidistError, RankFailure
from ..launch import heartbeat
from ..launch.environment import has_ulfm
from ..launch.process_table import MPICH_SEGMENT
from .before_exit import (
    READ_BY,
    end_process,
    flush_streams,
    one_line,
    unlink_segments,
    wait_for_the_reader,
)
from .communicator import check_comm, translated_rank

#: HOLD_BACK: seconds that a failing rank waits for notes of lower ranks. LOOK: seconds that rank 0
#: waits for a note of a rank that already prints; MPI needs a few probes to find a message.
HOLD_BACK, LOOK = 0.5, 0.05

#: Seconds between the last output and MPI_Abort. MPICH's launcher stops forwarding output when it
#: receives the abort; without this pause, about one traceback in twenty was lost.
DRAIN = 0.15

#: LEAVE_TOGETHER: seconds that a rank leaving by ``sys.exit(nonzero)`` waits for the other ranks to
#: leave, too. LEAVE_FIRST: if several ranks leave so, the first leaves this many seconds earlier.
LEAVE_TOGETHER, LEAVE_FIRST = 5.0, 1.0

#: The `ulfm.Membership` of an elastic group. With ULFM, MPI_Abort of Open MPI ends only one rank.
elastic: Any = None

#: Functions that run on a rank that is about to end the job by its own error.
failing: list[Callable[[], None]] = []

_installed = False
_hook_before, _thread_hook_before, _original_exit = sys.excepthook, threading.excepthook, sys.exit
_exit_code = 0  # the code of the last sys.exit(...)
_may_fail = 0  # the code with which this process may exit without sys.exit
_child = False  # whether this process was forked by a rank
_ending = False  # whether the ranks of an elastic group end the job because of an error
_survives = False  # whether this process continues if ranks die, and leaves out MPI_Finalize
_exit_barrier = MPI.COMM_NULL  # a communicator of all ranks, for notes and the exit barrier
_unclaimed = [None]  # the thread that makes the exit barrier empties this list
_speaking = threading.Lock()


def install_hook(comm: MPI.Comm) -> None:
    """Make an uncaught exception on one rank end the job on all ranks. Collective over `comm`.

    A second call does nothing. A ``sys.excepthook`` that the program has installed before still
    prints the traceback. If `comm` has all ranks of the job, a ``sys.exit(nonzero)`` of one rank
    ends the job, too. A bare ``raise SystemExit`` does not end the job, because Python calls no
    hook for it.
    """
    hook(comm)
    if claim_exit_barrier(comm):
        set_exit_barrier(comm.Dup())


def hook(comm: MPI.Comm) -> None:
    """Do the work of `install_hook` on this process, without collective calls.

    An uncaught exception of this process then ends the whole job. Only one thread at a time may
    call this function.
    """
    global _installed, _hook_before, _thread_hook_before
    check_comm(comm)
    if not _installed:
        _installed = True
        _hook_before, _thread_hook_before = sys.excepthook, threading.excepthook
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread
        os.register_at_fork(after_in_child=_become_child)
        # `_leave` is registered first on every rank, because functions that are registered later
        # run earlier. If ranks ran them in different orders, they would wait for each other.
        atexit.register(_leave)
        if MPI.COMM_WORLD.size == 1:
            # Open MPI leaves a file of 16 MiB behind if a program is started without a launcher.
            atexit.register(unlink_segments)
    events.verbosity()  # raises if MPIDIST_VERBOSE is wrong; the hook then ends the job


def claim_exit_barrier(comm: MPI.Comm) -> bool:
    """Return whether the caller must set up the barrier at exit: ``set_exit_barrier(comm.Dup())``.

    The result is true only once in a process, for the first communicator that has all ranks.
    """
    world = MPI.COMM_WORLD.size
    if comm.size == world > 1 and not comm.Is_inter():
        with contextlib.suppress(IndexError):
            _unclaimed.pop()
            return True
    return False


def survive(comm: MPI.Comm) -> None:
    """At exit, skip MPI_Finalize, which might wait for a dead rank, and do a barrier on `comm`."""
    global _exit_barrier, _survives
    _unclaimed.clear()
    _exit_barrier, _survives = comm, True
    sys.exit = _recording_exit


def is_whole_job(comm: MPI.Comm) -> bool:
    """Return whether `comm` has all living ranks of the job."""
    return comm.size == (_exit_barrier if _survives else MPI.COMM_WORLD).size


def first_of_job(comm: MPI.Comm) -> int:
    """Return the rank in `comm` of the job's first process, or 0 if `comm` lacks that process."""
    return max(translated_rank(0, MPI.COMM_WORLD, comm), 0)  # MPI.UNDEFINED is negative


def set_exit_barrier(comm: MPI.Comm) -> None:
    """Use `comm`, which has all ranks of the job, for the barrier at exit."""
    global _exit_barrier
    _unclaimed.clear()
    _exit_barrier = comm
    sys.exit = _recording_exit
    # All ranks have left MPI_Init, where MPICH's ranks map their shared memory. So the name of the
    # shared-memory file is not needed any more. If the name were not removed, the file would stay
    # when the whole job is killed. Open MPI's ranks map each other's memory later, and its daemons
    # remove the files.
    unlink_segments(MPICH_SEGMENT)


# ------------------------------------------------------------------------------ forked processes


def _become_child() -> None:
    global _child, _exit_code
    _child, _exit_code = True, 0
    sys.exit = _recording_exit  # `_leave` needs the code


def is_child() -> bool:
    """Return whether this process was forked by a rank, and so is not a rank of the job."""
    return _child


def end_child(number: int) -> None:
    """If this process was forked by a rank, end it by signal `number`; otherwise do nothing."""
    if _child:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


# ---------------------------------------------------------------------------- uncaught exceptions


def _uncaught(kind, error, trace) -> None:
    global _exit_code
    show_traceback = partial(_hook_before, kind, error, trace)
    if _child or not _job_is_alive():
        _exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
        show_traceback()
    else:
        _end_job(error, show_traceback)


def _uncaught_in_thread(args) -> None:
    # SystemExit in a thread ends only this thread, as in any Python program.
    if args.exc_type is SystemExit or _child or not _job_is_alive():
        _thread_hook_before(args)
    else:
        _end_job(args.exc_value, partial(_thread_hook_before, args))


def _job_is_alive() -> bool:
    return MPI.Is_initialized() and not MPI.Is_finalized()


def _end_job(error: BaseException, show_traceback) -> None:
    global _exit_code
    # The whole job ends, so this is one of the few places that use COMM_WORLD.
    world, code = MPI.COMM_WORLD, exit_code(error)
    _exit_code = code
    # An exception of MPI usually means that another rank has ended or has made another call.
    if not (_is_secondary(error) or isinstance(error, MPI.Exception)):
        _announce()
    with _speaking:  # a second thread that fails waits here until the process has ended
        if elastic is not None:
            with contextlib.suppress(TimeoutError):
                world.Revoke()  # other ranks may be in calls of MPI on it
                if elastic.end_job(code, error):
                    _show(error, show_traceback)
                leave_with(code)
        silent = world.size > 1 and _others_speak(world.rank, error)
        # After a death, some ranks may wait in MPI for the dead rank, and never come here.
        together = getattr(error, "everywhere", False) and not isinstance(error, RankFailure)
        if has_ulfm() and together and _exit_barrier != MPI.COMM_NULL:
            # MPI_Abort would end only this rank. All ranks come here and keep their exit code.
            if not silent:
                _show(error, show_traceback)
            survive(_exit_barrier)
            leave_with(code)
        if silent:
            time.sleep(READ_BY + 10 * HOLD_BACK)  # the launcher ends this process meanwhile
            _abort(code)
        if isinstance(error, MpidistError) and error.quiet:
            # Another process of this launch prints the same error. The other process may be slower
            # than this one, and the launcher ends all processes when one process has failed.
            time.sleep(6 * HOLD_BACK)
        else:
            _show(error, show_traceback)
        flush_streams()
        if world.size > 1:
            _abort(code)
        elif code != 1 and threading.current_thread() is threading.main_thread():
            _leave_alone(code)


def _show(error: BaseException, show_traceback) -> None:
    if speaks_in_one_line(error):
        print(one_line(error), file=sys.stderr)
        return
    if MPI.COMM_WORLD.size > 1:
        print(f"mpidist: {this_rank()} failed and ends the job:", file=sys.stderr)
    show_traceback()


def _is_secondary(error: BaseException) -> bool:
    return isinstance(error, MpidistError) and error.secondary


def this_rank() -> str:
    """Return the number of this rank in the job and its host, such as ``rank 3 of 8 on n2``."""
    world = MPI.COMM_WORLD
    return f"rank {world.rank} of {world.size} on {socket.gethostname()}"


def _announce() -> None:
    for tell in failing:
        tell()


def _abort(code: int) -> None:
    unlink_segments()
    wait_for_the_reader()
    time.sleep(DRAIN)
    if has_ulfm():
        # MPI_Abort would end only this process, as if it had died.
        heartbeat.note_exit(code)
        with contextlib.suppress(OSError):
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(READ_BY)
    MPI.COMM_WORLD.Abort(code)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends because of the exception `error`."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, MpidistError) else 1


def speaks_in_one_line(error: BaseException) -> bool:
    """Return whether `error` needs no traceback: it reports bad input, or all ranks raise it."""
    if events.VERBOSITY >= 2 or not isinstance(error, MpidistError):
        return False
    return error.everywhere or error.exit_code == ConfigError.exit_code


def _others_speak(rank: int, error: BaseException) -> bool:
    """Tell all ranks that this rank has failed; return whether another rank prints its error."""
    secondary = _is_secondary(error)
    wait = 3 * HOLD_BACK if secondary else HOLD_BACK if rank else LOOK
    if _exit_barrier == MPI.COMM_NULL:
        time.sleep(wait + rank * 0.01)  # notes cannot be sent, so ranks print at different times
        return False
    # Ranks that already print have precedence over ranks that have only failed. Ranks that know the
    # cause have precedence over ranks that report another rank's exception.
    speaks, failed = (2, 3) if secondary else (0, 1)
    try:
        notes = send_notes(_exit_barrier, failed)
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
        MPI.Request.Testall([*notes, *send_notes(_exit_barrier, speaks)])
    except MPI.Exception:
        pass  # even if MPI cannot send notes any more, it may still be able to abort
    return False


def send_notes(comm: MPI.Comm, tag: int) -> list[MPI.Request]:
    """Send a note (one byte) to all other ranks of `comm`; return the requests. Not collective."""
    # MPI sends a message of one byte at once, even if the receiver never receives it.
    others = (other for other in range(comm.size) if other != comm.rank)
    return [comm.Isend([b"!", MPI.BYTE], other, tag=tag) for other in others]


def _leave_alone(code: int) -> None:
    """End a job of one rank with exit code `code`, without MPI_Abort, which prints a banner."""
    atexit._run_exitfuncs()
    if _job_is_alive():
        MPI.Finalize()
    flush_streams()
    os._exit(code)


# ------------------------------------------------------------------------------ sys.exit(nonzero)


def _recording_exit(status=None):
    global _exit_code, _may_fail
    _may_fail = 0
    # As in Python itself, None means code 0, a number is the code, and anything else is printed and
    # means code 1.
    _exit_code = 0 if status is None else status if isinstance(status, int) else 1
    _original_exit(status)


def asked_exit_code() -> int:
    """Return the code of the last ``sys.exit`` of this process, or 0."""
    return _exit_code


def likely_exit_code() -> int:
    """Return the exit code that this process, which is ending now, most likely has."""
    return (_exit_code or _may_fail) & 0xFF


def expect_failure(code: int) -> None:
    """Record that an exception may soon end all ranks with exit code `code`."""
    global _may_fail
    _may_fail = code


def _leave() -> None:
    """At exit, leave together with all ranks; end the job if this rank's exit code is nonzero."""
    if _child and _job_is_alive():
        # MPI_Finalize would run next. The exit handlers that the child has registered have run
        # already, because handlers that are registered later run earlier.
        flush_streams()
        os._exit(_exit_code & 0xFF)
    if _job_is_alive() and _exit_barrier != MPI.COMM_NULL:
        _meet_at_exit()
    code = likely_exit_code()
    heartbeat.note_exit(code)
    if _survives:
        end_process(code, now=_ending)


def _meet_at_exit() -> None:
    global _exit_barrier, _survives
    start = time.monotonic()
    fails = _exit_code or _may_fail
    mine = np.array([_exit_barrier.rank if fails else _exit_barrier.size])
    first = np.empty_like(mine)
    try:
        everyone = _exit_barrier.Iallreduce(mine, first, MPI.MIN)
        while not everyone.Test():
            waited = time.monotonic() - start
            if _exit_code and waited > LEAVE_TOGETHER:
                called = f"mpidist: {this_rank()} called sys.exit({_exit_code})"
                ago = f"{waited:.0f} s ago and other ranks go on; this rank ends the job"
                print(called, ago, file=sys.stderr)
                _announce()
                flush_streams()
                _abort(_exit_code)
            time.sleep(0.0002 if waited < 0.2 else 0.01)
        _exit_barrier.Free()
        if fails and first < mine:
            let_first_leave()
    except (MPI.Exception, RankFailure):
        # A rank has died. With ULFM, MPI_Finalize would wait for it.
        _survives = _survives or has_ulfm()
        if elastic is not None and not _ending and (text := elastic.agree_at_exit()):
            print(f"mpidist: {text}", file=sys.stderr)
    _exit_barrier = MPI.COMM_NULL


def leave_with(code: int) -> None:
    """End this process with exit code `code`, after a barrier with the other living ranks."""
    global _exit_code, _ending
    _exit_code, _ending = code, True
    flush_streams()
    wait_for_the_reader()
    _leave()


def let_first_leave() -> None:
    """Delay this rank's exit with a nonzero code, so that one other rank exits first.

    mpirun of Open MPI 5.0.11 may hang or crash when processes of several hosts exit with nonzero
    codes at the same moment. This function does nothing if all ranks are on one host, if the ranks
    were not started by mpirun of Open MPI, or if the barrier at exit is not yet over.
    """
    here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", 0))
    if _exit_barrier == MPI.COMM_NULL and 0 < here < MPI.COMM_WORLD.size:
        flush_streams()
        if not _survives:
            MPI.Finalize()  # waits for all ranks
        time.sleep(LEAVE_FIRST)
