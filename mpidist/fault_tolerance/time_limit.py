"""How long this job may still run, and whether a checkpoint fits into what is left of it.

    now                          stop here                      end of the allocation
     |- - - steps - - - - - - - - -|- a step -|- - - - save - - -|

The stop comes so early that the longest step seen and twice the longest save seen fit in, and half
a minute for what nobody has measured.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping

from .. import events

#: Seconds kept for what was never measured.
RESERVE = 30.0

_DURATION = re.compile(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)")


def seconds_left(environ: Mapping[str, str]) -> float | None:
    """Return the seconds until the allocation ends, None if it is not known.

    From SLURM_JOB_END_TIME where Slurm sets it, else squeue is asked, for at most 20 s.
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
    """Read Slurm's ``[days-][[hours:]minutes:]seconds``; None for UNLIMITED and the like. Pure."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds


def longest_save() -> float:
    """Return the seconds of the longest save among the newest events of this process."""
    newest = list(events.recent)  # other threads may add to it meanwhile
    saves = (d.get("seconds", 0.0) for _, kind, d in newest if kind == "checkpoint_saved")
    return max(saves, default=0.0)


class Allotment:
    """What is left from `now` on, with `seconds` to go. Clocks are monotonic."""

    def __init__(self, seconds: float, now: float):
        self.end = now + seconds
        self._step = self._save = 0.0
        self._last: float | None = None
        self._looked = now

    def step(self, now: float) -> None:
        """A step ends, or a loop begins."""
        if self._last is not None:
            self._step = max(self._step, now - self._last)
        self._last = now
        if now - self._looked > 1.0:
            self.look(now)

    def look(self, now: float) -> None:
        """See how long saves take."""
        self._looked = now
        self._save = max(self._save, longest_save())

    def is_over(self, now: float) -> bool:
        """Whether the loop should stop now."""
        return now >= self.end - self._step - 2 * self._save - RESERVE

    def fits(self, now: float) -> bool:
        """Whether a save that begins now ends in time, as far as saves were seen."""
        self.look(now)
        return now + self._save < self.end
