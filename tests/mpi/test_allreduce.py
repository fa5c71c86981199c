"""md.allreduce equals reference results, in all algorithms and dtypes (R29-R33, R35, R37, R74)."""

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.arrays import host_empty
from mpidist.collectives.engines import executor
from mpidist.collectives.schedules import algorithms, double_tree
from mpidist.errors import ConfigError
from mpidist.runtime import buffer_pool
from mpidist.runtime.context import of

NAMES = ["auto", "native", *algorithms.NODE, *algorithms.ALLREDUCE]
OPS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def vectors(size, n, dtype, seed=0):
    """One vector per rank: small integers, so that every order of addition is exact."""
    rng = np.random.default_rng((seed, n))
    return [rng.integers(1, 4, n).astype(dtype) for _ in range(size)]


def same_bits(comm, x):
    """Whether all ranks hold the same bytes."""
    return len(set(comm.allgather(np.ascontiguousarray(host(x)).tobytes()))) == 1


@pytest.mark.ranks(1, 2, 3, 4, 5, 8, further=(6, 7, 9))
def test_sum_is_exact_for_every_algorithm_and_length(comm, xp):
    p = comm.size
    for name in NAMES:
        for n in (0, 1, max(p - 1, 0), p, p + 1, 1000):
            data = vectors(p, n, np.float32)
            x = xp.array(data[comm.rank])
            assert md.allreduce(comm, x, algorithm=name) is x
            np.testing.assert_array_equal(host(x), sum(data[1:], data[0]))


@pytest.mark.ranks(1, 4, further=(3,))
def test_ops_and_dtypes(comm, xp):
    """R31: sum, min, max, average for all algorithms; every float, int, complex dtype."""
    for name in NAMES:
        for dtype in "bhilqBHILQefdgFDG":
            for op, ufunc in OPS.items():
                if np.dtype(dtype).kind == "c" and op in ("min", "max"):
                    continue
                if xp is not np and dtype in "gG":
                    continue
                data = vectors(comm.size, 7, dtype)
                x = xp.array(data[comm.rank])
                md.allreduce(comm, x, op, algorithm=name)
                expected = ufunc.reduce(np.array(data), axis=0, dtype=data[0].dtype)
                np.testing.assert_array_equal(host(x), expected)


@pytest.mark.ranks(1, 4)
def test_long_vectors_of_every_algorithm(comm):
    for name in NAMES:
        data = vectors(comm.size, 300_001, np.float64)
        x = data[comm.rank].copy()
        md.allreduce(comm, x, algorithm=name)
        np.testing.assert_array_equal(x, sum(data[1:], data[0]))


@pytest.mark.ranks(3)
def test_bool_min_max(comm):
    for name in NAMES:
        x = np.array([True, comm.rank == 1, False])
        assert md.allreduce(comm, x.copy(), "max", algorithm=name).tolist() == [True, True, False]
        assert md.allreduce(comm, x.copy(), "min", algorithm=name).tolist() == [True, False, False]


@pytest.mark.ranks(2, 3, further=(8,))
def test_replicas_are_bit_identical(comm, xp):
    """R28, R121: the promise behind data parallelism, for sums that round."""
    rng = np.random.default_rng(comm.rank)
    for name in NAMES:
        for dtype in ("f4", "f8", "f2", "c8"):
            x = xp.asarray((rng.standard_normal(1003) * 10).astype(dtype))
            md.allreduce(comm, x, algorithm=name)
            assert same_bits(comm, x), (name, dtype)


@pytest.mark.ranks(2, further=(5,))
def test_nan_propagates_and_zero_signs_agree(comm):
    for name in NAMES:
        for op in ("sum", "mean", "min", "max", "prod"):
            x = np.array([1.0, -0.0 if comm.rank % 2 else 0.0, 2.0])
            if comm.rank == comm.size - 1:
                x[0] = np.nan
            md.allreduce(comm, x, op, algorithm=name)
            assert np.isnan(x[0]), (name, op)
            assert not np.isnan(x[1:]).any()
            assert same_bits(comm, x), (name, op)


@pytest.mark.ranks(4)
def test_half_precision_is_summed_in_single(comm):
    """2048 + 1 is 2048 in float16: sums that were rounded on the way would lose the ones."""
    import ml_dtypes

    for name in NAMES:
        for dtype, big in ((np.float16, 2048), (ml_dtypes.bfloat16, 256)):
            x = np.full(5, big if comm.rank == 0 else 1, dtype)
            md.allreduce(comm, x, algorithm=name)
            expected = np.float32(big + comm.size - 1).astype(dtype)
            assert (x == expected).all(), (name, dtype, x)
            assert x.dtype == dtype


@pytest.mark.ranks(1, 2, further=(4,))
def test_mean_and_weighted_mean(comm, xp):
    """R31: the average weighted by samples."""
    for name in NAMES:
        x = xp.full(6, float(comm.rank), dtype=xp.float32)
        md.allreduce(comm, x, "mean", algorithm=name)
        np.testing.assert_allclose(host(x), (comm.size - 1) / 2)
        y = xp.full(6, float(comm.rank), dtype=xp.float32)
        md.allreduce(comm, y, "mean", algorithm=name, weight=comm.rank + 1)
        weights = np.arange(1, comm.size + 1)
        np.testing.assert_allclose(host(y), np.average(np.arange(comm.size), weights=weights))


@pytest.mark.ranks(3)
def test_layouts(comm, xp):
    """Strided, Fortran, 0-d, big-endian; ranks may differ in memory order."""
    for name in NAMES:
        base = xp.zeros((6, 8), dtype=xp.float32)
        view = base[::2, 1::3]
        view[...] = comm.rank + 1
        md.allreduce(comm, view, algorithm=name)
        assert float(view.sum()) == 6 * view.size
        assert float(base.sum()) == 6 * view.size
        plain = np.arange(12, dtype=np.float64).reshape(3, 4)
        x = plain.copy(order="F" if comm.rank else "C")
        md.allreduce(comm, x, algorithm=name)
        np.testing.assert_array_equal(x, 3 * plain)
        scalar = np.array(float(comm.rank))
        assert md.allreduce(comm, scalar, algorithm=name) == 3
        swapped = np.full(3, comm.rank, ">f8" if comm.rank == 1 else "<f8")
        md.allreduce(comm, swapped, algorithm=name)
        assert swapped.tolist() == [3, 3, 3]


@pytest.mark.ranks(3)
def test_out_leaves_the_input_alone(comm, xp):
    for name in NAMES:
        x = xp.full(5, comm.rank + 1.0)
        out = xp.empty_like(x)
        assert md.allreduce(comm, x, out=out, algorithm=name) is out
        assert host(out).tolist() == [6.0] * 5
        assert host(x).tolist() == [comm.rank + 1.0] * 5


@pytest.mark.ranks(4)
def test_a_ufunc(comm):
    for name in NAMES:
        x = np.array([1 << comm.rank, 1], np.int64)
        md.allreduce(comm, x, np.bitwise_or, algorithm=name)
        assert x.tolist() == [15, 1]


@pytest.mark.ranks(1, 2, further=(5,))
def test_nonblocking(comm):
    for name in NAMES:
        arrays = [np.full(n, float(comm.rank)) for n in (1, 100, 5000, 100)]
        handles = [md.iallreduce(comm, x, algorithm=name) for x in arrays]
        for handle, x in reversed(list(zip(handles, arrays, strict=True))):
            assert handle.wait() is x
            assert (x == comm.size * (comm.size - 1) / 2).all()
            assert handle.test()


@pytest.mark.ranks(1, 2, 3)
def test_bound_plan(comm):
    for name in NAMES:
        x = np.zeros(17)
        run = md.plan(comm, x, algorithm=name)
        for step in range(4):
            x[:] = comm.rank + step
            assert run() is x
            expected = comm.size * step + comm.size * (comm.size - 1) / 2
            assert x.tolist() == [expected] * 17


@pytest.mark.ranks(3)
def test_messages_are_cut(comm, monkeypatch):
    """No message reaches 2^31 elements: tested with a limit of 40 bytes (R32)."""
    monkeypatch.setattr(executor, "MAX_MESSAGE", 40)
    import mpidist.collectives.engines.native as native

    monkeypatch.setattr(native, "MAX_MESSAGE", 40)
    for name in NAMES:
        x = np.full(303, comm.rank + 1.0)
        md.allreduce(comm, x, algorithm=name)
        assert (x == 6).all()


@pytest.mark.ranks(2, 3, 4, 8)
def test_counters_equal_the_formulas(comm):
    """R38, R123: bytes and messages per rank, counted at run time."""
    p, n = comm.size, 840
    size = 4 * n
    expected = {
        "ring": (2 * (p - 1), 2 * (p - 1) * size // p),
        "direct": (p - 1, (p - 1) * size),
    }
    if p & (p - 1) == 0:
        k = p.bit_length() - 1
        expected["recursive_doubling"] = (k, k * size)
        expected["halving_doubling"] = (2 * k, 2 * (p - 1) * size // p)
    # One segment: half a vector up to each parent and half a vector down to each child.
    places = [double_tree.tree_place(p, comm.rank, tree) for tree in (0, 1)]
    links = sum((place.parent is not None) + len(place.children) for place in places)
    expected["double_tree"] = (links, links * size // 2)
    for name, (messages, nbytes) in expected.items():
        x = np.zeros(n, np.float32)
        of(comm).counters.reset()
        md.allreduce(comm, x, algorithm=name)
        counters = of(comm).counters
        assert counters.messages_sent == messages
        assert counters.bytes_sent == nbytes
        assert counters.messages_received == messages


@pytest.mark.ranks(2)
def test_bad_input_is_refused_in_one_line(comm):
    x = np.zeros(3)
    with pytest.raises(ConfigError, match=r"rnig.*ring, tree.*did you mean 'ring'"):
        md.allreduce(comm, x, algorithm="rnig")
    with pytest.raises(ConfigError, match=r"mean.*int64"):
        md.allreduce(comm, np.zeros(3, np.int64), "mean")
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(ConfigError, match="read-only"):
        md.allreduce(comm, frozen)
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        md.allreduce(comm, x, "maen")
    with pytest.raises(ConfigError, match="list"):
        md.allreduce(comm, [1, 2])
    with pytest.raises(ConfigError, match="out has shape"):
        md.allreduce(comm, x, out=np.zeros(4))
    with pytest.raises(ConfigError, match="add up to 0"):
        md.allreduce(comm, x, "mean", weight=0)
    with pytest.raises(ConfigError, match="complex"):
        md.allreduce(comm, np.zeros(3, complex), "max")


@pytest.mark.ranks(4)
def test_a_sub_communicator(comm):
    """R30: a group may be a subset of all; contexts do not mix."""
    half = comm.Split(comm.rank % 2, comm.rank)
    x, y = np.ones(3), np.ones(3)
    md.allreduce(half, x)
    md.allreduce(comm, y)
    assert x.tolist() == [2] * 3
    assert y.tolist() == [4] * 3
    md.free(half)
    half.Free()


@pytest.mark.ranks(2, 3)
def test_messages_of_the_program_are_left_alone(comm):
    """R30: what a program waits for on its communicator, from anybody, is not ours to send."""
    own, peer = np.zeros(1), (comm.rank + 1) % comm.size
    request = comm.Irecv(own, MPI.ANY_SOURCE, MPI.ANY_TAG)
    for name in NAMES:
        x = np.full(1, comm.rank + 1.0)
        md.allreduce(comm, x, algorithm=name)
        assert x == comm.size * (comm.size + 1) / 2
        assert not request.Test(), name
    comm.Barrier()
    comm.Send(np.array([7.0]), peer)
    request.Wait()
    assert own == 7


@pytest.mark.ranks(2)
def test_plans_are_bounded_and_buffers_reused(comm, monkeypatch):
    """R34: nothing is allocated per step; R41: nothing grows without bound."""
    import mpidist.collectives.plan as plans

    monkeypatch.setattr(plans, "MAX_PLANS", 8)
    for n in range(1, 40):
        md.allreduce(comm, np.zeros(n), algorithm="ring")
    assert len(of(comm).plans) <= 8
    x = np.zeros(100_000, np.float32)  # of fewer, scratch is made anew
    run = md.plan(comm, x, algorithm="ring")
    run()
    made, pool = [], of(comm).pool
    monkeypatch.setattr(buffer_pool, "host_empty", lambda *given: made.append(given))
    kept = pool.kept
    for _ in range(5):
        run()
    assert not made
    assert pool.kept == kept > 0


@pytest.mark.ranks(2)
def test_auto_is_frozen_and_restorable(comm):
    from mpidist.collectives import selection

    x = np.zeros(20_000)
    md.allreduce(comm, x)
    chosen = selection.table(comm)
    assert len(chosen) == 1
    entry = next(iter(chosen.values()))
    assert set(entry["us"]) == set(selection.candidates(of(comm)))
    md.allreduce(comm, x)
    assert selection.table(comm) == chosen
    assert comm.allgather(chosen) == [chosen] * comm.size
    other = comm.Dup()
    forced = {k: {**v, "algorithm": "tree"} for k, v in chosen.items()}
    selection.restore(other, forced)
    assert md.plan(other, x).algorithm == "tree"
    md.free(other)
    other.Free()


def test_host_empty_is_plain_without_a_device():
    assert host_empty(3, np.float32).shape == (3,)
