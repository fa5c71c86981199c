"""Shares of servers, and which servers work as well (R17, R122)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist as md
from mpidist.errors import ConfigError
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.layout.roles import balanced_shares, choose_ranks, ranks_asked
from mpidist.training.strategies import from_settings

MODEL = {
    "w": ((1000, 64), "f4"),
    "v": ((300, 300), "f8"),
    **{f"b{i}": ((i,), "f4") for i in range(9)},
}


@pytest.mark.parametrize("shares", [[1, 1], [2, 1], [0.25, 4, 1, 1], [1e-3, 1], [1, 1e-9], [7]])
def test_bytes_follow_the_shares(shares):
    layout = place_tensors(MODEL, shares)
    total = sum(layout.bytes_of_all())
    assert total == 256_000 + 720_000 + 4 * 36
    for held, share in zip(layout.bytes_of_all(), shares, strict=True):
        assert abs(held - total * share / sum(shares)) <= 300 * 8  # a row of v


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=7))
def test_every_element_is_held_once(shares):
    layout = place_tensors(MODEL, shares)
    for i, tensor in enumerate(layout.tensors):
        ranges = sorted((p.start, p.stop) for held in layout.pieces for p in held if p.tensor == i)
        ends = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == ends[:-1]
        assert ends[-1] == tensor.size


def test_equal_shares_are_as_before():
    assert place_tensors(MODEL, 3) == place_tensors(MODEL, [2, 2, 2])


def test_roles_with_shares():
    """R17: servers that work beside servers that only serve."""
    asked = ranks_asked({3: 6, 0: 1, 1: np.float32(1), np.int64(2): 0})
    assert asked == {0: 1, 1: 1, 3: 6}
    assert list(asked) == [0, 1, 3]
    assert choose_ranks(4, asked, [3]) == ([0, 1, 3], [0, 1, 2])
    assert choose_ranks(4, asked, "dedicated") == ([0, 1, 3], [2])
    assert choose_ranks(4, asked, "colocated") == ([0, 1, 3], [0, 1, 2, 3])
    assert choose_ranks(4, "auto", [3]) == ([0, 1, 2, 3], [0, 1, 2])
    assert choose_ranks(4, 2, [3]) == ([2, 3], [0, 1, 2])


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("k", range(4))
def test_shares_of_byteps(n, k):
    """2 (n - 1) : (n - k), and what the busiest host sends is 2 n (n - 1) / (n^2 + k n - 2 k) M."""
    hosts = [f"worker{i}" for i in range(n)] + [f"cpu{i}" for i in range(k)]
    shares = balanced_shares(hosts, range(n))
    total = sum(shares.values())
    part = [shares.get(rank, 0) / total for rank in range(n + k)]
    if n > k > 0:
        assert part[-1] / part[0] == pytest.approx(2 * (n - 1) / (n - k))
        # A worker sends what other hosts hold, and the other workers' parts of its own share.
        worker = (1 - part[0]) + (n - 1) * part[0]
        spare = n * part[-1]
        assert worker == pytest.approx(2 * n * (n - 1) / (n * n + k * n - 2 * k))
        assert spare == pytest.approx(worker)
    elif k:
        assert part == [0] * n + [1 / k] * k
    else:
        assert part == pytest.approx([1 / n] * n)


def test_ranks_of_a_host_divide_its_share():
    shares = balanced_shares(["a", "a", "b", "b", "c"], [0, 1, 2, 3])
    assert shares == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5, 4: 2.0}


@pytest.mark.parametrize(
    ("servers", "text"),
    [
        ({}, "the shares sum to 0"),
        ({0: 0, 1: 0}, "the shares sum to 0; give at least one rank a share above 0"),
        ({0: 1e308, 1: 1e308}, "the shares sum to inf"),
        ({0: -1, 1: 2}, "rank 0 has share -1; expected a finite number"),
        ({0: float("nan")}, "rank 0 has share nan"),
        ({0: float("inf")}, "rank 0 has share inf"),
        ({"0": 1}, "'0' has share 1; expected a rank and a number"),
        ({0: "1"}, "0 has share '1'"),
        ({0: None}, "0 has share None"),
        ({True: 1}, "True has share 1"),
        ({0: 10**400}, "expected a rank and a number"),
        ("all", "'all'; expected how many, a list of ranks, a dict of rank to share, or 'auto'"),
    ],
)
def test_bad_shares(servers, text):
    with pytest.raises(ConfigError) as error:
        ranks_asked(servers)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("servers", "placement", "text"),
    [
        ({0: 1, 4: 1}, "dedicated", "expected distinct ranks in 0..3"),
        ({-1: 1}, "colocated", "expected distinct ranks in 0..3"),
        ("auto", "dedicated", "no rank trains; give placement='colocated'"),
        ("auto", [0, 1, 2, 3], "all 4 ranks only serve"),
        ({0: 1}, [1], "rank 1 only serves but is not one of the servers [0]"),
        ("auto", [4], "rank 4 only serves but is not one of the servers"),
        (1, [True], "placement is [True]; expected one of"),
        (1, 3, "placement is 3; expected one of"),
        (1, "mixed", "placement 'mixed' is not one of dedicated, colocated"),
    ],
)
def test_bad_roles(servers, placement, text):
    with pytest.raises(ConfigError) as error:
        choose_ranks(4, servers, placement)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_shares_in_a_job_file():
    """R120: BytePS's division of a model in a job file."""
    made = from_settings(
        "parameter_server", {"shares": [[0, 2], [1, 2.0], [2, 4]], "placement": [2]}
    )
    assert made == md.ParameterServer({0: 2, 1: 2.0, 2: 4}, placement=[2])
    assert made.workers(3) == 2
    assert from_settings("parameter_server", {"servers": "auto", "placement": [2]}).workers(3) == 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"shares": [[0, 1]], "servers": 2}, "shares and servers=2: give one of the two"),
        ({"shares": [[0, 1], [0, 2]]}, "a rank is in the list twice"),
        ({"shares": [0, 1]}, "expected a list of .rank, share."),
        ({"shares": [[0, 0]]}, "the shares sum to 0"),
        ({"shares": [[-1, 1]]}, "distinct ranks"),
        ({"servers": "auto"}, "no rank trains"),
    ],
)
def test_bad_settings(settings, text):
    with pytest.raises(ConfigError, match=text):
        from_settings("parameter_server", settings)


def test_elastic_runs_have_shares():
    """R22, R51: with shares and with a placement, and still not with what a death would lose."""
    from mpidist.training.checks import check_elastic

    for strategy in (md.ParameterServer({0: 1, 1: 2}), md.ParameterServer(2, placement=[1])):
        assert check_elastic(True, strategy, None) is not None
    with pytest.raises(ConfigError, match="a death would lose gradients"):
        check_elastic(True, md.ParameterServer({0: 1, 1: 2}, md.ASP(), push_every=2), None)
