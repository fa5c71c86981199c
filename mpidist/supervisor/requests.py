"""What is asked of a running job from outside: more ranks, or an end before its hosts go away.

`mpidist grow` writes a file into the control folder. A notice, as clouds give it two minutes before
they take a machine away, is a file that appears or a command that exits with 0. In both cases the
ranks are asked to save and leave, as by SIGUSR1, and `mpidist launch` decides what follows.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..launch import heartbeat

#: Seconds between two runs of the command of a notice, and the longest run.
EVERY, LONGEST = 5.0, 10.0
#: The names of the files in the control folder that ask for more ranks.
_GROW = "grow-"


class JobRequest(NamedTuple):
    """A request to save and leave: why, and how many ranks more the next attempt has."""

    text: str
    more: int = 0


class Requests:
    """The requests to a job; `notice` is the name of a file, or a command, or "" for none."""

    def __init__(self, control: Path, notice: str = ""):
        self._control, self._notice = control, notice
        self._noticed = False  # a notice is heard once, until it has gone
        self._command: _Command | None = None
        words = shlex.split(notice)
        if words and shutil.which(words[0]):
            self._command = _Command(words)

    def look(self, growth: bool = True) -> JobRequest | None:
        """Return a new request, or None; without `growth`, requests for more ranks can wait."""
        with suppress(OSError):
            if growth and (more := _taken(self._control)):
                return JobRequest(f"asked for {more} more rank{'s' * (more > 1)}", more)
        there = self._command.said_so if self._command else bool(self._notice) and self._exists()
        new, self._noticed = there and not self._noticed, there
        return JobRequest(f"notice by {self._notice}") if new else None

    def _exists(self) -> bool:
        with suppress(OSError):
            return Path(self._notice).exists()
        return self._noticed

    def close(self) -> None:
        """End the thread that runs the command of a notice."""
        if self._command is not None:
            self._command.end.set()


class _Command:
    """Runs a command again and again in a thread; `said_so` is whether it has exited with 0."""

    def __init__(self, words: list[str]):
        self.said_so, self.end, self._words = False, threading.Event(), words
        threading.Thread(target=self._run, name="mpidist-notice", daemon=True).start()

    def _run(self) -> None:
        while True:
            with suppress(OSError, subprocess.TimeoutExpired):
                quiet = subprocess.DEVNULL
                done = subprocess.run(
                    self._words, stdin=quiet, stdout=quiet, stderr=quiet, timeout=LONGEST,
                    check=False,
                )  # fmt: skip
                self.said_so = done.returncode == 0
            if self.end.wait(EVERY):
                return


def _taken(control: Path) -> int:
    """Return how many ranks more are asked for, and remove the requests."""
    more = 0
    for path in control.glob(f"{_GROW}*"):
        with suppress(ValueError):
            more += max(0, int(path.read_text(encoding="utf-8")))
        path.unlink()
    return more


def request_growth(control: Path, more: int) -> None:
    """Ask the `mpidist launch` that uses a control folder for `more` ranks.

    Raises
    ------
    ConfigError
        The number is wrong, or no `mpidist launch` uses the folder.
    """
    if more < 1:
        raise ConfigError(f"mpidist grow: -n {more}; expected one more rank, or several")
    numbers = [path.name.partition("-")[2] for path in control.glob("attempt-*")]
    attempts = sorted(int(number) for number in numbers if number.isdecimal())
    if not attempts:
        raise ConfigError(
            f"mpidist grow: {control} is not the control folder of a running mpidist launch; it is "
            "that of --control, or .mpidist-launch-NAME where mpidist launch was started"
        )
    newest = control / f"attempt-{attempts[-1]}"
    launcher = ""
    with suppress(OSError):
        launcher = (newest / heartbeat.LAUNCHER_FILE).read_text(encoding="utf-8")
    if not heartbeat.is_at_work(launcher, elsewhere=bool(launcher)):
        raise ConfigError(f"mpidist grow: the mpidist launch of {control} does not run any more")
    # Under its own name it is whole: the launcher may look at any moment.
    written = control / f".{_GROW}{heartbeat.launcher_id().replace(' ', '-')}"
    written.write_text(str(more), encoding="utf-8")
    written.rename(control / written.name[1:])
