"""Threads that use what their caller gives up next: open files and folders, the user's arrays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Worker(threading.Thread):
    """A thread whose end is waited for also where Ctrl-C comes meanwhile.

    Python's own ``join`` gives up then, and up to Python 3.12 takes the thread for ended from there
    on: it would write to a descriptor that has become another file's.
    """

    def __init__(self, target, name: str):
        super().__init__(target=target, name=name)
        self._done, self._process = threading.Event(), os.getpid()

    def run(self) -> None:
        """Run the target."""
        try:
            super().run()
        finally:
            self._done.set()

    def end(self) -> None:
        """Wait for the end. Ctrl-C is raised after that; a second one at once."""
        if os.getpid() != self._process:
            return  # a forked child has the object but not the thread
        try:
            self._done.wait()
        finally:
            self._done.wait()
            self.join()


class Beside:
    """Work that goes on in a thread while a ``with`` block does something else.

    Not `threaded`, or where there are no more threads, it is done before the block.
    """

    def __init__(self, work: Callable[[], None], name: str, threaded: bool = True):
        self._work = work
        self._error: BaseException | None = None
        #: The block ended by an exception: what is not done yet is of no use.
        self.abandoned = False
        self._worker = Worker(self._run, name) if threaded else None

    def __enter__(self) -> Beside:
        if self._worker is not None:
            try:
                self._worker.start()
                return self
            except RuntimeError:
                self._worker = None
        self._run()
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error  # Ctrl-C
        return self

    def __exit__(self, kind, *_) -> None:
        self.abandoned = kind is not None
        if self._worker is not None:
            self._worker.end()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def over(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._worker is None or not self._worker.is_alive()

    def result(self) -> None:
        """Raise what the work has raised. Behind the block."""
        if self._error is not None:
            raise self._error
