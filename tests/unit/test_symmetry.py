"""In the algorithms for many ranks, no rank sends, receives or adds more than the others (R73)."""

import pytest

from mpidist.collectives.schedules.algorithms import ALLREDUCE
from mpidist.collectives.schedules.schedule import RECV, REDUCE, REDUCE_LEFT, SEND, length


def work(name, p, n):
    """(messages sent, elements sent, messages received, elements received) of each rank."""
    ranks = []
    for rank in range(p):
        steps = ALLREDUCE[name](p, rank, n, 4)
        sent = [length(step.source) for step in steps if step.kind == SEND]
        got = [length(step.target) for step in steps if step.kind == RECV]
        ranks.append((len(sent), sum(sent), len(got), sum(got)))
    return ranks


SYMMETRIC = ["ring", "direct", "two_hop", "ordered", "recursive_doubling", "halving_doubling"]


@pytest.mark.parametrize("name", SYMMETRIC)
def test_every_rank_does_the_same_work(name):
    """R73: where p divides the vector, all ranks send and receive alike; none is a master."""
    for p in (2, 4, 8) if "doubling" in name else (2, 3, 5, 8):
        assert len(set(work(name, p, 8 * p))) == 1


@pytest.mark.parametrize("p", [5, 8, 13, 64])
def test_no_rank_of_a_double_tree_does_the_work_of_two(p):
    """R73: who adds in one tree is a leaf of the other, so 2N is the most for any rank."""
    n = 8 * p
    for messages, sent, _, got in work("double_tree", p, n):
        assert n <= sent <= 2 * n
        assert n <= got <= 2 * n
        assert messages <= 4


def test_the_oracle_has_a_master():
    """The test can tell: reduce and broadcast goes through rank 0."""
    assert len(set(work("naive", 4, 32))) > 1


def test_every_rank_adds():
    for rank in range(5):
        kinds = {step.kind for step in ALLREDUCE["ring"](5, rank, 40, 4)}
        assert kinds & {REDUCE, REDUCE_LEFT}
