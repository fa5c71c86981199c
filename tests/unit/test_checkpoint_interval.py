"""The best interval between saves, from the time of a save and the rate of failures (R52)."""

import numpy as np
import pytest

from mpidist.checkpoint import interval
from mpidist.checkpoint.interval import FIRST, SaveInterval, best_interval, seconds_of
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


class Alone:
    """What `SaveInterval.saved` asks of a communicator; `slower` is another rank's answer."""

    def __init__(self, *slower):
        self.slower = slower

    def allgather(self, value):
        return [value, *self.slower]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is told."""
    now = [100.0]
    monkeypatch.setattr(interval.time, "monotonic", lambda: now[0])
    return now


def test_durations():
    assert [seconds_of(text) for text in ("90s", " 1.5 m ", "2h", "1d")] == [90, 90, 7200, 86400]
    assert [seconds_of(text) for text in ("", "5", "-1s", "s", "1 week", "autos")] == [None] * 6


def test_a_number_of_steps(clock):
    pace = SaveInterval(4)
    pace.begin(2)
    pace.saved(Alone(), 4, 1.0)
    assert [step for step in range(1, 13) if pace.due(step)] == [4, 8, 12]


def test_workers_that_are_behind_pass_over_save_points(clock):
    """After a death, the fastest worker is at step 8; those that are behind must not save alone."""
    pace = SaveInterval(4)
    pace.begin(8)
    assert [step for step in range(3, 13) if pace.due(step)] == [12]


def test_a_time_becomes_steps_by_the_slowest_rank(clock):
    pace = SaveInterval("60s")
    pace.begin(100)
    assert [step for step in range(100, 112) if pace.due(step)] == [100 + FIRST, 101 + FIRST]
    clock[0] += 10 * 0.5 + 2.0  # ten steps of half a second, and a save
    pace.saved(Alone(np.array([2.0, 0.1])), 110, 2.0)  # another rank takes two seconds
    assert pace.next == 110 + 30
    clock[0] += 30 * 0.5
    pace.saved(Alone(), 140, 0.0)
    assert pace.next == 140 + 120


def test_auto_is_the_best_interval(clock):
    pace = SaveInterval("auto 6h")
    pace.begin(0)
    clock[0] += 10 * 1.0 + 3.0
    pace.saved(Alone(), 10, 3.0)
    assert pace.next == 10 + np.ceil(best_interval(3.0, 6 * 3600))


@pytest.mark.parametrize("every", [0, -1, True, 2.5, "often", "auto often", "", None])
def test_bad_intervals(every):
    with pytest.raises(ConfigError, match="checkpoint_every="):
        SaveInterval(every)
