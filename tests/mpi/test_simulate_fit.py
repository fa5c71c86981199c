"""Fitting and measuring, run by real ranks (issue 3, point 8)."""

import pytest

from mpidist.cluster import bench_simulate, fit
from mpidist.errors import ConfigError


@pytest.mark.ranks(2)
def test_fit_on_one_node(comm, monkeypatch):
    """Both ranks get the same parameters; on one node these are the node's."""
    monkeypatch.setattr(fit, "LINK_SIZES", (1 << 12, 1 << 16, 1 << 20))
    found = fit.fit(comm, repeats=3)
    assert comm.allgather(found) == [found] * 2
    assert set(found) == {"node_latency", "node_gap"}
    assert 0 <= found["node_latency"] < 0.05
    # Beside seven ranks that look for work a slope may drown; tests/unit fits exact times.
    assert 0 <= found["node_gap"] < 1e-6


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
    monkeypatch.setattr(bench_simulate, "BLOCK_BYTES", 1 << 16)
    seconds = bench_simulate.measure(comm, 1 << 14, "double_tree", blocks=2)
    assert 0 < seconds < 1
    assert comm.allgather(seconds) == [seconds] * 3
