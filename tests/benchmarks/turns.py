"""Programs of several processes that compute in turns: each waits, asleep, until it is called.

The caller makes a named pipe for each process. A process that waits in `Turn.wait` reads it, so it
takes no processor, which a rank that waits in MPI would. All programs are started once, and there
can be many short rounds: on a machine with other work, all meet about the same.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path


class Turn:
    """The pipe of one process, in the folder that the caller has made."""

    def __init__(self, folder: str, rank: int):
        self._pipe = (Path(folder) / str(rank)).open(encoding="ascii")

    def wait(self) -> bool:
        """Wait to be called; return False at the end."""
        return bool(self._pipe.readline())


class Program:
    """A program of several processes, as the caller sees it.

    Parameters
    ----------
    folder : Path
        Does not exist yet.
    size : int
        The number of processes.
    start : callable
        Starts them, with the folder as argument, and returns what it has started. The standard
        output of the first one has a line for each turn.
    """

    def __init__(self, folder: Path, size: int, start: Callable[[str], Sequence[subprocess.Popen]]):
        folder.mkdir()
        pipes = [folder / str(rank) for rank in range(size)]
        for pipe in pipes:
            os.mkfifo(pipe)
        self._started = list(start(str(folder)))
        # Opened for both directions, so that a process that has died is no reason to wait here.
        self._pipes = [os.open(pipe, os.O_RDWR) for pipe in pipes]

    def turn(self) -> str:
        """Let all processes have their turn; return the line that the first one prints."""
        for pipe in self._pipes:
            os.write(pipe, b"go\n")
        line = self._started[0].stdout.readline()
        if not line:
            self.close()
            raise SystemExit(f"{self._started[0].args} ended without an answer")
        return line

    def close(self) -> None:
        """End all processes, by their ids."""
        for one in self._started:
            one.terminate()
        for one in self._started:
            one.wait(timeout=60)
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
