"""Interleaved rounds: each candidate has its turn with new inputs, and wrong sums are reported."""

import time
from contextlib import contextmanager

import numpy as np
import pytest
from benchmarks import counters
from mpi4py import MPI

from mpidist.bench import allreduce_times
from mpidist.bench.allreduce_times import calls_per_round, measure
from mpidist.bench.interleave import Candidate, interleave
from mpidist.errors import MpidistError


def native(comm, vectors, log=None):
    """MPI's allreduce in place on each vector; `log` hears which one was taken."""

    def call(k):
        if log is not None:
            log.append(k)
        comm.Allreduce(MPI.IN_PLACE, vectors[k])

    calls = [lambda k=k: call(k) for k in range(len(vectors))]
    return Candidate(calls, vectors, vectors)


@pytest.mark.ranks(1, 2, 3)
def test_vectors_take_turns(comm):
    """Each turn goes on where the last one ended; the warm-up round counts as a turn."""
    log = []
    vectors = [np.zeros(5, np.float32) for _ in range(4)]
    times = interleave(comm, {"a": native(comm, vectors, log)}, rounds=3, repeat=3)
    assert log == [k % 4 for k in range(4 * 3)]
    assert times["a"].seconds.shape == (3,)
    assert (times["a"].seconds > 0).all()
    assert len(set(comm.allgather(tuple(times["a"].seconds)))) == 1  # the slowest rank's


@pytest.mark.ranks(2, 3)
def test_inputs_are_written_anew_however_often_they_are_summed(comm):
    """More calls than vectors: sums of sums would grow; a checked call follows the timed ones."""
    log = []
    vectors = [np.zeros(7, np.float64)]
    interleave(comm, {"a": native(comm, vectors, log)}, rounds=2, repeat=50)
    assert len(log) == 3 * 51
    expected = np.arange(7) * comm.size + comm.size * (comm.size - 1) / 2
    assert (vectors[0] == expected).all()


@pytest.mark.ranks(2)
def test_a_wrong_sum_is_told(comm):
    vectors = [np.zeros(3, np.float32)]
    lazy = Candidate([lambda: None], vectors, vectors)
    with pytest.raises(MpidistError, match=r"bench: lazy gave \d.0 at \d of 3, expected \d"):
        interleave(comm, {"lazy": lazy}, rounds=1)


@pytest.mark.ranks(2, 3)
def test_a_meter_counts_per_call(comm):
    """What the meter grew by between the barriers, the most of all ranks."""
    spent = np.zeros(1)
    vectors = [np.zeros(3, np.float32)]
    entered = []

    def call():
        spent[0] += 10 + comm.rank

    @contextmanager
    def around():
        entered.append(True)
        yield
        spent[0] += 1000  # off the clock and not metered

    candidate = Candidate([call], vectors, vectors, summed=False, around=around)
    times = interleave(comm, {"a": candidate}, rounds=4, repeat=5, meter=lambda: spent.copy())
    assert times["a"].metered.tolist() == [[10 + comm.size - 1]] * 4
    assert len(entered) == 5


@pytest.mark.ranks(3)
def test_slow_calls_are_timed_together_in_smaller_numbers(comm):
    """The same number on all ranks, the slowest one's, or they would wait for each other."""
    # Where this rank stands still just then, they are fewer.
    assert max(calls_per_round(comm, 8, lambda: None) for _ in range(10)) == 200
    assert calls_per_round(comm, 8, lambda: time.sleep(0.002 * (comm.rank == 1))) <= 5
    assert calls_per_round(comm, 16 << 20, lambda: None) == 1


@pytest.mark.ranks(2, further=(3,))
def test_the_price_of_counting(comm):
    """Issue 3, "events and counters on": what one call counts, timed by itself.

    Where runs number the operations nothing may be left; a ring counts beside the number.
    """
    rows = [
        *counters.measure(comm, 64, 3),
        *counters.measure(comm, 1 << 18, 3, algorithm="node"),
        counters.measure(comm, 1 << 18, 3, algorithm="ring")[0],
    ]
    assert [row["form"] for row in rows[2:]] == ["node plan", "node arena", "ring plan"]
    for row in rows:
        assert 0 <= row["counting_us"] < row["call_us"]
        rounded = 1e-4 / row["call_us"]  # what is told has four digits behind the point
        assert row["share"] == pytest.approx(
            row["counting_us"] / row["call_us"], rel=0.05, abs=1e-6 + rounded
        )


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("cold", [False, True])
def test_rows_of_an_allreduce(comm, cold, monkeypatch):
    """Every form has a row with ratio, interval and both bandwidths; on one node the limit."""
    nbytes = 1 << 18
    # Eight vectors take turns; the largest caches would want hundreds.
    monkeypatch.setattr(allreduce_times, "last_level_cache", lambda: 4 * nbytes)
    rows = measure(
        comm, nbytes, ["auto", "ring"], 3, forms=("call", "plan", "arena", "nonblocking"),
        cold=cold, consistency=True,
    )  # fmt: skip
    named = {row["algorithm"]: row for row in rows}
    assert set(named) == {
        "native", "native nonblocking", "native reduce+broadcast",
        "native reduce_scatter+allgather", "auto", "auto plan", "auto arena", "auto nonblocking",
        "ring", "ring plan", "ring nonblocking", "memory copy",
    }  # fmt: skip
    for row in rows:
        assert row["bytes"] == nbytes
        assert row["low"] <= row["ratio"] <= row["high"]
        seconds = row["median_us"] / 1e6
        assert row["algbw"] == pytest.approx(nbytes / seconds / 1e9, rel=0.01)
        share = 2 * (comm.size - 1) / comm.size
        assert row["busbw"] == pytest.approx(row["algbw"] * share, rel=1e-4, abs=1e-3)
        assert row["limit"] > 0
    assert named["native"]["ratio"] == named["native nonblocking"]["ratio"] == 1
    assert named["memory copy"]["limit"] == 1
    assert (named["auto"]["best"], named["auto plan"]["best"]) == ("ring", "ring plan")
    assert named["auto"]["consistent"] > 0
