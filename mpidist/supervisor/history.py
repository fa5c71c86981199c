"""The control folder of `mpidist launch`: the record of all attempts and their results.

The file ``history.jsonl`` has one line for each attempt and decision.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

from ..errors import ConfigError
from ..launch import heartbeat
from .hosts import print_line
from .policy import Attempt
from .requests import request_files


def note_event(folder: Path, kind: str, facts: dict) -> None:
    """Append an event to the history of the job in `folder`: its `kind`, and `facts` about it."""
    line = json.dumps({"time": round(time.time(), 3), "event": kind, **facts}) + "\n"
    try:
        with (folder / "history.jsonl").open("a+b") as file:
            file.seek(0)
            # A killed launcher may have left an incomplete line. It is removed, because it would
            # make the new line unreadable.
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(line.encode())
    except OSError as error:  # a full disk must not end a job that can go on without a history
        print_line(f"the history is not written: {error}")


def next_attempt(folder: Path, known: int) -> int:
    """Return the number of the next attempt (start of the program), for the name of its folder.

    The function marks all earlier attempts as over, so that their ranks end. Raises ConfigError if
    another `mpidist launch` that uses the same folder still runs on this host.
    """
    for attempt in folder.glob("attempt-*"):
        name = ""
        with contextlib.suppress(OSError):
            name = (attempt / heartbeat.LAUNCHER_FILE).read_text(encoding="utf-8")
        # If the attempt is over, its launcher may be waiting before it begins the next attempt.
        ended = name == heartbeat.launcher_id() and (attempt / heartbeat.OVER).exists()
        if heartbeat.is_at_work(name, elsewhere=False) and not ended:
            raise ConfigError(
                f"{folder} is in use by another mpidist launch; wait for it or stop it, or give "
                "another folder with --control DIR"
            )
    number = known
    while (attempt := folder / f"attempt-{number}").exists():
        if (attempt / heartbeat.LAUNCHER_FILE).exists():
            (attempt / heartbeat.OVER).touch()
        number += 1
    return number


def free_number(folder: Path, number: int) -> int:
    """Return the smallest number above `number` without a folder ``attempt-NUMBER``."""
    while (folder / f"attempt-{(number := number + 1)}").exists():
        pass
    return number


def remove_control_folder(folder: Path) -> None:
    """Remove the files of `mpidist launch` from a control folder, and the folder if it is empty."""
    for attempt in folder.glob("attempt-*"):
        if (attempt / heartbeat.LAUNCHER_FILE).exists():
            shutil.rmtree(attempt, ignore_errors=True)
    with contextlib.suppress(OSError):
        ours = [*folder.glob("selection-*.json"), *request_files(folder)]
        for path in (*ours, folder / "history.jsonl", folder / "memory"):
            path.unlink(missing_ok=True)
        folder.rmdir()


def read_history(folder: Path) -> list[Attempt]:
    """Return the results of all attempts (starts of the program) of this job so far.

    Raises ConfigError if ``history.jsonl`` in `folder` is not a history of `mpidist launch`.
    """
    try:
        data = (folder / "history.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    try:
        # A launcher that was killed while it wrote has left an incomplete line, which is ignored.
        events = [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        return [
            Attempt(**{name: facts[name] for name in Attempt._fields if name in facts})
            for facts in events
            if facts["event"] == "attempt"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}/history.jsonl is not a history of mpidist: {error}") from None
