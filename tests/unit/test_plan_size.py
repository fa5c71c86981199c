"""Plans for 65,536 ranks are small, and are made within seconds."""

import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist.collectives.engines import hierarchical
from mpidist.collectives.engines.executor import Program
from mpidist.collectives.engines.prepare_call import check_counts, counts_text
from mpidist.collectives.schedules import algorithms

RANKS = 65_536
SECONDS, BYTES = 5.0, 200e6
#: Their plans grow with the ranks as that of the ring does.
LIKE_THE_RING = ("direct", "naive", "two_hop")
#: The ring itself in the first tier on fewer ranks, within a part of the time that is as small.
CASES = [
    ("ring", RANKS // 8),
    *(pytest.param(name, RANKS, marks=pytest.mark.exhaustive) for name in ("ring", *LIKE_THE_RING)),
    *((name, RANKS) for name in algorithms.ALLREDUCE if name not in ("ring", *LIKE_THE_RING)),
]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_plan_takes_seconds(name, ranks):
    start, n = time.process_time(), 4 * ranks
    plan = Program(None, algorithms.ALLREDUCE[name](ranks, 0, n, 4), n, np.dtype("f4"), np.add)
    assert plan.compiled.steps
    assert time.process_time() - start < SECONDS * ranks / RANKS


def test_the_largest_plan_is_small():
    """A ring's grows with the ranks; a sixteenth of them is quicker to trace."""
    ranks, n = RANKS // 16, RANKS // 4
    tracemalloc.start()
    steps = algorithms.ALLREDUCE["ring"](ranks, 1, n, 4)
    kept = Program(None, steps, n, np.dtype("f4"), np.add)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept.compiled.steps) > 4 * (ranks - 2)
    assert most < BYTES / 16


@pytest.mark.parametrize("nodes", [pytest.param(65_536, marks=pytest.mark.exhaustive), 1_024])
def test_lanes_of_many_nodes(nodes):
    """Ranks lie round robin: the k-th rank of node r is r + k * nodes."""
    node_of = tuple(rank % nodes for rank in range(RANKS))
    topology = SimpleNamespace(node_of=node_of, nodes=nodes, node=7)
    start = time.process_time()
    lanes = hierarchical.lanes_of(topology)
    assert lanes == RANKS // nodes
    lane = lanes - 1
    assert hierarchical.peers_of(topology, lane) == [r + lane * nodes for r in range(nodes)]
    steps = hierarchical.lane_steps(topology, lane, 4 * RANKS, 4)
    assert time.process_time() - start < SECONDS
    assert {step.peer % nodes for step in steps if step.peer >= 0} == {6, 8}


def test_counts_of_many_ranks_are_read_in_one_pass():
    counts = list(range(RANKS))
    start = time.process_time()
    for _ in range(10):
        text = counts_text(check_counts(counts, sum(counts), RANKS))
    assert (time.process_time() - start) / 10 < 0.05
    assert len(text) < 100
    assert text != counts_text(check_counts([1, *counts[1:]], None, RANKS))
