"""Threads that use what their caller gives up next: open files and folders, the user's arrays."""

from __future__ import annotations

import os
import threading


class Worker(threading.Thread):
    """A thread whose end is waited for also where Ctrl-C comes meanwhile. Local.

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
