"""The share of communication in the steps of a run, and the histogram of each worker (R10, R65)."""

from mpidist.fault_tolerance.communication_share import (
    EDGES_MS,
    StepTimes,
    summarize_steps,
    warn_of_share,
)


def worker(rank, *steps):
    times = StepTimes()
    for step in steps:
        times.note(*step)
    return times.facts(rank)


def test_a_histogram_of_two_workers():
    fast = worker(0, *[(0.001, 0.002, 0.001)] * 30)
    slow = worker(3, *[(0.0, 0.009, 0.0)] * 29, (0.0, 0.1001, 0.0))
    found = summarize_steps([fast, slow])
    assert found["edges_ms"] == [5, 10, 20, 50, 100, 200]
    assert [each["counts"] for each in found["workers"]] == [
        [30, 0, 0, 0, 0, 0, 0],
        [0, 29, 0, 0, 0, 1, 0],
    ]
    assert [each["rank"] for each in found["workers"]] == [0, 3]
    assert [each["share"] for each in found["workers"]] == [0.25, 0.0]
    total = 30 * 0.004 + 29 * 0.009 + 0.1001
    assert found["share"] == round(30 * 0.001 / total, 4)
    assert found["workers"][0]["data_seconds"] == 0.03


def test_bins_at_their_ends():
    """A step of 1 ms is in the bin that ends there; a longer one than all ends is counted last."""
    found = summarize_steps([worker(0, (0.0, 0.001, 0.0), (0.0, 1e6, 0.0))])
    assert found["edges_ms"][0] == 1.0
    assert found["edges_ms"][-1] == EDGES_MS[-1]
    assert found["workers"][0]["counts"][0] == 1
    assert found["workers"][0]["counts"][-1] == 1
    assert sum(found["workers"][0]["counts"]) == 2
    empty = summarize_steps([worker(0)])
    assert empty["share"] == 0.0
    assert empty["edges_ms"] == []


def test_the_warning(capsys, monkeypatch):
    """Above the bound, and only for runs that are long enough to tell."""
    monkeypatch.setattr("mpidist.events.VERBOSITY", 1)
    busy = summarize_steps([worker(0, *[(0.0, 0.4, 0.6)] * 20)])
    assert "waiting for other ranks took 0.60 of the time of the steps" in warn_of_share(busy, 20.0)
    assert "more than 0.5" in capsys.readouterr().err
    assert warn_of_share(busy, 9.0) == ""
    assert warn_of_share(summarize_steps([worker(0, *[(0.0, 0.4, 0.6)] * 19)]), 20.0) == ""
    assert warn_of_share(summarize_steps([worker(0, *[(0.0, 0.6, 0.4)] * 20)]), 20.0) == ""
    assert capsys.readouterr().err == ""
