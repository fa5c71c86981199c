"""The figures that the bench computes from seconds: ratios, intervals, the best, losing cases."""

import numpy as np
import pytest

from mpidist.bench.ratios import Measured, against_best, interval, ratio
from mpidist.bench.report import lines, size_label


def measured(*seconds):
    return Measured(np.array(seconds, float), np.zeros((len(seconds), 0)))


def row(nbytes, algorithm, value, **more):
    return {
        "bytes": nbytes, "algorithm": algorithm, "ratio": value,
        "low": value - 0.01, "high": value + 0.01, **more,
    }  # fmt: skip


def test_a_ratio_is_taken_round_by_round():
    """Two rounds beside other work, ten times as slow: the ratio does not change."""
    native, ours = measured(4, 40, 4, 40, 4), measured(2, 20, 2, 20, 2)
    assert ratio(native, ours) == (2, 2, 2)
    # The ratio of the medians would say something else once the sides are hit unevenly.
    assert ratio(measured(4, 40, 40), measured(2, 2, 20))[0] == 2


def test_the_interval_holds_the_median_nineteen_times_of_twenty():
    rng = np.random.default_rng(1)
    found = [interval(rng.normal(2, 0.1, 21)) for _ in range(200)]
    assert 0.88 < np.mean([low <= 2 <= high for low, high in found]) <= 1
    assert 0.03 < np.mean([high - low for low, high in found]) < 0.15
    assert interval(np.array([3.0])) == (3, 3)


def test_the_best_is_chosen_in_other_rounds_than_it_is_compared_in():
    """Equal candidates compare as equal, however lucky one of them was."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(200):
        others = {str(k): measured(*rng.normal(1, 0.1, 21)) for k in range(6)}
        values.append(against_best(measured(*rng.normal(1, 0.1, 21)), others)[1])
    assert np.mean(values) == pytest.approx(1, abs=0.01)
    assert against_best(measured(2, 2), {"a": measured(1, 1), "b": measured(3, 3)}) == ("a", 0.5)
    assert against_best(measured(2), {"a": measured(1)}) == ("a", 0.5)


def test_summary_tells_means_and_every_losing_case():
    rows = [
        row(1024, "native", 1.0),
        row(1024, "auto plan", 0.5, against_best=1.0, best="ring plan"),
        row(4096, "native", 1.0),
        row(4096, "auto plan", 2.0, limit=0.9, against_best=0.9, best="ring plan"),
        row(4096, "memory copy", 0.1),
        row(4096, "torch gloo", 0.2, over_arena=5.0),
    ]
    told = lines(rows)
    assert told == [
        "native over auto plan: geometric mean over 2 sizes 1.000, least 0.500 at 1 KiB; "
        "of the memory limit over 1 size 0.900, least 0.900 at 4 KiB",
        "auto plan against the best that was chosen by hand: geometric mean over 2 sizes 0.949, "
        "least 0.900 at 4 KiB (ring plan)",
        "torch gloo over arena: geometric mean over 1 size 5.00, least 5.00 at 4 KiB",
        "losing cases (native is faster):",
        "     1 KiB  auto plan               0.500 [0.490, 0.510]",
    ]
    assert lines(rows[2:4])[-1] == "losing cases: none"


def test_summary_tells_where_auto_is_beaten_by_anything_that_adds():
    good, bad = row(8, "auto", 1.1, consistent=0.96), row(64, "auto", 1.1, consistent=0.5)
    assert "self-consistent at every size" in lines([good])
    assert "auto at 64 B takes 2.00 times as long as the fastest candidate" in lines([good, bad])


def test_sizes_are_readable():
    assert [size_label(n) for n in (8, 1024, 96 << 10, 16 << 20, 1500)] == [
        "8 B", "1 KiB", "96 KiB", "16 MiB", "1500 B"
    ]  # fmt: skip
