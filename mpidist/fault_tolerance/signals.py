"""The signal handlers of a guard: set while its loop runs, then the former ones put back."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import events
from ..launch import heartbeat
from ..runtime.failure import end_child, unlink_segments, wait_for_the_reader

#: What the first rank says at once, since a step may be long.
_INTERRUPTED = b"mpidist: interrupted: the run stops after this step; Ctrl-C again ends it now\n"


#: How Open MPI's launchers call themselves, and seconds in which one that still reads has read.
_OPEN_MPI, _READ_BY = ("prterun", "mpirun", "mpiexec", "orterun"), 0.02


def say_last(text: str) -> None:
    """Print a line on stderr, also where the launcher has stopped to read it.

    Open MPI's does so as soon as it gets Ctrl-C, half a second before it kills the ranks. What it
    writes to itself is still there: that of the rank it has started here.
    """
    print(text, file=sys.stderr, flush=True)
    if wait_for_the_reader(_READ_BY):
        return
    parent = Path(f"/proc/{os.getppid()}")
    with contextlib.suppress(OSError):
        if (parent / "comm").read_text().strip() in _OPEN_MPI:
            with (parent / "fd/2").open("a") as file:
                file.write(f"{text}\n")


class Handlers:
    """Handlers that note which signal came last, in `heard`. For the main thread.

    SIGINT is noted once. The next one ends the process, whatever it waits for: that is the kernel's
    work, since a Python handler does not run while MPI blocks. Where the process was started to
    ignore SIGINT, as a shell does with what runs beside it, it stays ignored. `speaks`: this rank
    says that it was interrupted. `alone`: no launcher removes what this process leaves when killed.
    """

    def __init__(
        self, numbers: Iterable[int], heard: Callable[[int], None], speaks: bool, alone: bool
    ):
        self.numbers, self._heard = tuple(numbers), heard
        self._speaks, self._alone = speaks, alone
        self._former: dict[int, Any] = {}

    def set(self) -> None:
        """Hear the signals from here on, also where somebody has blocked them until now."""
        for number in self.numbers:
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)

    def put_back(self) -> None:
        """Restore the signal handlers that were installed before. Twice is fine."""
        for number, handler in self._former.items():
            # None: set by C code, which signal.signal cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()

    def _hear(self, number: int, frame) -> None:
        # Little but a flag: this runs between two instructions of whatever was going on.
        end_child(number)
        self._heard(number)
        heartbeat.hear()
        if number == signal.SIGINT:
            if self._alone:
                unlink_segments()  # nothing of ours runs when the next one comes
            signal.signal(number, signal.SIG_DFL)
            if self._speaks and events.VERBOSITY:
                os.write(2, _INTERRUPTED)  # `print` may be what was going on
