"""Find hangs of a job: report the suspect ranks and the code line of each rank, end the job.

A thread in each rank looks at the rank's main thread at least ten times within `seconds`, the time
limit of `watch`. It writes the state of the main thread to a file that all ranks read. These are
the states:

    moving    it runs Python code and makes progress
    blocked   it has not returned to Python from a native call, usually an MPI call that waits
    waiting   it polls in one and the same wait of mpidist
    looping   it runs Python code, but is always at the same instruction with the same values

The job counts as hung in two cases: a rank has written no state for `seconds`, or no rank has made
progress for `seconds` while at least one rank is `blocked` or `waiting`. Set `seconds` to more than
the longest native call that all ranks make at the same time, because such a call looks like a hang.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
from mpi4py import MPI

from .. import events
from ..errors import ConfigError, shown
from ..launch.process_table import born, stat_of
from ..runtime import polling
from ..runtime.agreement.run_on_all import run_on_all, same_on_all
from ..runtime.before_exit import unlink_segments, wait_for_the_reader
from ..runtime.status_board import Board
from . import hang_dump
from .hang import Hang, Seen, hang_report, judge

#: The exit code of a job that has hung.
HANG = 70

_WAIT = polling.wait_until.__code__
_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
#: The watches of this process that have not been stopped.
active: list[Watch] = []
_callbacks: list = []  # never freed: the interpreter may still call one


def watch(
    comm,
    seconds: float = 60,
    *,
    directory: str | os.PathLike | None = None,
    dumps: str | os.PathLike | None = None,
) -> Watch:
    """Watch this job from now on; report a hang with its ranks, and end the job with exit code 70.

    Collective over `comm`. Afterwards a thread of each rank watches the job without MPI calls. Call
    ``md.watch(comm)`` in any mpi4py program, or use the result as a context manager.

    Parameters
    ----------
    comm : MPI.Intracomm
    seconds : float
        The job counts as hung if no rank makes progress for this number of seconds. All ranks pass
        the same `seconds`.
    directory : path, optional
        A folder that all hosts share, by default the current folder. If one rank passes a folder,
        all ranks must.
    dumps : path, optional
        A folder in which each rank writes ``hang-RANK.json`` at a hang: its newest 256 operations
        on each communicator, its newest events, and the stacks of its threads.
    """
    same_on_all(comm, "watch", lambda: _settings(seconds, dumps))
    return Watch(comm, seconds, directory, dumps)


class Watch:
    """The object that `watch` returns. Watching ends at `stop` or when the ``with`` block ends."""

    def __init__(self, comm, seconds: float, directory, dumps):
        self.seconds = float(seconds)
        self.dumps = None if dumps is None else Path(dumps).absolute()
        self.rank, self.size = comm.rank, comm.size
        self.interval = min(1.0, self.seconds / 10)
        self._board = Board(comm, directory)
        self._me = MainThread()
        self._beat = 0
        self._left = False
        self._identity = {"host": socket.gethostname(), "pid": os.getpid(), "born": born("self")}
        self._peers = [Seen(rank) for rank in range(self.size)]
        self._stop = threading.Event()
        # After this call of `run_on_all`, the records of all ranks are on the board.
        run_on_all(comm, "watch: beginning", self._publish)
        self._thread = threading.Thread(target=self._run, name="mpidist-watch", daemon=True)
        self._thread.start()
        active.append(self)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop watching; tell other ranks that this rank has left. A second call does nothing."""
        # A process that this rank has forked is not a rank.
        if self._left or os.getpid() != self._identity["pid"]:
            return
        self._left = True
        active.remove(self)
        self._stop.set()
        self._thread.join()
        atexit.unregister(self.stop)
        with contextlib.suppress(OSError):
            self._publish()
            gone = all(record and record["left"] for record in self._board.read())
            self._board.close(last=gone)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc) -> None:
        self.stop()

    # ------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self.interval):
            now = time.monotonic()
            # A batch system may stop the whole job for a while and then continue it. After such a
            # pause, all times are measured from now on.
            if now - last > max(self.seconds / 2, 5 * self.interval):
                self._me.moved = now
                for peer in self._peers:
                    peer.forget(now)
            last = now
            self._me.look(now)
            try:
                self._publish()
                records = self._board.read()
            except OSError:
                continue  # the file system may be unavailable for a moment
            for peer, record in zip(self._peers, records, strict=True):
                peer.update(record, now)
            hang = self._told(records) or judge(self._peers, self.seconds, now)
            if hang is not None and not self._stop.is_set():
                self._end(hang, now)

    def _publish(self, verdict: Hang | None = None) -> None:
        self._beat += 1
        event = ""
        if events.recent:
            _, kind, details = events.recent[-1]
            event = " ".join([kind, *(f"{key}={value}" for key, value in details.items())])
        record = {
            **self._identity,
            "beat": self._beat,
            "left": self._left,
            "state": self._me.state,
            "still": round(time.monotonic() - self._me.moved, 2),
            "hang": verdict,
            "where": self._me.where[:300],
            "event": event[:200],
        }
        self._board.write(record)

    def _told(self, records) -> Hang | None:
        """Return the hang that another rank has already found and published, or None."""
        return next((Hang(*one["hang"]) for one in records if one and one["hang"]), None)

    def _end(self, hang: Hang, now: float) -> None:
        """Report the hang and end this process."""
        with contextlib.suppress(OSError):
            self._publish(hang)
        living = [p.rank for p in self._peers if p.rank not in hang.absent and not p.left]
        # The lowest living rank reports the hang. A rank that the other ranks consider absent
        # reports nothing.
        if living and self.rank == living[0]:
            _write(hang_report(self._peers, hang, self.seconds, now, self._condition))
        _write(self._stack())
        self._dump(hang)
        # While this rank sleeps, the other ranks read on the status board that the job hangs, and
        # end, too.
        time.sleep(1.5 * self.interval + 0.2)
        if self.rank in [rank for rank in living if self._here(self._peers[rank])][:1]:
            self._kill_absent(hang)
        self._board.close(last=True)
        self._leave(by_abort=self.rank in living[:1])

    def _dump(self, hang: Hang) -> None:
        if self.dumps is None:
            return
        about = {**hang._asdict(), "state": self._me.state, "where": self._me.where}
        try:
            hang_dump.write(self.dumps, self.rank, host=self._identity["host"], **about)
        except OSError as error:
            _write(f"mpidist: watch: rank {self.rank} could not write its dump: {error}\n")

    def _leave(self, *, by_abort: bool) -> None:
        """End this process. With `by_abort`, first call MPI_Abort, which ends the whole job."""
        unlink_segments()
        wait_for_the_reader()
        # Without MPI_Abort, the launcher of MPICH kills all ranks and reports the signal of the
        # kill. The alarm ends this process if MPI_Abort blocks.
        if by_abort:
            signal.alarm(10)
            MPI.COMM_WORLD.Abort(HANG)  # ends the whole job; `comm` may have been freed
        time.sleep(1)
        os._exit(HANG)

    def _condition(self, peer: Seen) -> str:
        """Describe in words the process of a rank that writes no state: gone, stopped or stuck."""
        if not self._here(peer):
            return "no sign from it"
        try:
            state = stat_of(peer.pid)[0]
        except (OSError, IndexError):
            return "its process is gone"
        known = {"T": "stopped by a signal", "D": "stuck in the kernel", "Z": "dead"}
        return known.get(state, "its threads do not run: a native call that holds the GIL?")

    def _here(self, peer: Seen) -> bool:
        return peer.record is not None and peer.host == self._identity["host"]

    def _kill_absent(self, hang: Hang) -> None:
        """Kill the silent ranks of this host, a moment after this rank has ended."""
        # The kill comes after the end of this rank, because the launcher takes the exit code of the
        # job from the first rank that ends.
        pids = [
            str(peer.pid)
            for peer in self._peers
            if peer.rank in hang.absent and self._here(peer) and born(peer.pid) == peer.born
        ]
        if not pids:
            return
        with contextlib.suppress(OSError):
            subprocess.Popen(
                ["/bin/sh", "-c", f"sleep 0.5; kill -{int(signal.SIGKILL)} {' '.join(pids)}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _stack(self) -> str:
        frame = self._me.frame()
        lines = traceback.format_stack(frame) if frame else ["  (no Python stack)\n"]
        return f"mpidist: watch: rank {self.rank} stands at\n{''.join(lines)}"


def _settings(seconds, dumps) -> dict[str, float]:
    """Check the arguments of `watch`; return those that must be equal on all ranks."""
    number = isinstance(seconds, int | float | np.number) and not isinstance(seconds, bool)
    if not (number and 0 < seconds <= sys.float_info.max):
        raise ConfigError(f"watch: seconds={shown(seconds)}; expected a number > 0")
    if not isinstance(dumps, str | os.PathLike | None):
        raise ConfigError(f"watch: dumps={shown(dumps)}; expected a path or None")
    return {"seconds": float(seconds)}


class MainThread:
    """The state of the main thread, observed by another thread."""

    def __init__(self):
        self.ident = threading.main_thread().ident
        self.state, self.where = "moving", ""
        self.moved = time.monotonic()
        self._signature = self._values = None
        self._ran = self._asked = 0
        # The interpreter runs this callback in the main thread as soon as the thread is back in
        # Python. The callback thus tells a native call that does not return from a loop that
        # repeats the same call for ever.
        self._callback = _PENDING(self._on_run)
        _callbacks.append(self._callback)

    def _on_run(self, _) -> int:
        self._ran += 1
        return 0

    def frame(self):
        """Return the innermost frame of the main thread, or None."""
        return sys._current_frames().get(self.ident)

    def look(self, now: float) -> None:
        """Find out whether the main thread has made progress since the previous call of `look`."""
        frame = self.frame()
        if frame is None:
            return
        came_back = self._ran == self._asked
        if came_back and ctypes.pythonapi.Py_AddPendingCall(self._callback, None) == 0:
            self._asked += 1
        self.where = stack_place(frame)
        stack = [each for each, _ in traceback.walk_stack(frame)]
        wait = next((each for each in stack if each.f_code is _WAIT), None)
        values, signature = None, ()  # type: dict | None, tuple
        if wait is not None:
            # A wait is identified by the time at which it began.
            signature, state = ("wait", _variables(wait).get("start")), "waiting"
        elif not came_back:
            signature, state = ("native",), "blocked"
        else:
            instructions = [(id(each.f_code), each.f_lasti) for each in stack]
            signature, state = ("python", *instructions), "looping"
            if signature == self._signature:
                values = _variables(frame)
        # A changed signature means progress: a native call, for example, is new if the last look
        # found another state. A wait whose start time is not set yet is in its first microseconds.
        if (signature, values) != (self._signature, self._values) or signature == ("wait", None):
            self.moved, state = now, "moving"
        self._signature, self._values, self.state = signature, values, state


def _variables(frame) -> dict:
    """Return the variables of a frame: numbers and texts by value, others by their ``id``."""
    at_module_level = frame.f_locals is frame.f_globals
    variables = {
        name: value if type(value) in (int, float, bool, str) else id(value)
        for name, value in list(frame.f_locals.items())
    }
    # Before Python 3.13, reading f_locals leaves a copy of the variables on the frame. That copy
    # would keep arrays in memory that the program no longer uses.
    if not at_module_level and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        copy = frame.f_locals
        if isinstance(copy, dict):
            copy.clear()
    return variables


def stack_place(frame) -> str:
    """Return the innermost line of the user's code, and the mpidist functions that it called."""
    # The text has no line numbers of mpidist, so ranks that wait at one line of the user's code
    # have equal texts.
    package = str(Path(__file__).parents[1])
    ours = []
    user = frame
    while user.f_back is not None and user.f_code.co_filename.startswith((package, "<frozen")):
        if user.f_code is not _WAIT:
            ours.append(user.f_code.co_name)
        user = user.f_back
    name = user.f_code.co_filename
    name = name if len(name) <= 80 else f"...{name[-77:]}"
    via = f", in {' > '.join(reversed(ours[:4]))} of mpidist" if ours else ""
    return f"{name}:{user.f_lineno} in {user.f_code.co_name}{via}"


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
