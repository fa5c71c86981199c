"""The fast forms of the simulator are fast, and equal the one that enumerates steps (issue 3)."""

import time

import pytest

from mpidist.collectives.schedules.algorithms import ALLREDUCE
from mpidist.errors import ConfigError
from mpidist.simulator.network_model import NetworkModel, Problem
from mpidist.simulator.predict import ENUMERATED, predict
from mpidist.simulator.rank_classes import CLASSES

#: Every parameter counts in the first network; the second is that of textbooks.
NETWORKS = [
    NetworkModel(
        latency=40e-6, gap=8e-9, reduction=3e-10, overhead=6e-6, call=3e-5, burst=1 << 18,
        peak=5e-10, crossing=0.8, incoming=False, node_latency=2e-6, node_gap=1e-10,
    ),
    NetworkModel(overhead=1e-6),
]  # fmt: skip
FAST = ["ring", *CLASSES]
#: Numbers of ranks: in the first tier, of the large ones those beside a power of two and some more.
SIZES = [*range(1, 21), 24, 27, 28, 31, 32, 33, 48, 63, 64]
FURTHER = [p for p in range(1, ENUMERATED + 1) if p not in SIZES]


def same(name, p, n, **options):
    slow = predict(name, Problem(p, n, **options), fast=False)
    quick = predict(name, Problem(p, n, **options), fast=True)
    assert quick[1:] == slow[1:], (name, p, n, options)
    assert quick.seconds == pytest.approx(slow.seconds, rel=1e-9), (name, p, n, options)


def equal_pieces(p, least):
    """A length of at least `least` that p ranks, or the 2^k of a butterfly, share evenly."""
    unit = p << (p.bit_length() - 1)
    return -(-least // unit) * unit


@pytest.mark.parametrize(
    "sizes", [SIZES, pytest.param(FURTHER, marks=pytest.mark.exhaustive)], ids=["some", "others"]
)
@pytest.mark.parametrize("name", FAST)
def test_fast_equals_enumerated(name, sizes):
    """All p up to 64, on nodes of 1, and up to 32 of 2 and 4 ranks, where they are full."""
    assert {*SIZES, *FURTHER} == {*range(1, ENUMERATED + 1)}
    for p in sizes:
        for per_node in (1, 2, 4) if p <= 32 else (1,):
            if p % per_node == 0:
                network = NETWORKS[(p + per_node) % 2]
                same(name, p, equal_pieces(p, 1), network=network, ranks_per_node=per_node)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("network", NETWORKS)
def test_fast_equals_enumerated_for_long_vectors(name, network):
    """Segments, messages that cross, and calls in a row on a bucket that empties."""
    for p, per_node in ((2, 1), (3, 1), (4, 2), (6, 2), (7, 1), (8, 4), (24, 4)):
        for n in (5_000, 300_000):
            options = {"network": network, "ranks_per_node": per_node, "repeats": 2}
            same(name, p, equal_pieces(p, n), **options)


def test_trees_need_no_equal_pieces():
    for name in ("tree", "double_tree", "recursive_doubling"):
        for p in (5, 8, 21):
            for n in (0, 1, p + 1, 1001):
                same(name, p, n, network=NETWORKS[0])


#: Those that take seconds, in the first tier on fewer ranks, within a part of the time that is
#: as small; a butterfly is one of the two others.
LONG = ("ring", "butterfly", "halving_doubling", "double_tree")


@pytest.mark.parametrize(
    ("name", "p"),
    [
        *((name, 8_192) for name in LONG if name != "butterfly"),
        *(pytest.param(name, 65_536, marks=pytest.mark.exhaustive) for name in LONG),
        *((name, 65_536) for name in FAST if name not in LONG),
    ],
)
def test_65536_ranks_take_seconds(name, p):
    """CPU seconds, so that other work on the machine does not count; 1 MiB of float32."""
    start = time.process_time()
    cost = predict(name, Problem(p, 1 << 18))
    assert time.process_time() - start < 20 * p / 65_536
    log = p.bit_length() - 1
    rounds = {"ring": 2 * (p - 1), "tree": 2 * log, "recursive_doubling": log}
    rounds["halving_doubling"] = 2 * log
    assert cost.rounds == rounds.get(name, cost.rounds)
    assert cost.seconds > 0


def test_many_ranks_on_nodes():
    """Eight ranks share a link: a butterfly suffers, a ring does not."""
    flat = {a: predict(a, Problem(1024, 1 << 18)).seconds for a in ("ring", "butterfly")}
    nodes = {
        a: predict(a, Problem(1024, 1 << 18, ranks_per_node=8)).seconds
        for a in ("ring", "butterfly")
    }
    assert nodes["ring"] < flat["ring"]
    assert nodes["butterfly"] > 3 * flat["butterfly"]


def test_the_double_tree_wins_where_ranks_are_many():
    """R37: 16 MiB on 4,096 ranks: the ring's latency grows with p, the tree's with log p."""
    seconds = {
        name: predict(name, Problem(4096, 4 << 20)).seconds for name in ("ring", "double_tree")
    }
    assert seconds["double_tree"] < 0.9 * seconds["ring"]
    few = {name: predict(name, Problem(8, 4 << 20)).seconds for name in ("ring", "double_tree")}
    assert few["ring"] < few["double_tree"]


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_hierarchical_is_lanes_and_memory(per_node):
    """R79: 2(P-1)/P N bytes leave a node, on all its lanes; enumerated and fast forms agree."""
    for nodes in (3, 4, 8):
        p, n = nodes * per_node, 96_000 * per_node * nodes
        for length in (n, 4096):
            same("hierarchical", p, length, network=NETWORKS[0], ranks_per_node=per_node)
        cost = predict("hierarchical", Problem(p, n, ranks_per_node=per_node))
        wire = 2 * (nodes - 1) * 4 * n // nodes
        assert cost.bytes * per_node == wire
        assert cost.seconds > wire * NetworkModel().gap
        flat = predict("butterfly", Problem(4 * per_node, 1 << 22, ranks_per_node=per_node))
        lanes = predict("hierarchical", Problem(4 * per_node, 1 << 22, ranks_per_node=per_node))
        assert per_node == 1 or lanes.seconds < 0.75 * flat.seconds


def test_what_has_no_fast_form_says_so():
    with pytest.raises(ConfigError, match=r"direct on 16384 ranks .*ring, tree"):
        predict("direct", Problem(16_384, 1024))
    assert predict("naive", Problem(2000, 4)).messages == 1999
    assert set(ALLREDUCE) >= set(FAST)
    for name in ("ring", "hierarchical"):
        with pytest.raises(ConfigError, match="expected full nodes"):
            predict(name, Problem(1001, 1001, ranks_per_node=2))
