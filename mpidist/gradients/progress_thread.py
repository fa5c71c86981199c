"""A thread that calls MPI to make progress for messages while the program computes.

MPI makes progress only inside MPI calls, and the program makes none while a long layer computes its
gradients. The thread needs MPI.THREAD_MULTIPLE, and takes a little processor time every half
millisecond. While it runs, the program must call no other function of mpidist that communicates.
"""

from __future__ import annotations

import threading
import time

from mpi4py import MPI

from ..errors import ConfigError
from ..runtime.context import running

#: Seconds between two tests.
PAUSE = 0.0005


class Background:
    """A thread that continues the operations that `push` has begun, until `take` is called."""

    def __init__(self):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                "progress='thread' needs MPI.THREAD_MULTIPLE, which this MPI was not started with; "
                "use progress='hooks', or leave mpi4py.rc.thread_level alone"
            )
        self._lock, self._work = threading.Lock(), threading.Event()
        self._handles: list = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mpidist-progress", daemon=True)
        self._thread.start()

    def push(self, begin) -> None:
        """Call `begin`, which begins an operation; the thread then continues this operation."""
        with self._lock:
            handle = begin()
            running.remove(handle)  # otherwise waits of the main thread would test the handle, too
            self._handles.append(handle)
        self._work.set()

    def take(self) -> list:
        """Stop the thread's work; return the handles of all operations, or raise its error."""
        self._work.clear()
        with self._lock:
            handles, self._handles = self._handles, []
            error, self._error = self._error, None
        if error is not None:
            raise error
        return handles

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._closed = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while self._work.wait() and not self._closed:
            with self._lock:
                try:
                    for handle in self._handles:
                        handle.test()
                except BaseException as error:
                    self._error = error
                    self._handles.clear()
            time.sleep(PAUSE)
