"""Shared buffers on nodes of up to 256 ranks: their size, and positions that suit all dtypes."""

import itertools

import pytest

from mpidist.collectives.schedules import check, node

SIZES = (2, 3, 5, 8, 16, 17, 29, 31, 64, 96, 112, 256)
ITEMSIZES = (1, 2, 4, 8, 16, 32)


def operation(size, itemsize, stride, rounds, halves):
    """One call, whole or in halves, that takes so many rounds; places are bytes.

    Of the ranks at the ends and in the middle: between others the same places are shared.
    """
    piece = stride // itemsize

    def place(position):
        row, element = divmod(position, piece)
        return row * stride + element * itemsize

    ranks = sorted({0, size // 2, size - 2, size - 1})
    n = size * ((rounds - 1) * piece + 1) + 1
    if not halves:
        return [([node.staged(size, r, n, piece, n) for r in ranks], n, place)]
    return [
        ([half(size, r, n, piece, size, n) for r in ranks], n, place)
        for half in (node.reduce_scatter, node.allgather)
    ]


def every_pair(items):
    """A walk in which every item is followed by every other one."""
    for i, one in enumerate(items):
        for other in items[i + 1 :]:
            yield one
            yield other
    yield items[0]


def test_the_walk():
    walk = list(every_pair("abcd"))
    pairs = {one + other for one, other in itertools.pairwise(walk)}
    assert pairs >= {a + b for a in "abcd" for b in "abcd" if a != b}


@pytest.mark.parametrize(
    "size",
    [pytest.param(n, marks=[pytest.mark.exhaustive] * (n in (29, 64, 96, 112))) for n in SIZES],
)
def test_no_race_between_calls_of_any_two_dtypes(size):
    """One right after the other, in both orders, whole and in halves, of one round and of two."""
    stride, forms = node.piece_bytes(size), ((1, False), (2, True), (2, False), (1, True))
    made = {(s, f): operation(size, s, stride, *f) for s in ITEMSIZES for f in forms}
    for shift in (0, 1) if size < 100 else (0,):
        walk = [made[s, forms[(k + shift) % 4]] for k, s in enumerate(every_pair(ITEMSIZES))]
        check.check_races([part for parts in walk for part in parts])


@pytest.mark.parametrize(("size", "itemsizes"), [(96, (8, 4)), (112, (16, 4))])
def test_a_geometry_that_depends_on_the_dtype_is_a_race(size, itemsizes):
    """As it was: a call, and one of another dtype that writes where the first is still read."""

    def before(itemsize):
        return max(4 << 10, (512 << 10) // size) // itemsize * itemsize

    races = 0
    for rounds in (1, 2, 3):
        one, other = (operation(size, s, before(s), rounds, False) for s in itemsizes)
        check.check_races(one * 2)
        try:
            check.check_races(one + other)
        except check.ScheduleError:
            races += 1
    assert races


@pytest.mark.parametrize("itemsize", [*ITEMSIZES, 12, 24])
def test_pieces_are_whole_lines(itemsize):
    for size in range(1, 300):
        assert node.piece_bytes(size) % 64 == 0
        assert node.piece_bytes(size) >= itemsize


def test_staging_stays_small():
    """32 MiB at 96 ranks, 64 at 256, with the flags and the slots of short vectors."""
    rest = 2 * node.FLAT_BYTES + 256 * 64
    for size in range(1, 97):
        assert node.staging_bytes(size) + rest <= 32 << 20
    for size in range(97, 257):
        assert node.staging_bytes(size) + rest <= 64 << 20
    # Up to 29 ranks rounds are as long as ever; beyond, no shorter than the memory asks for.
    for size in range(1, 30):
        assert 0 <= node.ROUND_BYTES - node.piece_bytes(size) * size < 64 * size
    for size in range(30, 257):
        assert node.staging_bytes(size) + 2 * 64 * size**2 > min(30 << 20, size << 20)


def test_places_in_staging_are_all_different():
    for size, lanes in ((1, 1), (2, 2), (3, 2), (5, 5), (8, 3)):
        rows = [node.inbox_row(size, r, o) for o in range(lanes) for r in range(size) if r != o]
        rows += [node.outbox_row(size, lanes, owner) for owner in range(lanes)]
        assert sorted(rows) == list(range(lanes * size))
        assert node.staging_length(size, lanes, 64) == 2 * 64 * lanes * size
