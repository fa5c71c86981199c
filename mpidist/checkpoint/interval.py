"""How often to save: often enough to lose little, seldom enough to cost little. Pure.

With a save of C seconds and a failure every M seconds on average, saving every T seconds costs
C / T of the time, and a failure costs T / 2 of work. The sum is least at T = sqrt(2 C M): Young,
"A first order approximation to the optimum checkpoint interval", CACM 17 (1974); Daly's
refinement (FGCS 22, 2006) matters only where C is a large part of M.
"""

from __future__ import annotations

from math import sqrt

from mpidist.errors import ConfigError


def best_interval(save_seconds: float, failure_seconds: float, most: float = 0.03) -> float:
    """Return the seconds of work between two saves that lose the least time. Local.

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
