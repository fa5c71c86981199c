"""Progress by a thread: what is under way is tested while the program computes.

MPI makes progress only inside its calls. Between two `ready` of a long layer there are none, unless
a thread makes them. It needs MPI.THREAD_MULTIPLE and a moment of a core every half millisecond, so
it is a choice, not the default (docs/benchmarks.md has both). While it runs, the program must not
communicate by mpidist itself: two threads would push on the same operation.
"""

from __future__ import annotations

import threading
import time

from mpi4py import MPI

from ..errors import ConfigError
from ..runtime.context import running

#: Seconds between two looks.
PAUSE = 0.0005


class Background:
    """Tests handles in a thread of its own, from `push` until `take`."""

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
        """Call `begin`, which returns a handle, and test that from now on."""
        with self._lock:
            handle = begin()
            # A wait of the main thread would test it as well.
            if handle in running:
                running.remove(handle)
            self._handles.append(handle)
        self._work.set()

    def take(self) -> list:
        """Stop testing; return the handles, and raise what went wrong in the thread."""
        self._work.clear()
        with self._lock:
            handles, self._handles = self._handles, []
            error, self._error = self._error, None
        if error is not None:
            raise error
        return handles

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._work.wait()
            if self._closed:
                return
            with self._lock:
                try:
                    for handle in self._handles:
                        handle.test()
                except BaseException as error:
                    self._error = error
                    self._handles.clear()
            time.sleep(PAUSE)
