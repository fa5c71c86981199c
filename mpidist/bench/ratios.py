"""Figures from interleaved rounds: ratios round by round, their median, and how sure it is.

A machine that is busy for a while slows down both sides of a ratio of one round; the ratio of two
medians would not know. All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass
class Measured:
    """Seconds of a call for each round, the slowest rank's, and what `meter` counted for it."""

    seconds: np.ndarray
    metered: np.ndarray

    @property
    def median(self) -> float:
        """Median seconds."""
        return float(np.median(self.seconds))


def ratio(over: Measured, under: Measured) -> tuple[float, float, float]:
    """Median of the rounds' ratios and its 95 % interval."""
    values = over.seconds / under.seconds
    return (float(np.median(values)), *interval(values))


def interval(values: np.ndarray, resamples: int = 1000) -> tuple[float, float]:
    """95 % interval of the median, by bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (resamples, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def against_best(mine: Measured, others: Mapping[str, Measured]) -> tuple[str, float]:
    """Return the best of `others` and the median ratio of its time to mine.

    Even rounds tell which is best and odd rounds how it compares: the least of many noisy medians
    would win by luck over an equal one, were the same rounds asked twice.
    """
    best = min(others, key=lambda name: float(np.median(others[name].seconds[::2])))
    rest = slice(1, None, 2) if len(mine.seconds) > 1 else slice(None)
    return best, float(np.median(others[best].seconds[rest] / mine.seconds[rest]))
