"""Real ranks measure times and fit the simulator to them (issue 3, point 8)."""

import time

import pytest

from mpidist.advice import fit
from mpidist.bench import steady_times
from mpidist.errors import ConfigError


@pytest.mark.ranks(2)
def test_fit_on_one_node(comm, monkeypatch):
    """Both ranks get the same parameters; on one node these are the node's."""
    monkeypatch.setattr(fit, "LINK_SIZES", (1 << 12, 1 << 16, 1 << 20))
    began = time.perf_counter()
    found = fit.fit(comm, repeats=3)
    took = time.perf_counter() - began
    assert comm.allgather(found) == [found] * 2
    assert set(found) == {"node_latency", "node_gap"}
    # Medians of three: at least two chains of 50 messages, two of 1 MiB, took as long or longer.
    assert 0 <= 2 * 50 * found["node_latency"] < took
    # Beside seven ranks that look for work a slope may drown; tests/unit fits exact times.
    assert 0 <= (1 << 20) * found["node_gap"] < took


@pytest.mark.filterwarnings("error")
@pytest.mark.ranks(2)
def test_fit_of_a_network(comm, monkeypatch):
    """The same ranks under two names of hosts: every parameter of a network, none negative."""
    monkeypatch.setattr(fit, "LINK_SIZES", tuple(1 << k for k in range(12, 19)))
    monkeypatch.setattr(fit, "CROSSING_SIZES", (1 << 18,))
    monkeypatch.setattr(fit, "PAUSE", 0.0)
    monkeypatch.setattr(fit.MPI, "Get_processor_name", lambda: f"host{comm.rank}", raising=True)
    found = fit.fit(comm, repeats=3)
    assert comm.allgather(found) == [found] * 2
    names = {"latency", "gap", "overhead", "burst", "peak", "crossing", "reduction", "call"}
    assert set(found) == names
    assert min(found.values()) >= 0
    assert found["crossing"] <= 1


@pytest.mark.ranks(3)
def test_fit_needs_two_ranks(comm):
    with pytest.raises(ConfigError, match="2 ranks, given 3"):
        fit.fit(comm)


@pytest.mark.ranks(3)
def test_measure(comm, monkeypatch):
    monkeypatch.setattr(steady_times, "BLOCK_BYTES", 1 << 16)
    began = time.perf_counter()
    seconds = steady_times.measure(comm, 1 << 14, "double_tree", blocks=2)
    assert 0 < 2 * steady_times.calls(1 << 14) * seconds < time.perf_counter() - began
    assert comm.allgather(seconds) == [seconds] * 3
