"""Choose the interval between saves so that saves and failures together cost the least time.

Let a save take C seconds, and let a failure come every M seconds on average. If the job saves every
T seconds, saves take the fraction C / T of the time. Each failure loses T / 2 seconds of work on
average, so failures take the fraction T / (2 M). The sum is least at T = sqrt(2 C M).

Reference: Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
"""

from __future__ import annotations

import re
import time
from math import ceil, sqrt

from ..errors import ConfigError

#: If the interval is a time, the first save comes after this many steps, during which the time of a
#: step is measured.
FIRST = 10
#: Default for the mean time between failures of a job, in seconds.
FAILURE_SECONDS = 86_400.0

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+) *([smhd])")


def best_interval(save_seconds: float, failure_seconds: float, most: float = 0.03) -> float:
    """Return how many seconds to work between two saves, so that a job loses the least time.

    Parameters
    ----------
    save_seconds : float
        The time that a save costs the job.
    failure_seconds : float
        Mean time between failures of the whole job: that of one node, divided by the number of
        nodes.
    most : float
        The largest fraction of the run time that saves may take, from 0 to 1.

    Raises
    ------
    ConfigError
        When a number is not positive, or `most` is larger than 1.
    """
    if not (save_seconds > 0 and failure_seconds > 0 and 0 < most <= 1):
        raise ConfigError(
            f"save_seconds={save_seconds}, failure_seconds={failure_seconds}, most={most}; "
            "expected positive numbers, most at most 1"
        )
    return max(sqrt(2 * save_seconds * failure_seconds), save_seconds / most)


def seconds_of(text: str) -> float | None:
    """Convert a text like "90s", "10m", "2h" or "1d" to seconds; return None for other texts."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _UNITS[match[2]]


class SaveInterval:
    """Chooses which steps of a training loop to save, the same on all ranks.

    `every` is a number of steps, or a time such as "10m", or "auto": the interval at which saves
    and failures together cost the least time. "auto" assumes one failure of the job a day, and
    "auto 6h" one every six hours.
    """

    def __init__(self, every: int | str):
        self.steps: int | None = None
        self.seconds: float | None = None
        if isinstance(every, str):
            text = every.strip()
            auto, rest = text.startswith("auto"), text.removeprefix("auto").strip()
            found = FAILURE_SECONDS if auto and not rest else seconds_of(rest)
            if not found:
                raise ConfigError(
                    f"checkpoint_every={every!r}; expected a number of steps, a time like '90s', "
                    "'10m' or '2h', or 'auto', 'auto 6h' (the mean time between failures)"
                )
            self.seconds, self.failure_seconds = (None, found) if auto else (found, FAILURE_SECONDS)
        elif isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"checkpoint_every={every!r}: expected a whole number of 1 or more, or a time"
            )
        else:
            self.steps = every
        self.next = self._at = 0
        self._since = 0.0

    def begin(self, step: int) -> None:
        """Begin to count steps and time at `step`."""
        self._at, self._since, self.next = step, time.monotonic(), step + FIRST

    def due(self, step: int) -> bool:
        """Return whether to save `step`; the answer is the same on all ranks."""
        if self.steps is None:
            return step >= self.next
        # After a rank has died, workers that are behind the others skip the save points that the
        # others have reached.
        return step > self._at and step % self.steps == 0

    def saved(self, comm, step: int, save_seconds: float) -> None:
        """Choose the next step to save, after a save that took `save_seconds`. Collective."""
        if self.steps is not None or step <= self._at:
            return
        seconds = time.monotonic() - self._since - save_seconds
        all_ranks = comm.allgather((seconds / (step - self._at), save_seconds))
        each, cost = (max(1e-9, *of_ranks) for of_ranks in zip(*all_ranks, strict=True))
        seconds = self.seconds or best_interval(cost, self.failure_seconds)
        self.begin(step)
        self.next = step + max(1, ceil(seconds / each))
