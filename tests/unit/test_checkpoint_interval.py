"""R52: how often to save, from the cost of a save and the rate of failures."""

import numpy as np
import pytest

from mpidist.checkpoint.interval import best_interval
from mpidist.errors import ConfigError


@pytest.mark.parametrize(("cost", "failures"), [(2.0, 86_400.0), (60.0, 4e5), (0.1, 3600.0)])
def test_it_loses_the_least_time(cost, failures):
    """The interval is where the time lost to saves and to failures has its minimum."""
    every = np.geomspace(1, 1e6, 100_000)
    lost = cost / every + every / (2 * failures)
    assert best_interval(cost, failures, most=1) == pytest.approx(every[lost.argmin()], rel=1e-3)


def test_it_never_costs_more_than_allowed():
    assert best_interval(60, 600) == pytest.approx(60 / 0.03)
    assert best_interval(60, 600, most=0.5) == pytest.approx((2 * 60 * 600) ** 0.5)


@pytest.mark.parametrize("given", [(0, 1), (1, -1), (1, 1, 0), (1, 1, 2), (float("nan"), 1)])
def test_bad_numbers(given):
    with pytest.raises(ConfigError, match="expected positive"):
        best_interval(*given)
