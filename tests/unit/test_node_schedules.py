"""The schedules inside a node give complete sums, without a race between barriers (R79, R101)."""

import pytest

from mpidist.collectives.schedules import check, node
from mpidist.collectives.schedules.schedule import NODE_SYNC, NOTHING, copy

PIECE = 3
SIZES = (1, 2, 3, 4, 5, 8)
LENGTHS = (0, 1, 2, 5, 16, 31)


def whole(values, sums, size):
    """Each value is made of every rank exactly once."""
    return all(sorted(sums.ranks(value)) == list(range(size)) for value in values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", LENGTHS)
def test_staged_where_all_rows_are_added_at_once(size, n, monkeypatch):
    """As on large nodes: the same order of additions."""
    before = [node.staged(size, r, n, PIECE, n) for r in range(size)]
    monkeypatch.setattr(node, "FEW_RANKS", 0)
    after = [node.staged(size, r, n, PIECE, n) for r in range(size)]
    values = [[r] * n for r in range(size)]
    shared = [None] * node.staging_length(size, size, PIECE)
    one, _, sums = check.run_node(before, values, shared)
    two, _, others = check.run_node(after, values, shared)
    order = [[sums.ranks(value) for value in vector] for vector in one]
    assert order == [[others.ranks(value) for value in vector] for vector in two]
    check.check_races([(after, n)] * 3)
    check.check_races([(before, n), (after, n)] * 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", LENGTHS)
def test_staged(size, n):
    programs = [node.staged(size, r, n, PIECE, n) for r in range(size)]
    shared = [None] * node.staging_length(size, size, PIECE)
    private, _, sums = check.run_node(programs, [[r] * n for r in range(size)], shared)
    assert all(vector == private[0] for vector in private)
    assert whole(private[0], sums, size)
    check.check_races([(programs, n)] * 3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", LENGTHS)
def test_flat(size, n):
    """Two sets of slots, taken in turn; ranks add in rank order."""
    stride = size * n
    sets = [[node.flat(size, r, n, n + k * stride) for r in range(size)] for k in (0, 1)]
    private, _, sums = check.run_node(sets[0], [[r] * n for r in range(size)], [None] * 2 * stride)
    assert all(sums.ranks(value) == list(range(size)) for vector in private for value in vector)
    check.check_races([(sets[k % 2], n) for k in range(4)])
    if size > 1 and n:
        with pytest.raises(check.ScheduleError, match="interval"):
            check.check_races([(sets[0], n)] * 2)  # one set of slots alone would be a race


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
@pytest.mark.parametrize("n", LENGTHS)
def test_the_two_halves(size, lanes, n):
    """After the first half owner r has part r; after the second, everybody has all parts."""
    if lanes > size:
        return
    first = [node.reduce_scatter(size, r, n, PIECE, lanes, n) for r in range(size)]
    second = [node.allgather(size, r, n, PIECE, lanes, n) for r in range(size)]
    shared = [None] * node.staging_length(size, size, PIECE)
    vectors, shared, sums = check.run_node(first, [[r] * n for r in range(size)], shared)
    parts = node.BlockPartition(n, lanes)
    for owner in range(lanes):
        assert whole(vectors[owner][slice(*parts.range(owner))], sums, size)
    expected = [vectors[parts.owner(e)][e] for e in range(n)]
    vectors, _, _ = check.run_node(second, vectors, shared)
    assert all(vector == expected for vector in vectors)
    check.check_races([(first, n), (second, n)] * 3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", LENGTHS)
def test_in_place(size, n):
    programs = [node.in_place_allreduce(size, r, n, PIECE, n) for r in range(size)]
    slots = [r for r in range(size) for _ in range(n)]
    _, shared, sums = check.run_node(programs, [[]] * size, slots)
    assert whole(shared, sums, size)
    assert shared == shared[:n] * size
    check.check_races([(programs, 0)] * 2)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_two_halves_in_place(size, lanes):
    n = 17
    first = [node.in_place_reduce_scatter(size, r, n, PIECE, lanes, n) for r in range(size)]
    second = [node.in_place_allgather(size, r, n, PIECE, lanes, n) for r in range(size)]
    slots = [r for r in range(size) for _ in range(n)]
    _, shared, sums = check.run_node(first, [[]] * size, slots)
    _, shared, _ = check.run_node(second, [[]] * size, shared)
    assert whole(shared, sums, size)
    assert shared == shared[:n] * size
    check.check_races([(first, 0), (second, 0)] * 2)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("lanes", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 5, 31])
def test_staged_in_and_written_out(size, lanes, n):
    """Private vectors as everybody's memory: owners write where nobody stages any more."""
    lanes = min(lanes, size)
    base = size * n

    def shared(rank, step):
        spans = [
            span if span == NOTHING else (span[0] + rank * n, span[1] + rank * n)
            if span[1] <= n else (span[0] - n + base, span[1] - n + base)
            for span in (step.source, step.target)
        ]  # fmt: skip
        return step._replace(source=spans[0], target=spans[1])

    first = [
        [shared(r, step) for step in node.reduce_scatter(size, r, n, PIECE, lanes, n)]
        for r in range(size)
    ]
    second = [node.in_place_allgather(size, r, n, n, lanes, n) for r in range(size)]
    vectors = [r for r in range(size) for _ in range(n)]
    staging = [None] * node.staging_length(size, size, PIECE)
    _, memory, sums = check.run_node(first, [[]] * size, vectors + staging)
    _, memory, _ = check.run_node(second, [[]] * size, memory)
    assert whole(memory[:base], sums, size)
    assert memory[:base] == memory[:n] * size
    check.check_races([(first, 0), (second, 0)] * 3)


def test_the_check_finds_what_is_wrong():
    """A schedule without its syncs, and ranks that pass different numbers of them."""
    programs = [node.staged(2, r, 8, PIECE, 8) for r in range(2)]
    bare = [[step for step in steps if step.kind != NODE_SYNC] for steps in programs]
    with pytest.raises(check.ScheduleError, match="interval"):
        check.check_races([(bare, 8)])
    with pytest.raises(check.ScheduleError, match="numbers of syncs"):
        check.check_races([([programs[0], bare[1]], 8)])
    clash = [[copy(0, (0, 1), (2, 3))]] * 2
    with pytest.raises(check.ScheduleError, match="two ranks write"):
        check.check_races([(clash, 2)])


def test_pieces_and_staging():
    assert node.piece_bytes(2) * 2 == node.ROUND_BYTES
    for size in SIZES:
        programs = [node.staged(size, r, 1000, 7, 1000) for r in range(size)]
        most = max((s.target[1] for steps in programs for s in steps), default=0)
        assert most <= 1000 + node.staging_length(size, size, 7)


@pytest.mark.parametrize("size", SIZES)
def test_vectors_of_different_lengths_one_after_the_other(size):
    """The staging is the same; the number of rounds is not."""

    def operation(n):
        return [node.staged(size, r, n, PIECE, n) for r in range(size)], n

    def halves(n):
        first = [node.reduce_scatter(size, r, n, PIECE, size, n) for r in range(size)]
        second = [node.allgather(size, r, n, PIECE, size, n) for r in range(size)]
        return [(first, n), (second, n)]

    check.check_races([operation(n) for n in (31, 1, 16, 0, 2, 31, 5, 5)])
    check.check_races([part for n in (31, 1, 16, 0, 2, 31, 5, 5) for part in halves(n)])
