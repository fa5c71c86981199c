"""The checker proves every schedule for every p up to 64 (R33, R38, R74, R76, R78, R123)."""

import functools

import pytest

from mpidist.collectives.schedules import (
    butterfly,
    check,
    direct,
    double_tree,
    fixed_tree,
    ring,
    tree,
)
from mpidist.collectives.schedules.schedule import RECV, REDUCE, SEND, length, split_messages
from mpidist.partition import BlockPartition

ALLREDUCE = {
    "ring": ring.allreduce,
    "ring_segmented": lambda p, r, n: ring.allreduce(p, r, n, segments=3),
    "tree": tree.allreduce,
    "double_tree": double_tree.allreduce,
    "double_tree_segmented": lambda p, r, n: double_tree.allreduce(p, r, n, segments=3),
    "recursive_doubling": butterfly.recursive_doubling,
    "halving_doubling": butterfly.halving_doubling,
    "halving_doubling_long": functools.partial(butterfly.halving_doubling, itemsize=1 << 16),
    "direct": direct.allreduce,
    "two_hop": direct.two_hop,
    "naive": direct.naive,
}


#: Numbers of ranks: in the first tier, of the large ones those beside a power of two, and 27.
SIZES = [*range(1, 20), 27, 31, 32, 33, 63, 64]
FURTHER = [p for p in range(1, 65) if p not in SIZES]
all_sizes = pytest.mark.parametrize(
    "sizes", [SIZES, pytest.param(FURTHER, marks=pytest.mark.exhaustive)], ids=["some", "others"]
)


def uneven(p):
    """Blocks of very different length, some empty."""
    return [(3 * r) % 5 for r in range(p)]


@all_sizes
@pytest.mark.parametrize("name", ALLREDUCE)
def test_allreduce_is_proved(name, sizes):
    for p in sizes:
        lengths = {0, 1, p - 1, p, p + 1, 2 * p + 3} if p < 17 else {1, p - 1, p + 1}
        for n in lengths if p <= 32 else {p + 1}:
            check.check_allreduce(ALLREDUCE[name], p, n)


@pytest.mark.parametrize("name", ALLREDUCE)
def test_cut_messages_are_proved(name):
    for p in (2, 3, 5, 8):
        check.check_allreduce(ALLREDUCE[name], p, 23, limit=2)


@pytest.mark.parametrize("build", [ring.reduce_scatter, direct.reduce_scatter])
@all_sizes
def test_reduce_scatter_is_proved(build, sizes):
    for p in sizes:
        check.check_reduce_scatter(build, p, uneven(p))


@pytest.mark.parametrize("build", [ring.allgather, direct.allgather])
@all_sizes
def test_allgather_is_proved(build, sizes):
    for p in sizes:
        check.check_allgather(build, p, uneven(p))


@all_sizes
def test_rooted_are_proved(sizes):
    for p in sizes:
        for root in {0, 1 % p, p // 2, p - 1}:
            check.check_broadcast(tree.broadcast, p, 3, root)
            check.check_broadcast(direct.broadcast, p, 3, root)
            check.check_reduce(tree.reduce, p, 3, root)
            check.check_reduce(direct.reduce, p, 3, root)
            check.check_reduce(fixed_tree.reduce, p, 3, root)
            check.check_gather(direct.gather, p, uneven(p), root)
            check.check_scatter(direct.scatter, p, uneven(p), root)


def sent(build, p, n):
    """(messages, elements) that each rank sends."""
    steps = [[s for s in program if s.kind == SEND] for program in check.programs(build, p, n)]
    return [len(s) for s in steps], [sum(length(x.source) for x in s) for s in steps]


@all_sizes
def test_counts_equal_the_formulas(sizes):
    """R38: 2(p-1) messages and 2(p-1)/p N per rank; R123: k(k-1) G against 2(k-1) G in total."""
    for p in {*sizes} - {1}:
        n = 4 * p
        messages, elements = sent(ring.allreduce, p, n)
        assert messages == [2 * (p - 1)] * p
        assert elements == [2 * (p - 1) * n // p] * p
        assert sum(sent(direct.allreduce, p, n)[1]) == p * (p - 1) * n
        assert sum(sent(tree.allreduce, p, n)[1]) == 2 * (p - 1) * n
        assert sum(sent(direct.naive, p, n)[1]) == 2 * (p - 1) * n
    for k in [k for k in range(1, 7) if 1 << k in sizes]:
        p = 1 << k
        n = 4 * p
        assert sent(butterfly.recursive_doubling, p, n) == ([k] * p, [k * n] * p)
        messages, elements = sent(butterfly.halving_doubling, p, n)
        assert messages == [2 * k] * p
        assert elements == [2 * (p - 1) * n // p] * p


def test_the_oracle_is_a_reduce_and_a_broadcast():
    """R33: whole vectors go to rank 0, which adds them in rank order and sends the sum to all."""
    for p in range(2, 9):
        root, *others = check.programs(direct.naive, p, 3)
        for steps in others:
            assert [(s.kind, s.peer) for s in steps] == [(SEND, 0), (RECV, 0)]
            assert steps[0].source == steps[1].target == (0, 3)
        assert [s.peer for s in root if s.kind == REDUCE] == list(range(1, p))
        assert {(s.peer, s.source) for s in root if s.kind == SEND} == {
            (peer, (0, 3)) for peer in range(1, p)
        }


def test_tree_depth_is_logarithmic():
    for p in range(2, 65):
        last = max(s.round for r in range(p) for s in tree.allreduce(p, r, 8))
        assert last + 1 == 2 * tree.rounds(p)


def test_double_tree_shares_the_work():
    """Issue 3, point 2: inner in one tree at most, whole trees, the depth and bytes promised."""
    for p in range(1, 200):
        places = [[double_tree.tree_place(p, r, k) for r in range(p)] for k in (0, 1)]
        assert all(not a.children or not b.children for a, b in zip(*places, strict=True))
        for side in places:
            assert [r for r in range(p) if side[r].parent is None] == [
                r for r in range(p) if side[r].depth == 0
            ]
            assert sum(len(here.children) for here in side) == p - 1
            assert all(side[c].parent == r for r in range(p) for c in side[r].children)
            assert max(here.depth for here in side) <= double_tree.depth(p)
    segments = 5
    for p in range(2, 65):
        n = 20 * p
        messages, elements = sent(
            lambda p, r, n: double_tree.allreduce(p, r, n, segments=segments), p, n
        )
        assert sum(elements) == 2 * (p - 1) * n
        assert sum(messages) == 4 * (p - 1) * segments
        assert max(elements) <= 2 * n
        last = max(s.round for r in range(p) for s in double_tree.allreduce(p, r, n, segments=5))
        assert last + 1 <= 2 * double_tree.depth(p) + segments - 1


def test_butterfly_picks_by_length():
    p = 8
    short, long = (butterfly.butterfly(p, 0, n, itemsize=4) for n in (16, 1 << 20))
    assert short == butterfly.recursive_doubling(p, 0, 16)
    assert long == butterfly.halving_doubling(p, 0, 1 << 20)


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_long_halves_travel_in_eager_messages(p):
    """Of two messages that cross none waits for an answer; the bytes are the same."""
    n, itemsize = 1000 * p, 1000
    plans = check.programs(functools.partial(butterfly.halving_doubling, itemsize=itemsize), p, n)
    for steps in plans:
        lengths = [length(step.source) * itemsize for step in steps if step.kind == SEND]
        assert max(lengths) <= 64 << 10
        assert sum(lengths) == 2 * (p - 1) * n // p * itemsize


def test_the_checker_finds_mistakes():
    def twice(p, r, n):
        return ring.allreduce(p, r, n) + direct.allreduce(p, r, n)

    def forgets(p, r, n):
        return [s for s in ring.allreduce(p, r, n) if s.round > 0]

    def hangs(p, r, n):
        return [s for s in ring.allreduce(p, r, n) if s.kind != SEND or r]

    def unread(p, r, n):
        return [s for s in tree.allreduce(p, r, n) if s.kind != "recv"]

    for wrong in (twice, forgets, hangs, unread):
        with pytest.raises(check.ScheduleError):
            check.check_allreduce(wrong, 4, 8)


def test_different_order_of_addition_is_found():
    def each_its_own(p, r, n):
        steps = direct.allreduce(p, r, n)
        return [s._replace(kind="reduce_left") if s.kind == "reduce" and r else s for s in steps]

    with pytest.raises(check.ScheduleError, match="another order"):
        check.check_allreduce(each_its_own, 3, 2)


def test_split_keeps_pairs_together():
    for p in (2, 4):
        programs = [split_messages(ring.allreduce(p, r, 40), 3) for r in range(p)]
        assert all(length(s.source) <= 3 for prog in programs for s in prog if s.kind == SEND)


def test_blocks_cover():
    for p in range(1, 40):
        for n in (0, 1, p - 1, p, p + 1, 97):
            blocks = BlockPartition(n, p)
            assert sum(blocks.counts()) == n
            assert max(blocks.counts()) - min(blocks.counts()) <= 1
            assert all(blocks.start(blocks.owner(e)) <= e for e in range(n))
