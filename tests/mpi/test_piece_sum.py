"""`PieceSum` gives the bits of the serial tree on any number of ranks (issue 3, point 5)."""

import numpy as np
import pytest

from mpidist.collectives.engines import piecewise
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.collectives.engines.piecewise import PieceSum
from mpidist.collectives.schedules import fixed_tree
from mpidist.errors import ConfigError, MismatchError, ProtocolError
from mpidist.partition import BlockPartition
from mpidist.runtime import context


def serial(vectors):
    """The tree by its definition, in plain NumPy."""
    if len(vectors) == 1:
        return vectors[0].copy()
    middle = 1 << ((len(vectors) - 1).bit_length() - 1)
    return serial(vectors[:middle]) + serial(vectors[middle:])


def vectors(pieces, n, dtype=np.float32):
    rng = np.random.default_rng((pieces, n))
    return (rng.standard_normal((pieces, n)) * 10.0 ** rng.integers(-3, 3, (pieces, 1))).astype(
        dtype
    )


@pytest.fixture(params=["one node", "nodes"])
def ways(request, comm):
    """Ranks that add in memory they share, and ranks that believe to be on nodes of their own."""
    if request.param == "nodes":
        memory_of(context.of(comm), 1)
    return request.param


@pytest.mark.ranks(1, 2, 3, 5, further=(4, 6, 7, 8, 9))
def test_any_number_of_ranks_gives_the_serial_bits(comm, ways):
    """p and V not powers of two, p > V, n < p, all forms of the exchange, used again."""
    for pieces in (1, 2, 3, 5, 7, 8, 16, 31):
        for n in (1, 7, 40, 5000):
            sums = PieceSum(comm, n, np.float32, pieces)
            for turn in range(2):
                values = vectors(pieces, n) * np.float32(turn + 1)
                for piece in sums.mine:
                    sums.add(values[piece], 0.3)
                out = np.empty(n, np.float32)
                sums.finish(out)
                expected = serial(values * np.float32(0.3))
                assert out.tobytes() == expected.tobytes(), (pieces, n, turn)
            sums.close()


@pytest.mark.ranks(1, 2, 3, further=(5,))
def test_pieces_given_at_once_have_the_same_bits(comm):
    """Runs of any length and place in the tree, beside single ones, in the dtype or another."""
    for pieces, dtype in ((5, np.float32), (7, np.float16), (16, ">f4"), (31, np.float64)):
        values = vectors(pieces, 40, dtype)
        work = np.float64 if dtype is np.float64 else np.float32
        expected = serial(values.astype(work) * work(0.3))
        for most in (1, 2, 3, 5, 16):
            sums = PieceSum(comm, 40, np.dtype(dtype), pieces)
            first = sums.mine.start
            while first < sums.mine.stop:
                last = min(first + most, sums.mine.stop)
                sums.add_all(values[first:last].copy(), 0.3)
                if last < sums.mine.stop:
                    sums.add(values[last], 0.3)
                first = last + 1
            out = np.empty(40, dtype)
            sums.finish(out)
            assert out.tobytes() == expected.astype(dtype).tobytes(), (pieces, most)


@pytest.mark.ranks(1, 2, 3, further=(5,))
def test_pieces_written_into_the_sums_memory_have_the_same_bits(comm, ways, monkeypatch):
    """Mixed with all other ways to add, in blocks that do not divide n; half of them fit in."""
    monkeypatch.setattr(piecewise, "BLOCK", 16)
    rng = np.random.default_rng(comm.rank)
    cases = (1, "f4"), (2, "f4"), (5, "f8"), (6, "f4"), (14, "f4"), (16, "f4"), (31, "f2")
    for pieces, dtype in cases:
        sums = PieceSum(comm, 41, np.dtype(dtype), pieces)
        sums.prepare()
        for turn in range(6):
            values, written = vectors(pieces, 41, dtype), 0
            values[:: turn + 2] = 0
            factors = 0.25 + np.arange(pieces) / 8
            out = np.empty(41, dtype)
            piece, stop = sums.mine.start, sums.mine.stop
            while piece < stop:
                row = sums.next_row()
                assert row is None or row.dtype == sums.dtype
                way = rng.integers(5)
                if turn < 3:  # first all into rows, then the odd ones
                    way = (0, 3, 1)[turn] if piece % 2 == 0 else 0
                if way == 0 and row is not None:
                    row[...] = values[piece]
                    sums.add_row(factors[piece])
                    written += 1
                elif way == 1 and piece % 2 == 0 and piece + 1 < stop:
                    two = values[piece : piece + 2].astype(sums.dtype)
                    weighted = two * factors[piece : piece + 2, None].astype(sums.dtype)
                    sums.add_node((piece, piece + 2), weighted[0] + weighted[1])
                    piece += 1
                elif way == 4:  # in three parts, the middle one last
                    add = sums.begin_piece(factors[piece], out=out)
                    for start, end in ((0, 20), (33, 41), (20, 33)):
                        add(start, values[piece, start:end])
                elif way == 2:
                    sums.add_all(values[piece : piece + 1].copy(), factors[piece])
                else:
                    zero = not values[piece].any() and turn % 2
                    out[...] = values[piece]
                    sums.add(None if zero else out, factors[piece], last=True)
                piece += 1
            assert sums.next_row() is None
            # The even ones, and the first one of a rank that begins with an odd one.
            leaves = [i for i in sums.mine if i % 2 == 0 or i == sums.mine.start]
            assert turn or len(leaves) - 2 <= written <= len(leaves)
            if turn % 2:
                sums.begin()
            sums.finish(out)
            work = values.astype(sums.dtype)
            expected = serial(work * factors[:, None].astype(sums.dtype)).astype(dtype)
            assert out.tobytes() == expected.tobytes(), (pieces, dtype, turn)
        sums.close()


@pytest.mark.ranks(1, 3, 4, further=(8,))
def test_dtypes_missing_pieces_and_votes(comm, ways):
    """float16 is rounded once; an empty piece is zero; every rank votes, with pieces or without."""
    for dtype, work in ((np.float16, np.float32), (np.float64, np.float64), (">f4", np.float32)):
        sums = PieceSum(comm, 50, np.dtype(dtype), 5, votes=1)
        values = vectors(5, 50, dtype)
        for piece in sums.mine:
            sums.add(values[piece] if piece != 3 else None, 0.5)
        out = np.empty(50, dtype)
        sums.finish(out, [comm.rank + 1])
        weighted = values.astype(work) * work(0.5)
        weighted[3] = 0
        np.testing.assert_array_equal(out[:-1], serial(weighted)[:-1].astype(dtype))
        assert out[-1] == comm.size * (comm.size + 1) / 2


@pytest.mark.ranks(2)
def test_wrong_calls_are_refused(comm, ways):
    sums = PieceSum(comm, 3, np.float32, 4)
    with pytest.raises(ProtocolError, match="0 of this rank's 2 pieces"):
        sums.finish(np.empty(3, np.float32))
    sums.add(np.ones(3))
    sums.add(np.ones(3))
    with pytest.raises(ProtocolError, match="2 of this rank's 2 pieces were given, now 1 more"):
        sums.add(np.ones(3))
    with pytest.raises(ProtocolError, match="now 3 more"):
        sums.add_all(np.ones((3, 3), np.float32))
    out = np.empty(3, np.float32)
    sums.finish(out)
    assert list(out) == [4, 4, 4]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nodes", [False, True])
def test_a_wrong_call_on_one_rank_is_an_error_on_all(comm, nodes):
    """Also if this rank catches its error, and does not come back."""
    for votes in ([], [1, 2]):
        own = comm.Dup()
        if nodes:
            memory_of(context.of(own), 1)
        sums = PieceSum(own, 3, np.float32, 4, votes=1)
        for _ in sums.mine:
            sums.add(np.ones(2))
        first = comm.rank == 0
        with pytest.raises(ProtocolError if first else MismatchError, match="of 1 votes given"):
            sums.finish(np.empty(3, np.float32), votes if first else [1])
        comm.Barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("when", ["new", "begin", "finish"])
def test_a_wrong_step_of_one_rank_is_an_error_on_all(comm, when):
    own, first = comm.Dup(), comm.rank == 0
    memory_of(context.of(own), 1)  # by messages, as between nodes

    def add_all():
        sums = PieceSum(own, 3, np.float32, "6" if first and when == "new" else 6)
        sums.prepare()
        for _ in sums.mine[1 if first and when == "begin" else 0 :]:
            sums.add(np.ones(3))
        sums.begin()
        sums.finish(np.empty(3, np.float32), [1] if first else ())

    with pytest.raises((ConfigError, ProtocolError) if first else MismatchError, match="pieces"):
        add_all()
    comm.Barrier()


@pytest.mark.ranks(2, 3, 5)
def test_nothing_is_sent_within_a_node(comm):
    """Each partial sum is added once by its block's owner, and the total written p - 1 times."""
    n, pieces, size, rank = 1000, 16, comm.size, comm.rank
    sums = PieceSum(comm, n, np.float64, pieces)
    before = context.of(comm).counters.snapshot()
    for _ in sums.mine:
        sums.add(np.ones(n))
    out = np.empty(n)
    sums.finish(out)
    after = context.of(comm).counters.snapshot()
    moved = {name: after[name] - before[name] for name in after}
    bounds = fixed_tree.cuts(pieces, size)
    held = sum(len(fixed_tree.partials(*bounds[r : r + 2], pieces)) for r in range(size))
    own = BlockPartition(n, size).size(rank)
    assert (out == pieces).all()
    assert moved["messages_sent"] == moved["bytes_sent"] == 0
    assert moved["bytes_reduced"] == (held - 1) * own * 8
    assert moved["shared_bytes"] == (size - 1) * own * 8
    sums.close()
    sums.close()
    assert context.of(comm).counters.snapshot() == after


@pytest.mark.ranks(2, 3)
def test_memory_that_is_not_to_be_had(comm, monkeypatch):
    """A full /dev/shm: all ranks exchange messages instead, to the same bits."""

    def full(_comm, _nbytes, _wait):
        raise ConfigError("no memory shared")

    monkeypatch.setattr(piecewise, "Segment", full)
    sums = PieceSum(comm, 100, np.float32, 5)
    values = vectors(5, 100)
    for piece in sums.mine:
        sums.add(values[piece])
    out = np.empty(100, np.float32)
    sums.finish(out)
    assert out.tobytes() == serial(values).tobytes()
    assert context.of(comm).counters.messages_sent > 0


@pytest.mark.ranks(2, 3)
def test_sums_that_differ_are_refused(comm):
    """Different lengths would map memory of different sizes."""
    with pytest.raises(MismatchError, match="piece_sum"):
        PieceSum(comm, 100 + comm.rank, np.float32, 4)


@pytest.mark.ranks(2, 3, 5, 8)
def test_counters_equal_the_formulas(comm):
    """k partial sums cost k (p-1)/p N bytes and the total (p-1)/p N; a binary tree 2 (p-1)/p N."""
    memory_of(context.of(comm), 1)  # nodes of one rank: everything travels
    n, size, rank = 40 * comm.size + 1, comm.size, comm.rank
    own = BlockPartition(n, size).size(rank)
    for pieces in (size, 16, 3 * size):
        sums = PieceSum(comm, n, np.float64, pieces)
        out = np.empty(n)
        for _ in range(2):  # the first one also makes the plan
            before = context.of(comm).counters.snapshot()
            for _piece in sums.mine:
                sums.add(np.ones(n))
            sums.finish(out)
        after = context.of(comm).counters.snapshot()
        messages, sent = (after[name] - before[name] for name in ("messages_sent", "bytes_sent"))
        assert (out == pieces).all()
        bounds = fixed_tree.cuts(pieces, size)
        most = -(-pieces // size)
        k = len(fixed_tree.partials(bounds[rank], bounds[rank + 1], pieces))
        if size in (2, 8) and most & (most - 1) == 0:
            rounds = size.bit_length() - 1  # short: whole vectors
            assert (messages, sent) == (rounds, rounds * n * 8)
        else:
            assert messages == (k + 1) * (size - 1)
            assert sent == (k * (n - own) + (size - 1) * own) * 8
