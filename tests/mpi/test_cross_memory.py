"""The ranks of a node copy private vectors of other ranks by the kernel (R79, R101)."""

import os
import subprocess
from functools import partial

import numpy as np
import pytest

import mpidist as md
from mpidist.collectives.engines import cross_copy
from mpidist.collectives.engines.node_barrier import ADDRESS, memory_of
from mpidist.errors import ConfigError, MismatchError, MpidistError
from mpidist.runtime import ulfm
from mpidist.runtime.context import of
from mpidist.runtime.node_memory import cross_memory
from mpidist.runtime.node_memory.cross_memory import CrossMemory
from mpidist.runtime.polling import wait_until


@pytest.fixture
def reached(monkeypatch):
    """Every vector that is not flat is reached."""
    monkeypatch.setattr(cross_copy, "REACHED_BYTES", 0)


@pytest.mark.ranks(2)
def test_it_works_where_the_tests_run(comm):
    """Linux as it is installed allows it; without it the other tests would stage unseen."""
    assert memory_of(of(comm)).cross is not None


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 5, 8)
@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", "f4"), ("mean", "f4"), ("mean", "f8"), ("max", "f8"), ("sum", "i4")]
)
def test_the_same_bits_as_staged(comm, reached, op, dtype):
    """Nodes may choose differently, so both must add in the same order."""
    n = 150_001
    values = np.random.default_rng(3).normal(size=(comm.size, n)) * 1000
    x = values[comm.rank].astype(dtype)
    y = x.copy()
    z = x.copy()
    md.allreduce(comm, x, op, algorithm="node")
    md.allreduce(comm, z, op, algorithm="single_copy")
    one, two = of(comm).plans.values()
    assert type(one.engine.second) is type(two.engine) is cross_copy.CrossProgram
    other = comm.Dup()
    memory_of(of(other)).cross = None
    md.allreduce(other, y, op, algorithm="node")
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(z, y)
    together = comm.allgather(x.tobytes())
    assert set(together) == {x.tobytes()}
    md.free(other)
    other.Free()


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("algorithm", ["node", "single_copy"])
def test_vectors_that_move(comm, reached, algorithm):
    """Addresses are told anew each time; what follows at once is never mixed up with it."""
    for step in range(30):
        n = 20_000 + 997 * step
        x = np.full(n, comm.rank + step, "f8")
        md.allreduce(comm, x, algorithm=algorithm)
        assert (x == step * comm.size + comm.size * (comm.size - 1) // 2).all()
        x[:] = -1  # nobody reads or writes it any more
        z = np.full(n, 1, "f8")
        md.allreduce(comm, z, algorithm=algorithm)
        assert (x == -1).all()
        assert (z == comm.size).all()


@pytest.mark.covering
@pytest.mark.ranks(3, 4, 5, 8)
@pytest.mark.parametrize("ranks_per_node", [2, 3])
def test_lanes_between_nodes(comm, monkeypatch, ranks_per_node):
    """One node reaches, the other stages: the same sum."""
    monkeypatch.setattr(cross_copy, "REACHED_BYTES", 0)
    memory = memory_of(of(comm), ranks_per_node)
    if memory.topology.node % 2:
        memory.cross = None
    for n in (30_001, 200_001):
        values = np.random.default_rng(n).integers(-3, 4, (comm.size, n)).astype("f8")
        for op, expected in (("sum", values.sum(0)), ("mean", values.sum(0) / comm.size)):
            x = values[comm.rank].copy()
            md.allreduce(comm, x, op, algorithm="hierarchical")
            np.testing.assert_array_equal(x, expected)


@pytest.mark.ranks(2, 3)
def test_a_process_number_of_another_namespace(comm, monkeypatch):
    """A container may give our number to a stranger: found out by reading, and all stage."""
    stranger = os.getppid()
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(os, "getpid", lambda: stranger)
        with pytest.raises(ConfigError, match="cannot reach each other"):
            CrossMemory(comm, wait_until)


@pytest.mark.ranks(2)
def test_a_process_number_of_an_ended_process(comm, monkeypatch):
    """In an elastic group nothing is written to a number that another process may have by now."""
    monkeypatch.setattr(ulfm, "current", object())
    memory, there, here = CrossMemory(comm, wait_until), np.zeros(4), np.ones(4)
    memory.write(comm.rank, there.ctypes.data, here.ctypes.data, 32)
    assert there.tolist() == [1.0] * 4
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(
            os, "pidfd_open", partial(lambda open_, _: open_(ended.pid), os.pidfd_open)
        )
        with pytest.raises(ConfigError, match="a process of this node has ended"):
            CrossMemory(comm, wait_until)
    comm.Barrier()


@pytest.mark.ranks(2)
def test_memory_that_is_not_there(comm):
    memory = CrossMemory(comm, wait_until)
    mine = np.zeros(8)
    with pytest.raises(MpidistError, match=r"64 bytes at 0x10 of process .*: Bad address"):
        memory.read(1 - comm.rank, 16, mine.ctypes.data, 64)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 100])
def test_more_bytes_than_one_call_copies(comm, monkeypatch, nbytes):
    """The kernel copies at most 2 GiB less a page: longer runs go in pieces."""
    memory = CrossMemory(comm, wait_until)
    here, there = np.arange(100, dtype="u1"), np.zeros(102, "u1")
    monkeypatch.setattr(cross_memory, "_MOST", 7)
    memory.write(0, there.ctypes.data + 1, here.ctypes.data, nbytes)
    assert (there[1 : nbytes + 1] == here[:nbytes]).all()
    assert not there[nbytes + 1 :].any()
    back = np.full(102, 255, "u1")
    memory.read(0, there.ctypes.data + 1, back.ctypes.data + 1, nbytes)
    assert (back[1 : nbytes + 1] == here[:nbytes]).all()
    assert (back[nbytes + 1 :] == 255).all()


@pytest.mark.ranks(2, 3)
def test_ranks_in_different_operations_touch_nothing(comm, reached):
    other = comm.Dup()
    x = np.full(60_000, comm.rank, "f4" if comm.rank else "f8")
    for dtype in ("f4", "f8"):
        md.allreduce(other, np.zeros(60_000, dtype), algorithm="node")
    with pytest.raises(MismatchError, match=r"float32.*float64|float64.*float32"):
        md.allreduce(other, x, algorithm="node")
    assert (x == comm.rank).all()


@pytest.mark.ranks(2, 3)
def test_what_was_broken_off_stays_where_it_is(comm, reached):
    """Others may still write into the vector of a call that was left."""
    x = np.ones(60_000)
    md.allreduce(comm, x, algorithm="node")
    engine = next(iter(of(comm).plans.values())).engine
    assert engine.second._held is None

    def interrupted(*args):
        raise KeyboardInterrupt

    engine.first.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.run(x, 1, of(comm).sequence + 1)
    assert engine.second._held is x


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_memory_that_the_kernel_does_not_copy_is_staged(comm, reached, monkeypatch, op):
    """Memory pinned for a GPU, say: all ranks of the node see that one rank has told no address."""
    assert not memory_of(of(comm)).cross.holds(16, 1)
    values = np.random.default_rng(5).normal(size=(comm.size, 150_001))
    expected, results = values[comm.rank].copy(), []
    md.allreduce(comm, expected, op, algorithm="node")
    engine = next(iter(of(comm).plans.values())).engine
    written = []
    write = engine.second.memory.write
    monkeypatch.setattr(engine.second.memory, "write", lambda *a: (written.append(a), write(*a))[1])
    for own in (False, True, False):
        monkeypatch.setattr(
            engine.second.memory, "holds", lambda *a, own=own: own or comm.rank != 0
        )
        x = values[comm.rank].copy()
        results.append(x)  # the next one lies elsewhere
        del written[:]
        md.allreduce(comm, x, op, algorithm="node")
        assert bool(written) is own
        assert engine.second._held is None
        np.testing.assert_array_equal(x, expected)


@pytest.mark.ranks(2, 3)
def test_a_vector_that_cannot_be_written_fails_on_all_ranks(comm, reached):
    """Memory of a device, say. Nobody returns with half a result, and nobody waits for ever."""
    other = comm.Dup()
    x = np.ones(60_000)
    md.allreduce(other, x, algorithm="node")
    engine = next(iter(of(other).plans.values())).engine
    if comm.rank == 0:
        prepare = engine.second.prepare

        def elsewhere(vector):
            prepare(vector)
            engine.gate.lines[engine.gate.mine + ADDRESS] = 16

        engine.second.prepare = elsewhere
    for _ in range(2):
        with pytest.raises(MismatchError, match=r"cross memory: .*Bad address"):
            md.allreduce(other, x, algorithm="node")


@pytest.mark.ranks(2, 3, further=(5,))
def test_a_single_copy_of_any_length(comm, monkeypatch):
    """Shorter than the ranks, one piece, several; on an arena, with a mean, without the kernel."""
    monkeypatch.setattr(cross_copy, "PIECE_BYTES", 4 << 10)
    for n in (0, 1, 2, 7, 1000, 5000):
        values = np.random.default_rng(n).integers(-3, 4, (comm.size, n)).astype("f4")
        x = values[comm.rank].copy()
        md.allreduce(comm, x, algorithm="single_copy")
        np.testing.assert_array_equal(x, values.sum(0))
        with md.Arena(comm, {"x": (n, "f4")}) as arena:
            arena["x"][...] = values[comm.rank]
            md.allreduce(comm, arena, algorithm="single_copy")
            np.testing.assert_array_equal(arena["x"], values.sum(0))
        other = comm.Dup()
        memory_of(of(other)).cross = None
        x[...] = values[comm.rank]
        md.allreduce(other, x, "mean", algorithm="single_copy")
        np.testing.assert_allclose(x, values.mean(0), rtol=1e-6, atol=1e-6)
        md.free(other)
        other.Free()


@pytest.mark.ranks(4)
def test_a_single_copy_between_nodes(comm):
    memory_of(of(comm), 2)
    with pytest.raises(ConfigError, match="algorithm='single_copy': the 4 ranks are on 2 nodes"):
        md.allreduce(comm, np.ones(3), algorithm="single_copy")
