"""How often to save: often enough to lose little, seldom enough to cost little.

With a save of C seconds and a failure every M seconds on average, saving every T seconds costs
C / T of the time, and a failure costs T / 2 of work. The sum is least at T = sqrt(2 C M): Young,
"A first order approximation to the optimum checkpoint interval", CACM 17 (1974); Daly's
refinement (FGCS 22, 2006) matters only where C is a large part of M.
"""

from __future__ import annotations

import re
import time
from math import ceil, sqrt

import numpy as np

from ..errors import ConfigError

#: Steps before the first save where it is seconds that count: they measure a step.
FIRST = 10
#: Mean time between failures of a job, in seconds, where "auto" is not told another.
FAILURE_SECONDS = 86_400.0

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]*\.?[0-9]+) *([smhd])")


def best_interval(save_seconds: float, failure_seconds: float, most: float = 0.03) -> float:
    """Return the seconds of work between two saves that lose the least time.

    Parameters
    ----------
    save_seconds : float
        What a save costs the job, as measured (``mpidist.events.spans``).
    failure_seconds : float
        Mean time between failures of the whole job: that of one node over the number of nodes.
    most : float
        The share of the time that saving may cost; never more often than this allows.

    Raises
    ------
    ConfigError
        When a number is not positive.
    """
    if not (save_seconds > 0 and failure_seconds > 0 and 0 < most <= 1):
        raise ConfigError(
            f"save_seconds={save_seconds}, failure_seconds={failure_seconds}, most={most}; "
            "expected positive numbers, most at most 1"
        )
    return max(sqrt(2 * save_seconds * failure_seconds), save_seconds / most)


def seconds_of(text: str) -> float | None:
    """Return the seconds that "90s", "10m", "2h" or "1d" means; None for other words."""
    match = _DURATION.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _UNITS[match[2]]


class SaveInterval:
    """Which steps of a loop to save. Only `saved` is collective.

    Parameters
    ----------
    every : int or str
        A number of steps; a time ("10m"); or "auto", the interval that loses the least time to
        saves and to failures of the job, once a day on average; "auto 6h": every six hours.

    A time becomes a number of steps that all ranks agree on after each save, from the slowest
    rank's mean step since the one before: ranks never ask a clock whether to save.
    """

    def __init__(self, every: int | str):
        self.steps: int | None = None
        self.seconds: float | None = None
        self.failure_seconds = FAILURE_SECONDS
        if isinstance(every, str):
            text = every.strip()
            auto, rest = text.startswith("auto"), text.removeprefix("auto").strip()
            found = FAILURE_SECONDS if auto and not rest else seconds_of(rest)
            if not found:
                raise ConfigError(
                    f"checkpoint_every={every!r}; expected a number of steps, a time like '90s', "
                    "'10m' or '2h', or 'auto', 'auto 6h' (the mean time between failures)"
                )
            if auto:
                self.failure_seconds = found
            else:
                self.seconds = found
        elif isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"checkpoint_every={every!r}: expected a whole number of 1 or more, or a time"
            )
        else:
            self.steps = every
        self.next = self._at = 0
        self._since = 0.0

    def begin(self, step: int) -> None:
        """Begin to count at `step`."""
        self._at, self._since, self.next = step, time.monotonic(), step + FIRST

    def due(self, step: int) -> bool:
        """Whether `step` is to be saved: the same answer on all ranks."""
        return step >= self.next if self.steps is None else step % self.steps == 0

    def saved(self, comm, step: int, save_seconds: float) -> None:
        """Choose the next step to save, `step` having taken `save_seconds`. Collective."""
        if self.steps is not None or step <= self._at:
            return
        now = time.monotonic()
        slowest = np.array([(now - self._since - save_seconds) / (step - self._at), save_seconds])
        slowest = np.max(comm.allgather(slowest), axis=0)
        each, cost = float(max(slowest[0], 1e-9)), float(max(slowest[1], 1e-9))
        seconds = self.seconds or best_interval(cost, self.failure_seconds)
        self.begin(step)
        self.next = step + max(1, ceil(seconds / each))
