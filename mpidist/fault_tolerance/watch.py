"""Hangs are reported: which rank is missing and where each rank is. Then the job ends.

A thread in each rank looks at the rank's main thread ten times per `seconds`, without any MPI call,
and tells what it saw on a board that all ranks read. A main thread is

    moving    it runs Python code and gets somewhere
    blocked   it has not come back to Python: a native call, usually an MPI call that waits
    waiting   it polls in one and the same wait of mpidist
    looping   it runs Python code, but always the same instruction with the same values

The job hangs when a rank gives no sign for `seconds`, or when nobody moved for `seconds` and
somebody waits for somebody. While one rank computes, the others may wait as long as they like.
Native calls look alike from here: `seconds` must be more than the longest one that all ranks make
at once, such as a collective write or a factorisation.
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
from ..runtime.failure import unlink_segments, wait_for_the_reader
from ..runtime.status_board import Board
from . import hang_dump
from .hang import Hang, Seen, hang_report, judge

#: The exit code of a job that hung.
HANG = 70

_WAIT = polling.wait_until.__code__
_PENDING = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
#: Those of this process that have not been stopped.
active: list[Watch] = []
_callbacks: list = []  # kept for ever: the interpreter may still call one that nobody else holds


def watch(
    comm,
    seconds: float = 60,
    *,
    directory: str | os.PathLike | None = None,
    dumps: str | os.PathLike | None = None,
) -> Watch:
    """Watch this job from now on; on a hang, tell who and where, and end it with exit code 70.

    Collective over `comm`, for a moment; afterwards each rank's thread is on its own. One line in
    any mpi4py program, ``md.watch(comm)``, or a context manager.

    Parameters
    ----------
    comm : MPI.Intracomm
    seconds : float
        How long nothing may happen. Equal on all ranks.
    directory : path, optional
        Where ranks on several hosts meet: a folder they share. Default: the current one. What
        rank 0 gives counts; the others give one as well.
    dumps : path, optional
        Where each rank that can writes ``hang-RANK.json`` at a hang: its newest 256 operations on
        each communicator, its newest events, the stacks of its threads.
    """
    same_on_all(comm, "watch", lambda: _settings(seconds, dumps))
    return Watch(comm, seconds, directory, dumps)


class Watch:
    """What `watch` returns: this rank's watch, which ends with its ``with``, or by `stop`."""

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
        # From here on everybody's record is there.
        run_on_all(comm, "watch: beginning", self._publish)
        self._thread = threading.Thread(target=self._run, name="mpidist-watch", daemon=True)
        self._thread.start()
        active.append(self)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop watching; the other ranks see that this one left. Twice is fine."""
        # A process that this rank has forked does not leave in its name.
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
            # A batch system may stop the whole job and let it go on: who was away knows nothing.
            if now - last > max(self.seconds / 2, 5 * self.interval):
                self._forget(now)
            last = now
            self._me.look(now)
            try:
                self._publish()
                records = self._board.read()
            except OSError:
                continue  # a shared file system may be away for a while; the next look tells
            for peer, record in zip(self._peers, records, strict=True):
                peer.update(record, now)
            hang = self._told(records) or judge(self._peers, self.seconds, now)
            if hang is not None and not self._stop.is_set():
                self._end(hang, now)

    def _forget(self, now: float) -> None:
        self._me.forget(now)
        for peer in self._peers:
            peer.forget(now)

    def _publish(self, verdict: Hang | None = None) -> None:
        self._beat += 1
        event = ""
        if events.recent:
            _, kind, details = events.recent[-1]
            event = " ".join([kind, *(f"{key}={value}" for key, value in details.items())])
        self._board.write(
            {
                **self._identity,
                "beat": self._beat,
                "left": self._left,
                "state": self._me.state,
                "still": round(time.monotonic() - self._me.moved, 2),
                "hang": None if verdict is None else [verdict.absent, verdict.suspects],
                "where": self._me.where[:300],
                "event": event[:200],
            }
        )

    def _told(self, records) -> Hang | None:
        """Whether another rank has found a hang already: then all of them end alike."""
        for record in records:
            if record and record["hang"]:
                return Hang(*record["hang"])
        return None

    def _end(self, hang: Hang, now: float) -> None:
        """Tell and leave. Never returns: the main thread is stuck, or is about to be."""
        with contextlib.suppress(OSError):
            self._publish(hang)
        living = [p.rank for p in self._peers if p.rank not in hang.absent and not p.left]
        # Not among the living? Then I was taken for absent myself, and others tell of it.
        if living and self.rank == living[0]:
            _write(hang_report(self._peers, hang, self.seconds, now, self._condition))
        _write(self._stack())
        self._dump(hang)
        time.sleep(
            1.5 * self.interval + 0.2
        )  # all ranks look once more, hear of it and do the same
        if self.rank in [rank for rank in living if self._here(self._peers[rank])][:1]:
            self._kill_absent(hang)
        self._board.close(last=True)
        self._leave(by_abort=self.rank in living[:1])

    def _dump(self, hang: Hang) -> None:
        if self.dumps is None:
            return
        about = {"host": self._identity["host"], "absent": hang.absent, "suspects": hang.suspects}
        try:
            hang_dump.write(
                self.dumps, self.rank, **about, state=self._me.state, where=self._me.where
            )
        except OSError as error:
            _write(f"mpidist: watch: rank {self.rank} could not write its dump: {error}\n")

    def _leave(self, *, by_abort: bool) -> None:
        """End this process; one rank asks MPI to end the job first.

        MPICH's launcher kills the others as soon as one rank has ended, and then reports the
        signal and not the exit code; after an abort both launchers report the abort's code. It is
        the only MPI call made here, and nothing depends on it: if it blocks, the alarm ends this
        process, and the other ranks leave by themselves a moment later.
        """
        unlink_segments()
        wait_for_the_reader()
        if by_abort:
            signal.alarm(10)
            MPI.COMM_WORLD.Abort(HANG)  # the job is meant, and the user may have freed `comm`
        time.sleep(1)
        os._exit(HANG)

    def _condition(self, peer: Seen) -> str:
        """Say what the system knows about the process of an absent rank on this host."""
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
        """End the absent ranks of this host, which cannot do it themselves.

        A moment later and by a process of its own: the launcher takes the job's exit code from
        the first rank that ends, and a killed one would make it 137.
        """
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
    """Check what a watch was given; return what must be equal on all ranks."""
    number = isinstance(seconds, int | float | np.number) and not isinstance(seconds, bool)
    if not (number and 0 < seconds <= sys.float_info.max):
        raise ConfigError(f"watch: seconds={shown(seconds)}; expected a number > 0")
    if not isinstance(dumps, str | os.PathLike | None):
        raise ConfigError(f"watch: dumps={shown(dumps)}; expected a path or None")
    return {"seconds": float(seconds)}


class MainThread:
    """What can be seen of a main thread from beside it, without stopping it."""

    def __init__(self):
        self.ident = threading.main_thread().ident
        self.state, self.where = "moving", ""
        self.moved = time.monotonic()
        self._signature = self._values = None
        self._ran = self._asked = 0
        # The interpreter runs this in the main thread as soon as that is back in Python: the one
        # way to tell a call that does not return from a loop that makes the same call for ever.
        self._callback = _PENDING(self._on_run)
        _callbacks.append(self._callback)

    def _on_run(self, _) -> int:
        self._ran += 1
        return 0

    def forget(self, now: float) -> None:
        """Count as having moved just now."""
        self.moved = now

    def frame(self):
        """Return the innermost frame of the main thread, or None."""
        return sys._current_frames().get(self.ident)

    def look(self, now: float) -> None:
        """See whether the main thread moved since the last look."""
        frame = self.frame()
        if frame is None:
            return
        came_back = self._ran == self._asked
        if came_back and ctypes.pythonapi.Py_AddPendingCall(self._callback, None) == 0:
            self._asked += 1
        self.where = stack_place(frame)
        wait = _enclosing_wait(frame)
        values, signature = None, ()  # type: dict | None, tuple
        if wait is not None:
            # The moment at which this wait began stands for it: another wait, another moment.
            signature, state = ("wait", _variables(wait).get("start")), "waiting"
        elif not came_back:
            signature, state = ("native",), "blocked"
        else:
            signature, state = ("python", *_stack_signature(frame)), "looping"
            if signature == self._signature:
                values = _variables(frame)
        # A native call after anything else is one that began since the last look; a wait without
        # a beginning is still in its first microseconds.
        if (signature, values) != (self._signature, self._values) or signature == ("wait", None):
            self.moved, state = now, "moving"
        self._signature, self._values, self.state = signature, values, state


def _enclosing_wait(frame):
    while frame is not None and frame.f_code is not _WAIT:
        frame = frame.f_back
    return frame


def _stack_signature(frame) -> list[tuple[int, int]]:
    signature = []
    while frame is not None:
        signature.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return signature


def _variables(frame) -> dict:
    """Return the variables of a frame, plain numbers by value and the rest by identity."""
    at_module_level = frame.f_locals is frame.f_globals
    variables = {
        name: value if type(value) in (int, float, bool, str) else id(value)
        for name, value in list(frame.f_locals.items())
    }
    # Before Python 3.13 this look leaves a copy of the variables on the frame, which would keep
    # arrays alive that the program has long let go.
    if not at_module_level and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        copy = frame.f_locals
        if isinstance(copy, dict):
            copy.clear()
    return variables


def stack_place(frame) -> str:
    """Return where a stack is: the innermost line of the user's code, and what it called here.

    Equal for ranks that wait at the same place, so without our own line numbers.
    """
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
