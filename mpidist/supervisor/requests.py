"""Requests to a running job: continue with more ranks, or end before its hosts go away.

`mpidist grow` requests more ranks by a file in the control folder. With ``--notice``, the user
names a file that appears, or a command that exits with 0, when the cloud is about to take a machine
away. After a request for more ranks and after such a notice, `mpidist launch` asks the ranks by
SIGUSR1 to save and exit.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..launch import heartbeat
from ..launch.launchers import command_words
from ..launch.processes import Started

#: Seconds between two runs of the command for a notice, and the time limit for one run.
EVERY, LONGEST = 5.0, 10.0
#: Seconds between two checks whether the command has ended.
_LOOK = 0.05
#: The beginning of the names of files in the control folder that request more ranks.
_GROW = "grow-"


class JobRequest(NamedTuple):
    """Why the ranks must save and exit (`text`), and how many more ranks the job gets (`more`)."""

    text: str
    more: int = 0


class Requests:
    """Looks for requests to a running job: files in its control folder, and `notice`.

    `notice` is the name of a file that appears, or a command that exits with 0, when the hosts will
    be taken away; "" for none.
    """

    def __init__(self, control: Path, notice: str = ""):
        with suppress(OSError):
            for path in request_files(control):  # old requests, which no launcher has read
                path.unlink(missing_ok=True)
        self._control, self._notice = control, notice
        self._noticed = False  # a notice is reported only once, until it has disappeared
        self._command: _Command | None = None
        if words := notice_words(notice):
            self._command = _Command(words)

    def look(self, growth: bool = True) -> JobRequest | None:
        """Return a new request, or None; requests for more ranks only if `growth` is true."""
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
        """End the thread that repeatedly runs the command `notice`, if there is one."""
        if self._command is not None:
            self._command.stop()


class _Command:
    """Runs a command again and again in a thread; `said_so` says whether it has exited with 0."""

    def __init__(self, words: list[str]):
        self.said_so, self._end, self._words = False, threading.Event(), words
        self._thread = threading.Thread(target=self._run, name="mpidist-notice", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and the command if it is running."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            with suppress(OSError):
                # Not `subprocess.run`: child processes inherit the blocked signals of this process,
                # so a command such as `timeout` could not end the processes that it has started,
                # and they would go on after a kill of the shell.
                command, until = Started(self._words), time.monotonic() + LONGEST
                while command.process.poll() is None and time.monotonic() < until:
                    if self._end.wait(_LOOK):
                        break
                done = command.finish(0)
                self.said_so = self.said_so if done.timed_out else done.returncode == 0
            self._end.wait(EVERY)


def notice_words(notice: str) -> list[str]:
    """Split the argument of ``--notice`` into words; return [] if it is the name of a file."""
    try:
        words = command_words("--notice", notice)
    except ConfigError:  # a file may have an apostrophe in its name
        if shutil.which(notice.split()[0].strip("'\"")):
            raise
        return []
    return words if words and shutil.which(words[0]) else []


def request_files(control: Path) -> list[Path]:
    """Return the files in a control folder by which users request more ranks."""
    return [*control.glob(f"{_GROW}*"), *control.glob(f".{_GROW}*")]


def _taken(control: Path) -> int:
    """Return how many more ranks are requested in all, and remove the files of these requests."""
    more = 0
    for path in control.glob(f"{_GROW}*"):
        with suppress(OSError, ValueError):  # the other requests count if one cannot be read
            text = path.read_text(encoding="utf-8")
            path.unlink()
            more += max(0, int(text))
    return more


def request_growth(control: Path, more: int) -> None:
    """Ask the `mpidist launch` that uses the folder `control` for `more` additional ranks.

    Raises ConfigError if the number is wrong, or no `mpidist launch` uses the folder.
    """
    if more < 1:
        raise ConfigError(f"mpidist grow: -n {more}; expected one more rank, or several")
    numbers = [path.name.partition("-")[2] for path in control.glob("attempt-*")]
    attempts = sorted(int(number) for number in numbers if number.isdecimal())
    if not attempts:
        raise ConfigError(
            f"mpidist grow: {control} is not the control folder of a running mpidist launch; give "
            "its --control, or .mpidist-launch-NAME in the folder where mpidist launch was started"
        )
    launcher = ""
    while attempts and not launcher:  # the folder of the newest attempt may still be empty
        with suppress(OSError):
            file = control / f"attempt-{attempts.pop()}" / heartbeat.LAUNCHER_FILE
            launcher = file.read_text(encoding="utf-8")
    if not heartbeat.is_at_work(launcher, elsewhere=bool(launcher)):
        raise ConfigError(f"mpidist grow: the mpidist launch of {control} does not run any more")
    # The file is written under a temporary name and then renamed, because the launcher may read it
    # at any moment and must find it complete.
    written = control / f".{_GROW}{heartbeat.launcher_id().replace(' ', '-')}"
    written.write_text(str(more), encoding="utf-8")
    written.rename(control / written.name[1:])
