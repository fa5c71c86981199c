"""The signal handlers of a guard (`guard.py`), which are set only while the training loop runs."""

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
from ..runtime.before_exit import unlink_segments, wait_for_the_reader
from ..runtime.failure import end_child

#: The text that rank 0 prints as soon as it is interrupted, because the step may still take long.
_INTERRUPTED = b"mpidist: interrupted: the run stops after this step; Ctrl-C again ends it now\n"


#: The names of Open MPI's launchers, and the seconds in which a working launcher reads output.
_OPEN_MPI, _READ_BY = ("prterun", "mpirun", "mpiexec", "orterun"), 0.02


def say_last(text: str) -> None:
    """Print a last line on stderr, even if the launcher no longer reads the output of the ranks."""
    print(text, file=sys.stderr, flush=True)
    # The launcher of Open MPI stops reading when it gets Ctrl-C, half a second before it kills the
    # ranks. The text then goes to the stderr of the launcher itself.
    if wait_for_the_reader(_READ_BY):
        return
    parent = Path(f"/proc/{os.getppid()}")
    with contextlib.suppress(OSError):
        if (parent / "comm").read_text().strip() in _OPEN_MPI:
            with (parent / "fd/2").open("a") as file:
                file.write(f"{text}\n")


class Handlers:
    """Sets signal handlers, which call the function `heard` with the number of the signal.

    The second SIGINT ends the process. With `speaks`, this rank prints that it was interrupted, and
    with `alone`, the first SIGINT removes the files of the process's shared memory.
    """

    def __init__(
        self, numbers: Iterable[int], heard: Callable[[int], None], speaks: bool, alone: bool
    ):
        self.numbers, self._heard = tuple(numbers), heard
        self._speaks, self._alone = speaks, alone
        self._former: dict[int, Any] = {}

    def set(self) -> None:
        """Set the handlers, and unblock the signals. Must be called in the main thread."""
        for number in self.numbers:
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)

    def put_back(self, block: bool = False) -> None:
        """Restore the former signal handlers. A second call does nothing.

        With `block`, a signal that arrives later waits until new handlers are set.
        """
        if block:
            signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        for number, handler in self._former.items():
            # None means that C code had set the handler. `signal.signal` cannot restore such a
            # handler.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()

    def _hear(self, number: int, frame) -> None:
        # The handler does little, because it runs between any two instructions of the program.
        end_child(number)
        self._heard(number)
        heartbeat.hear()
        if number == signal.SIGINT:
            if self._alone:
                unlink_segments()  # the next SIGINT ends the process without clean-up
            # A Python handler would not run while MPI blocks, so the second SIGINT has the default
            # action.
            signal.signal(number, signal.SIG_DFL)
            if self._speaks and events.VERBOSITY:
                os.write(2, _INTERRUPTED)  # the handler may have interrupted a `print`
