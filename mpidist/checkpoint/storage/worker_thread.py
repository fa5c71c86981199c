"""Threads that a caller must wait for, before it closes their files or changes their arrays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Worker(threading.Thread):
    """A thread whose method `end` waits until the thread has ended, even if Ctrl-C is pressed."""

    # Ctrl-C interrupts Python's `join`, and up to Python 3.12 all later calls of `join` return at
    # once. The caller could then close a file while the thread still writes to it.
    def __init__(self, target, name: str):
        super().__init__(target=target, name=name)
        self._done, self._process = threading.Event(), os.getpid()

    def run(self) -> None:
        """Run the function of the thread, and record when it has ended."""
        try:
            super().run()
        finally:
            self._done.set()

    def end(self) -> None:
        """Wait until the thread has ended, and raise KeyboardInterrupt only afterwards."""
        if os.getpid() != self._process:
            return  # a forked child has no such thread
        try:
            self._done.wait()
        finally:
            self._done.wait()
            self.join()


class Beside:
    """Run the function `work` in a thread during a ``with`` block.

    If no thread can be started, `work` runs before the block.
    """

    def __init__(self, work: Callable[[], None], name: str, threaded: bool = True):
        self._work = work
        self._error: BaseException | None = None
        #: Whether an exception has ended the ``with`` block; then `work` need not be finished.
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
            raise self._error  # such as KeyboardInterrupt
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
        """Whether the work has ended, with or without an exception."""
        return self._worker is None or not self._worker.is_alive()

    def result(self) -> None:
        """After the ``with`` block, raise the exception that `work` raised, if any."""
        if self._error is not None:
            raise self._error
