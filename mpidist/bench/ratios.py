"""Compute the ratio of two times in each round of a benchmark, and the median of the ratios.

If the machine is busy with other work during a round, both times of the round grow, and their ratio
hardly changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass
class Measured:
    """For each round of a timed operation: seconds and counts (such as sent bytes) per call.

    Each value is the largest of all ranks.
    """

    seconds: np.ndarray
    metered: np.ndarray

    @property
    def median(self) -> float:
        """The median of the seconds over all rounds."""
        return float(np.median(self.seconds))


def ratio(over: Measured, under: Measured) -> tuple[float, float, float]:
    """Return (median, low, high) of the time of `over` divided by the time of `under`.

    The median is taken over the rounds; low and high are the ends of its 95 % interval.
    """
    values = over.seconds / under.seconds
    return (float(np.median(values)), *interval(values))


def interval(values: np.ndarray, resamples: int = 1000) -> tuple[float, float]:
    """Return the ends (low, high) of the 95 % interval of the median of `values`, by bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (resamples, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def against_best(mine: Measured, others: Mapping[str, Measured]) -> tuple[str, float]:
    """Return (the name of the fastest of `others`, its time divided by the time of `mine`)."""
    # The ratio comes from other rounds than the choice: with the same ones it would be too small.
    best = min(others, key=lambda name: float(np.median(others[name].seconds[::2])))
    rest = slice(1, None, 2) if len(mine.seconds) > 1 else slice(None)
    return best, float(np.median(others[best].seconds[rest] / mine.seconds[rest]))
