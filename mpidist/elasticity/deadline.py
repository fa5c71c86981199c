"""The times after which the other ranks evict (kill) a rank that holds them up. Uses no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from ..arrays import medians
from ..errors import ConfigError, shown

#: Seconds after which a stopped or silent rank is evicted, if the user gives no number of seconds.
PATIENCE = 5.0
#: Deadline "auto" is STEPS times the median time of a step, but at least LEAST seconds. The median
#: is known after KNOWN steps.
STEPS, LEAST, KNOWN = 20, 1.0, 5
#: During a repair, a stopped rank is evicted after this number of seconds, so that the repair can
#: still end before its own deadline (`repair_deadline`).
IN_REPAIR = 2.5
#: In the first step, in which plans are made, the limit for late ranks is this many times longer.
FIRST = 10


class EvictionLimits(NamedTuple):
    """The seconds after which the other ranks evict (kill) a rank; `inf` for never.

    `stopped` is for a process that a signal has stopped, `silent` for one whose threads do not run,
    and `late` for one that computes while others wait.
    """

    stopped: float
    silent: float
    late: float

    @property
    def gap(self) -> float:
        """Seconds; if two checks of a process lie further apart, it may have run between them.

        If both checks then find it stopped by a signal, it counts as stopped only since the second
        check.
        """
        return max(0.1, min(1.0, self.stopped / 2))

    @property
    def tick(self) -> float:
        """Seconds between two signs of life that a rank writes."""
        return max(0.02, min(0.5, self.stopped / 8))


class Deadline(NamedTuple):
    """The checked arguments `deadline` and `slow` of `md.elastic`.

    `late` is the number of seconds for which a rank may compute while others wait. 0 stands for the
    argument "auto": the number depends on the times of the steps. `inf` stands for the argument
    "stopped": there is no such limit.
    """

    late: float = inf
    slow: float = 0.0

    def limits(
        self, steps: Sequence[float], first: bool = False, repairs: bool = False
    ) -> EvictionLimits:
        """Return the seconds after which a rank is evicted (killed by the other ranks).

        `first` marks the first step on a communicator, and `repairs` the repair after a death.
        """
        late, stopped = self.late, PATIENCE if self.late == inf else self.late
        if self.late == 0:
            late = max(LEAST, STEPS * float(medians(steps))) if len(steps) >= KNOWN else inf
            stopped = min(PATIENCE, late)
        if first:
            late = max(FIRST * late, PATIENCE)
        silent = max(PATIENCE, stopped)
        return EvictionLimits(min(stopped, IN_REPAIR) if repairs else stopped, silent, late)


def parse_deadline(deadline="stopped", slow=0) -> Deadline:
    """Check the arguments `deadline` and `slow` of `md.elastic`. Raises ConfigError."""
    if isinstance(deadline, str):
        late = {"stopped": inf, "auto": 0.0}.get(deadline)
    else:
        late = float(deadline) if _is_number(deadline) and deadline > 0 else None
    if late is None:
        wanted = 'expected "stopped", "auto" or a number of seconds > 0'
        raise ConfigError(f"deadline={shown(deadline)}; {wanted}")
    if not _is_number(slow) or (slow != 0 and slow <= 1):
        raise ConfigError(f"slow={shown(slow)}; expected 0 (off) or a factor > 1")
    return Deadline(late, float(slow))


def _is_number(value) -> bool:
    number = isinstance(value, int | float | np.integer | np.floating)
    return number and not isinstance(value, bool) and isfinite(value)
