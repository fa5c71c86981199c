"""Simulate one rank of a node with many ranks in one process, and count its work."""

import sys
import threading

import numpy as np
import pytest

from mpidist.bench.node_times import FakedNode, measure
from mpidist.collectives.engines.staging import ALLGATHER, REDUCE_SCATTER, STAGED, StagedProgram
from mpidist.collectives.schedules import node
from mpidist.partition import BlockPartition


class Meeting:
    """The gate of ranks that are threads."""

    def __init__(self, barrier):
        self.sync = barrier.wait

    def announce(self, key):
        """Threads know what they are in."""

    check = announce


def run_all(form, size, vectors, lanes, memory, ufunc, divisor=None):
    """Run one operation on all ranks of a node at once, in place."""
    barrier = threading.Barrier(size, timeout=60)

    def rank(r):
        x = vectors[r]
        place = Meeting(barrier), form, size, r
        program = StagedProgram(*place, x.size, lanes, memory, x.dtype, ufunc)
        program.run(x, 1, 0, divisor)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one_by_one(ufunc, vectors, lanes, divisor=None):
    """The sum in the order of the steps: the owner's, then the others' in rank order."""
    n = vectors[0].size
    total = np.empty_like(vectors[0])
    for owner in range(lanes):
        span = slice(*BlockPartition(n, lanes).range(owner))
        total[span] = vectors[owner][span]
        for r, vector in enumerate(vectors):
            if r != owner:
                ufunc(total[span], vector[span], out=total[span])
    return total if divisor is None else total / divisor


def awkward(size, n, dtype, seed):
    """Values of many sizes, with signed zeros and NaN where there are such.

    Of NaN and -NaN NumPy's own loops keep one or the other, as the array lies in memory.
    """
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(size, n)) * 10.0 ** rng.integers(-3, 4, (size, n))
    if np.dtype(dtype).kind in "fc":
        values[rng.random((size, n)) < 0.3] = -0.0
        values[rng.random((size, n)) < 0.01] = np.nan
    return values.astype(dtype)


@pytest.mark.covering
@pytest.mark.ranks(1)
@pytest.mark.parametrize(("size", "lanes"), [(1, 1), (2, 2), (3, 2), (5, 5), (17, 17), (19, 3)])
@pytest.mark.parametrize("dtype", ["f4", "c16", "i1"])
def test_blocks_are_the_steps(comm, monkeypatch, size, lanes, dtype):
    """Bit for bit, also NaN and signed zeros; whole and in halves; few elements and many rounds."""
    monkeypatch.setattr(node, "ROUND_BYTES", 64 * size)  # a line per piece
    memory = np.full(node.staging_bytes(size), 255, np.uint8)
    for ufunc in (np.add, np.maximum) if dtype != "c16" else (np.add,):
        for n in (0, 1, lanes - 1, lanes, lanes + 1, 16 * lanes, 33 * lanes + 2):
            values = awkward(size, n, dtype, n)
            expected = one_by_one(ufunc, values, lanes).tobytes()
            if lanes == size:
                vectors = [v.copy() for v in values]
                run_all(STAGED, size, vectors, lanes, memory, ufunc)
                assert {v.tobytes() for v in vectors} == {expected}
            vectors = [v.copy() for v in values]
            run_all(REDUCE_SCATTER, size, vectors, lanes, memory, ufunc)
            run_all(ALLGATHER, size, vectors, lanes, memory, ufunc)
            assert {v.tobytes() for v in vectors} == {expected}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("size", [3, 17])
def test_a_mean(comm, monkeypatch, size):
    monkeypatch.setattr(node, "ROUND_BYTES", 64 * size)
    memory = np.zeros(node.staging_bytes(size), np.uint8)
    values = awkward(size, 200, "f8", 1)
    for forms in ((STAGED,), (REDUCE_SCATTER, ALLGATHER)):
        vectors = [v.copy() for v in values]
        for form in forms:
            divisor = 7.0 if form == forms[-1] else None
            run_all(form, size, vectors, size, memory, np.add, divisor)
        assert {v.tobytes() for v in vectors} == {one_by_one(np.add, values, size, 7.0).tobytes()}


@pytest.mark.covering
@pytest.mark.ranks(1)
@pytest.mark.parametrize("size", [2, 16, 17, 96])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i1", "u2", "f2"])
@pytest.mark.parametrize("op", ["sum", "max", "prod"])
def test_slots_are_added_in_rank_order(comm, size, dtype, op):
    """All at once or one by one: the same bits, in any layout of the result."""
    if op == "max" and dtype == "c16":
        return
    for shape in ((), (1,), (1, 1), (2,), (2, 3), (7, 1), (0,)):
        n = int(np.prod(shape))
        faked = FakedNode(size, size // 2)
        run, form = faked.allreduce(n, dtype, op)
        assert form == "flat"
        engine = faked.flat
        work = engine.reduction.work
        with np.errstate(all="ignore"):
            values = awkward(size, n, dtype, n).astype(work)
            for slots in engine.sets:
                slots[...] = values.reshape(size, n)
            expected = values[0]
            for value in values[1:]:
                expected = engine.reduction.ufunc(expected, value)
            expected = expected.astype(dtype)
            for x in (np.empty(n, dtype), np.empty((n, 3), dtype)[:, 1], np.empty(n, dtype)[::-1]):
                x[...] = values[size // 2]
                run(x)
                assert x.tobytes() == expected.tobytes(), (shape, x.strides)


def lines_of(run, x):
    """Lines of Python that one call executes."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    run(x)
    sys.settrace(trace)
    try:
        run(x)
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.ranks(1)
def test_the_work_of_a_rank_does_not_grow_with_its_node(comm):
    """Lines of Python, each with a call of NumPy at most: as many on 256 ranks as on 32."""
    counts = {}
    for size in (32, 96, 256):
        faked = FakedNode(size, size // 2)
        counts[size] = lines_of(faked.allreduce(2)[0], np.zeros(2, "f4"))
    assert counts[32] == counts[96] == counts[256] <= 50
    for size in (32, 96, 256):
        faked = FakedNode(size, size // 2)
        rounds = 2
        n = size * (node.piece_bytes(size) // 4) * rounds
        run, form = faked.allreduce(n)
        assert form == "staged"
        assert lines_of(run, np.zeros(n, "f4")) <= 40 + 60 * rounds
    faked = FakedNode(96, 48)
    run, _ = faked.allreduce(1 << 17)
    assert lines_of(run, np.zeros(1 << 17, "f4")) <= 300  # 512 KiB: one by one it was 2,000


@pytest.mark.ranks(1)
def test_the_bench(comm):
    row = measure(96, 8, rounds=2)
    assert (row["ranks"], row["bytes"], row["form"]) == (96, 8, "flat")
    assert row["us"] > 0
    assert row["staging_bytes"] <= 32 << 20
    assert measure(96, 512 << 10, rounds=2)["form"] == "staged"
