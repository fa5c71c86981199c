"""The fixed tree gives equal bits for any division of the pieces among ranks (issue 3, point 5)."""

import itertools

import numpy as np
import pytest

from mpidist.collectives.schedules import check, fixed_tree
from mpidist.collectives.schedules.schedule import FINISH, NOTHING, SEND, Step, length
from mpidist.partition import BlockPartition

RNG = np.random.default_rng(5)


def split(start, stop):
    """Where the tree is cut, as it is defined: the largest power of two below the length."""
    return start + (1 << ((stop - start - 1).bit_length() - 1))


def serial(values, start, stop, add=np.add):
    """The sum over [start, stop), by recursion."""
    if stop - start == 1:
        return values[start]
    middle = split(start, stop)
    return add(serial(values, start, middle, add), serial(values, middle, stop, add))


def fold(nodes, values, pieces, add=np.add):
    """Push nodes one by one and add what is joined; returns the nodes and values that are left."""
    stack, sums = [], []
    for node, value in zip(nodes, values, strict=True):
        sums.append(value)
        for _ in range(fixed_tree.push(stack, node, pieces)):
            right = sums.pop()
            sums[-1] = add(sums[-1], right)
    return stack, sums


def ranges(pieces, ranks):
    return list(itertools.pairwise(fixed_tree.cuts(pieces, ranks)))


@pytest.mark.parametrize("pieces", range(1, 65))
def test_any_number_of_ranks_adds_the_serial_tree(pieces):
    """Bit for bit with random float32, for 1 to 64 ranks; a rank adds as its pieces arrive."""
    values = (RNG.standard_normal((pieces, 3)) * 10.0 ** RNG.integers(-6, 6, (pieces, 1))).astype(
        np.float32
    )
    expected = serial(values, 0, pieces)
    orders = {serial(values[RNG.permutation(pieces)], 0, pieces).tobytes() for _ in range(20)}
    assert pieces < 8 or len(orders) > 1, "these values would not show another order"
    leaves = [(k, k + 1) for k in range(pieces)]
    for ranks in range(1, 65):
        nodes, partial = [], []
        for start, stop in ranges(pieces, ranks):
            held, sums = fold(leaves[start:stop], values[start:stop], pieces)
            assert held == fixed_tree.partials(start, stop, pieces)
            nodes += held
            partial += sums
        root, total = fold(nodes, partial, pieces)
        assert root == [(0, pieces)]
        assert total[0].tobytes() == expected.tobytes(), ranks


def test_nobody_has_more_pieces_than_must_be():
    for pieces, ranks in itertools.product(range(1, 65), range(1, 65)):
        spans = ranges(pieces, ranks)
        assert spans[0][0] == 0
        assert spans[-1][1] == pieces
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert max(stop - start for start, stop in spans) == -(-pieces // ranks)
        for start, stop in spans:
            count = len(fixed_tree.partials(start, stop, pieces))
            assert count <= max(1, 2 * (stop - start).bit_length() - 2)
            assert (
                count
                <= fixed_tree.vectors_held(start, stop, pieces)
                <= (stop - start).bit_length() + 1 + count
            )
    assert fixed_tree.cuts(16, 3) == [0, 4, 10, 16]
    assert fixed_tree.cuts(16, 5) == [0, 4, 8, 12, 16, 16]


def proved(size, n, pieces, votes=0, **kwargs):
    """Run all ranks' steps symbolically and compare every element's tree with the serial one."""
    nodes = [fixed_tree.partials(*span, pieces) for span in ranges(pieces, size)]
    names = {node: k for k, node in enumerate(itertools.chain(*nodes))}
    first_vote = len(names)
    start = []
    for rank, held in enumerate(nodes):
        start.append([names[node] for node in held for _ in range(n)])
        if not held:
            start[-1] = [None] * (n - votes) + [first_vote + rank] * votes

    def build(p, rank):
        return fixed_tree.piecewise(p, rank, n, pieces, votes=votes, **kwargs)

    memory, sums = check.run(check.programs(build, size), start)
    _, [total] = fold(list(names), list(names.values()), pieces, sums.add)
    voted = total
    for rank in range(size):
        if not nodes[rank]:
            voted = sums.add(voted, first_vote + rank)
    for rank in range(size):
        assert memory[rank][:n] == [total] * (n - votes) + [voted] * votes, (size, pieces, rank)


@pytest.mark.parametrize(
    "size",
    [
        *range(1, 18), 32, 33,
        *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (31, 64)),
    ],
)  # fmt: skip
def test_every_schedule_gives_the_tree(size):
    """Both forms, any p and V, fewer pieces or elements than ranks, and votes of idle ranks."""
    for pieces in sorted({1, 2, 3, 5, 8, 16, 31, 64, max(1, size - 1), size, size + 1, 2 * size}):
        for n in {1, 5, size, 2 * size + 1} if size < 10 else {3, size + 1}:
            proved(size, n, pieces)
            proved(size, n, pieces, votes=1, itemsize=1 << 20)
    for n in (1, 23):
        proved(size, n, 3 * size, votes=1, segments=3)
        proved(size, n, size, segments=3, itemsize=1 << 20)


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("votes", [0, 1])
def test_partial_sums_in_the_memory_of_a_node(size, votes):
    """The same tree where the ranks' slots lie, with no race, also against what follows it."""
    for pieces, n, piece in itertools.product((1, 3, 5, 8, 16, 31), (1, 5, 2 * size + 1), (2, 99)):
        nodes = [fixed_tree.partials(*span, pieces) for span in ranges(pieces, size)]
        stride = n * max(max(map(len, nodes)), 1)
        names = {node: k for k, node in enumerate(itertools.chain(*nodes))}
        shared = []
        for rank, held in enumerate(nodes):
            slot = [names[node] for node in held for _ in range(n)]
            if not held:
                slot = [None] * (n - votes) + [len(names) + rank] * votes
            shared += slot + [None] * (stride - len(slot))
        programs = [
            fixed_tree.on_slots(size, rank, n, pieces, stride, piece, votes=votes)
            for rank in range(size)
        ]
        _, memory, sums = check.run_node(programs, [[]] * size, shared)
        _, [total] = fold(list(names), list(names.values()), pieces, sums.add)
        voted = total
        for rank in range(size):
            if not nodes[rank]:
                voted = sums.add(voted, len(names) + rank)
        for rank in range(size):
            row = memory[rank * stride : rank * stride + n]
            assert row == [total] * (n - votes) + [voted] * votes, (pieces, n, rank)
        # Before and after, every rank writes all of its slot and reads the total.
        alone = [
            [Step(0, FINISH, -1, NOTHING, (rank * stride, (rank + 1) * stride))]
            for rank in range(size)
        ]
        check.check_races([(alone, 0), (programs, 0), (alone, 0), (programs, 0)])


def test_an_allreduce_adds_the_ranks_in_the_tree():
    for size in (*range(1, 18), 31, 32, 33, 63, 64):
        for n in (0, 1, size + 1):
            check.check_allreduce(fixed_tree.allreduce, size, n)


def traffic(size, n, pieces, itemsize):
    programs = check.programs(
        lambda p, rank: fixed_tree.piecewise(p, rank, n, pieces, votes=1, itemsize=itemsize), size
    )
    sends = [[step for step in steps if step.kind == SEND] for steps in programs]
    return [(len(s), sum(length(step.source) for step in s)) for s in sends]


def test_messages_and_elements_equal_the_formulas():
    """k partial sums: (k + 1)(p - 1) messages, k (N - own block) + (p - 1) own block elements."""
    for size, pieces in itertools.product(range(2, 20), (1, 2, 7, 16, 24)):
        n = 5 * size + 3
        blocks = BlockPartition(n, size)
        nodes = [len(fixed_tree.partials(*span, pieces)) for span in ranges(pieces, size)]
        found = traffic(size, n, pieces, 1 << 10)
        most = -(-pieces // size)
        even = fixed_tree.cuts(pieces, size)[:-1] == [rank * most for rank in range(size)]
        if even and set(nodes) == {1} and all(count & (count - 1) == 0 for count in (size, most)):
            rounds = size.bit_length() - 1
            assert [messages for messages, _ in found] == [2 * rounds] * size
            assert sum(elements for _, elements in found) == 2 * (size - 1) * n
            assert traffic(size, n, pieces, 1) == [(rounds, rounds * n)] * size
            continue
        voter = blocks.owner(n - 1)
        for rank, k in enumerate(nodes):
            own = blocks.size(rank)
            vote = int(k == 0 and rank != voter)
            messages, elements = found[rank]
            assert messages == (k + 1) * (size - 1) + vote
            assert elements == k * (n - own) + (size - 1) * own + vote
