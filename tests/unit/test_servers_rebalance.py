"""Which shares follow from measured busy seconds (R22)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist as md
from mpidist.errors import ConfigError
from mpidist.servers.balance.rebalance import BusySince, rebalance_policy


def test_shares_move_half_of_the_way_to_the_speeds():
    assert md.Rebalance().propose([0.5, 0.5], [0.2, 0.8]) == pytest.approx([0.65, 0.35])
    assert md.Rebalance(step=1).propose([0.5, 0.5], [0.2, 0.8]) == pytest.approx([0.8, 0.2])
    assert md.Rebalance(step=1).propose([0.2, 0.8], [0.2, 0.2]) is None


@pytest.mark.parametrize("gain", [0.1, 0.3])
def test_small_differences_move_nothing(gain):
    """With step 1 and times 1 and 1 + d, the busiest has d / (2 + d) less to do."""
    policy = md.Rebalance(gain=gain, step=1)
    d = 2 * gain / (1 - gain)
    assert policy.propose([0.5, 0.5], [1.0, 1.0 + 0.99 * d]) is None
    assert policy.propose([0.5, 0.5], [1.0, 1.0 + 1.01 * d]) is not None


@given(
    st.lists(st.floats(0.05, 20), min_size=2, max_size=6),
    st.floats(0.1, 1),
    st.booleans(),
)
def test_servers_become_equally_busy(speeds, step, idle):
    """Repeated looks at servers of constant speeds end near the best shares; idle ones stay so."""
    policy, n = md.Rebalance(step=step), len(speeds)
    shares = [1 / n] * n + [0.0] * idle
    for _ in range(60):
        busy = [share / speed for share, speed in zip(shares, [*speeds, 1.0], strict=False)]
        found = policy.propose(shares, busy)
        if found is None:
            break
        assert sum(found) == pytest.approx(1)
        assert all((share > 0) == (before > 0) for share, before in zip(found, shares, strict=True))
        shares = found
    else:
        raise AssertionError("the shares go on moving")
    least = 0.1 / n
    if min(speeds) / sum(speeds) > least:
        assert max(busy) <= 1.001 / sum(speeds) / (1 - policy.gain)


def test_a_server_that_measured_nothing_moves_nothing():
    assert md.Rebalance().propose([0.5, 0.5], [0.0, 1.0]) is None
    assert md.Rebalance().propose([1.0, 0.0], [1.0, 0.0]) is None
    for pushes, seconds, moves in [(9, 1.0, True), (0, 1.0, False), (9, 100.0, False)]:
        since = [BusySince(busy, pushes, seconds) for busy in (0.2, 0.8)]
        assert (md.Rebalance().follow([0.5, 0.5], since) is not None) == moves


def test_how_it_may_be_given():
    assert rebalance_policy(None) is None
    assert rebalance_policy("auto") == md.Rebalance()
    assert rebalance_policy(7) == rebalance_policy({"every": 7}) == md.Rebalance(7)
    assert rebalance_policy({"gain": 0.3, "step": 1}) == md.Rebalance(gain=0.3, step=1)
    for wrong, text in [
        ("fast", "rebalance='fast'; expected 'auto'"),
        (True, "rebalance=True; expected"),
        (0, "Rebalance: every is 0, expected a whole number of at least 1"),
        ({"often": 3}, "rebalance has 'often'; expected some of every, gain, step"),
        ({"gain": 1}, "gain is 1, expected above 0 and below 1"),
        ({"step": 1.5}, "step is 1.5, expected above 0, at most 1"),
    ]:
        with pytest.raises(ConfigError, match=text):
            rebalance_policy(wrong)
    with pytest.raises(ConfigError, match="rebalance needs workers that make all steps"):
        md.ParameterServer(2, md.BackupWorkers(1), rebalance="auto")
