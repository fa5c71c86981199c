"""How long this job may still run, and whether a checkpoint fits into that time.

    now                          stop here                      end of the allocation
     |- - - steps - - - - - - - - -|- a step -|- - - - save - - -|

The loop stops so early that the longest step so far, twice the longest save so far, and half a
minute of reserve fit into the remaining time.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping

from .. import events

#: Seconds of reserve, for everything that takes time but is not measured.
RESERVE = 30.0

_DURATION = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)")


def seconds_left(environ: Mapping[str, str]) -> float | None:
    """Return the seconds until the Slurm allocation of this job ends, or None if unknown.

    If Slurm has not set SLURM_JOB_END_TIME, this function runs ``squeue`` for at most 20 s.
    """
    end = environ.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():
        return int(end) - time.time()
    if "SLURM_JOB_ID" not in environ:
        return None
    try:
        said = subprocess.run(
            ["squeue", "-h", "-j", environ["SLURM_JOB_ID"], "-o", "%L"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return duration(said.strip())


def duration(text: str) -> float | None:
    """Return the seconds of Slurm's ``[days-][[hours:]minutes:]seconds``; None for other texts."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds


def longest_save() -> float:
    """Return the seconds of the longest save among the newest events of this process."""
    newest = list(events.recent)  # a copy, because other threads may append meanwhile
    saves = (d.get("seconds", 0.0) for _, kind, d in newest if kind == "checkpoint_saved")
    return max(saves, default=0.0)


class Allotment:
    """Decides when a loop must stop so that a last save fits into the time that is left."""

    def __init__(self, seconds: float, now: float):
        self.end = now + seconds
        self._step = self._save = 0.0
        self._last: float | None = None
        self._looked = now

    def step(self, now: float) -> None:
        """Record that a step has ended at `now`, and update the time of the longest step."""
        if self._last is not None:
            self._step = max(self._step, now - self._last)
        self._last = now
        if now - self._looked > 1.0:
            self.look(now)

    def look(self, now: float) -> None:
        """Update the time of the longest save of a checkpoint so far."""
        self._looked = now
        self._save = max(self._save, longest_save())

    def is_over(self, now: float) -> bool:
        """Return whether the loop should stop now, so that time for a last save is left."""
        return now >= self.end - self._step - 2 * self._save - RESERVE

    def fits(self, now: float) -> bool:
        """Estimate, from the longest save so far, whether a save that begins now ends in time."""
        self.look(now)
        return now + self._save < self.end
