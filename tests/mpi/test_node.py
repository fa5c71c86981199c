"""Arenas, allreduce inside a node, lanes between nodes, on faked nodes of one host (R79, R101)."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.collectives.engines import node_barrier, node_short
from mpidist.collectives.engines.hierarchical import lanes_of
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.collectives.engines.programs import settle
from mpidist.collectives.schedules import node
from mpidist.errors import ClosedError, ConfigError, MismatchError
from mpidist.runtime.context import of
from mpidist.runtime.node_memory import arena as arena_module

SPEC = {"w": ((7, 3), "f4"), "b": (5, "f4"), "none": ((0, 2), "f4"), "scale": ((), "f4")}


def left_behind():
    """Segments of this rank that still have a name."""
    return list(Path("/dev/shm").glob(f"mpidist-{os.getpid()}-*"))


@pytest.mark.ranks(1, 2, 3, 5, 8)
def test_an_arena_is_named_views_of_one_vector(comm):
    with md.Arena(comm, SPEC) as arena:
        assert list(arena) == list(SPEC)
        assert (len(arena), arena.flat.size, arena["w"].shape) == (4, 27, (7, 3))
        assert arena["scale"].shape == ()
        assert (arena.flat == 0).all()
        arena["b"][...] = comm.rank + 1
        assert arena.flat.sum() == 5 * (comm.rank + 1)
        comm.Barrier()
        # Every rank sees the slots of its node where they lie.
        assert [slot.sum() for slot in arena.slots[0]] == [5 * (r + 1) for r in range(comm.size)]
        comm.Barrier()
        assert not left_behind()
    with pytest.raises(ClosedError, match="closed"):
        arena["w"]
    arena.close()


@pytest.mark.ranks(2)
def test_memory_keeps_no_file_open(comm):
    """A process may have few files open, and a program many plans and models."""
    first = md.Arena(comm, SPEC)
    gc.collect()
    files = len([*Path("/proc/self/fd").iterdir()])
    arenas = [md.Arena(comm, SPEC) for _ in range(4)]
    assert len([*Path("/proc/self/fd").iterdir()]) == files
    maps = Path("/proc/self/maps").read_text()
    for arena in arenas:
        arena.close()
    del arenas, arena
    gc.collect()
    # Each of them was one mapping of /dev/shm.
    assert Path("/proc/self/maps").read_text().count("/dev/shm/") == maps.count("/dev/shm/") - 4
    first.close()


@pytest.mark.ranks(2, 5)
@pytest.mark.parametrize("sees", [True, False], ids=["in /proc", "by a name"])
def test_how_the_ranks_find_the_memory(comm, monkeypatch, sees):
    """A rank that is killed meanwhile leaves no file: it has a name only if /proc shows no other.

    R41: one rank that sees other processes, as in a container of its own, is enough for that.
    """
    names, real = set(), arena_module._identity

    def identity(path):
        names.update(Path("/dev/shm").glob("mpidist-*"))
        return real(Path("/proc/self/stat") if path.parts[1] == "proc" and not sees else path)

    if comm.rank:
        monkeypatch.setattr(arena_module, "_identity", identity)
    ours = [f"mpidist-{pid}-" for pid in comm.allgather(os.getpid())]
    with md.Arena(comm, SPEC) as arena:
        assert arena.shared
        arena.flat[...] = 1
        md.allreduce(comm, arena)
        assert (arena.flat == comm.size).all()
    assert comm.rank == 0 or sees is not any(name.name.startswith(tuple(ours)) for name in names)
    comm.Barrier()
    assert not left_behind()


@pytest.mark.ranks(2, 3)
def test_an_arena_of_several_dtypes(comm):
    spec = {"a": (10, "f4"), "i": (3, "i8"), "c": (4, "f4"), "h": (6, "f2")}
    with md.Arena(comm, spec) as arena:
        assert [v.dtype.char for v in arena.vectors] == ["f", "l", "e"]
        assert arena.vectors[0].size == 14
        with pytest.raises(ConfigError, match=r"arena\.vectors"):
            _ = arena.flat
        for name in arena:
            arena[name][...] = comm.rank + 1
        assert md.allreduce(comm, arena) is arena
        total = comm.size * (comm.size + 1) // 2
        assert all((arena[name] == total).all() for name in arena)


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3, 4, 5, 8)
@pytest.mark.parametrize("n", [1, 3, 2047, 2048, 100_003])
def test_allreduce_of_an_arena(comm, n):
    """Sums, means, weights; the result may be written over and reduced again."""
    rng = np.random.default_rng(n)
    values = rng.integers(-3, 4, (comm.size, n)).astype("f4")
    with md.Arena(comm, {"x": (n, "f4")}) as arena:
        run = md.plan(comm, arena)
        for _ in range(3):
            arena.flat[...] = values[comm.rank]
            md.allreduce(comm, arena)
            np.testing.assert_array_equal(arena.flat, values.sum(0))
            arena.flat[...] = values[comm.rank]
            assert run() is arena
            np.testing.assert_array_equal(arena.flat, values.sum(0))
        arena.flat[...] = values[comm.rank]
        md.allreduce(comm, arena, "mean", weight=comm.rank + 1)
        weights = np.arange(1, comm.size + 1)
        np.testing.assert_allclose(
            arena.flat, np.average(values, axis=0, weights=weights), rtol=1e-5, atol=1e-6
        )
        for name in ("ring", "native"):
            arena.flat[...] = values[comm.rank]
            md.allreduce(comm, arena, "max", algorithm=name)
            np.testing.assert_array_equal(arena.flat, values.max(0))


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 4, 5, 7, 8)
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3])
def test_hierarchical_on_uneven_nodes(comm, ranks_per_node):
    """R79: also where the last node is smaller; private vectors and arenas; exact sums."""
    memory = memory_of(of(comm), ranks_per_node)
    assert memory.topology.nodes == -(-comm.size // ranks_per_node)
    for n in (0, 1, 5, 1000, 200_001):
        once = np.arange(n) % 7 - 3.0
        mine, total = once * (comm.rank + 1), once * (comm.size * (comm.size + 1) / 2)
        x = mine.copy()
        md.allreduce(comm, x, algorithm="hierarchical")
        np.testing.assert_array_equal(x, total)
        x[...] = mine
        md.allreduce(comm, x, "mean", algorithm="hierarchical")
        np.testing.assert_array_equal(x, total / comm.size)
        x[...] = mine
        md.allreduce(comm, x)
        np.testing.assert_array_equal(x, total)
        with md.Arena(comm, {"x": (n, "f8")}, ranks_per_node=ranks_per_node) as arena:
            for _ in range(2):
                arena["x"][...] = mine
                md.allreduce(comm, arena)
                np.testing.assert_array_equal(arena["x"], total)


@pytest.mark.ranks(4, 8)
def test_one_copy_per_node_crosses_the_wire(comm):
    """R79: 2(P-1)/P N bytes leave a node of a long vector, over all of its lanes."""
    memory = memory_of(of(comm), 2)
    n, nodes = 400_000, memory.topology.nodes
    x = np.ones(n, np.float32)
    md.allreduce(comm, x, algorithm="hierarchical")
    before = of(comm).counters.snapshot()
    md.allreduce(comm, x, algorithm="hierarchical")
    after = of(comm).counters.snapshot()
    mine = after["bytes_sent"] - before["bytes_sent"]
    node_bytes = memory.topology.intra_comm.allreduce(mine)
    assert node_bytes == 2 * (nodes - 1) * x.nbytes // nodes
    assert lanes_of(memory.topology) == 2
    assert after["shared_bytes"] > before["shared_bytes"]


@pytest.mark.ranks(2, 3, 8)
def test_inside_a_node_nothing_is_sent(comm):
    for n in (10, 300_000):
        x = np.full(n, 1, np.float32)
        md.allreduce(comm, x, algorithm="node")
        before = of(comm).counters.snapshot()
        md.allreduce(comm, x, algorithm="node")
        after = of(comm).counters.snapshot()
        assert after["messages_sent"] == before["messages_sent"]
        assert after["native_calls"] == before["native_calls"]
        p, part = comm.size, -(-n // comm.size) if comm.rank < n % comm.size else n // comm.size
        added = after["bytes_reduced"] - before["bytes_reduced"]
        assert added == (4 * n * (p - 1) if n == 10 else 4 * part * (p - 1))


@pytest.mark.covering
@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node"),
    [("node", None), ("single_copy", None), ("hierarchical", 2), ("hierarchical", 4)],
)
def test_every_rank_does_the_same_work(comm, algorithm, ranks_per_node, private):
    """R73: no rank adds, copies or sends for the others, on a node and between nodes."""
    nodes = memory_of(of(comm), ranks_per_node).topology.nodes
    for n in (64, 48_000, 400_000):
        with md.Arena(comm, {"x": (n, "f8")}, ranks_per_node=ranks_per_node) as arena:
            x = np.zeros(n) if private else arena
            md.allreduce(comm, x, algorithm=algorithm)
            before = of(comm).counters.snapshot()
            md.allreduce(comm, x, algorithm=algorithm)
            after = of(comm).counters.snapshot()
        mine = {key: after[key] - before[key] for key in before}
        assert comm.allgather(mine) == [mine] * comm.size
        assert mine["bytes_reduced"] > 0
        assert (mine["bytes_sent"] > 0) == (nodes > 1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("ranks_per_node", "way"), [(None, "node"), (2, "hierarchical")])
def test_an_arena_goes_through_the_node_unasked(comm, ranks_per_node, way):
    """R101: inside the node first, wherever an arena is on nodes of several ranks."""
    memory_of(of(comm), ranks_per_node)
    with md.Arena(comm, {"x": (5000, "f8")}, ranks_per_node=ranks_per_node) as arena:
        md.allreduce(comm, arena)
        assert [plan.algorithm for (plan,) in arena.plans.values()] == [way]
        before = of(comm).counters.snapshot()
        md.allreduce(comm, arena)
        after = of(comm).counters.snapshot()
    # Between two nodes each rank sends half of the vector, not all of it as in a ring.
    sent = after["bytes_sent"] - before["bytes_sent"]
    assert sent == (0 if way == "node" else 5000 * 8 // 2)


@pytest.mark.ranks(2, 3)
def test_short_and_long_vectors_take_turns(comm):
    """Slots and staging are used again at once: nobody may write what another still reads."""
    rng = np.random.default_rng(7)
    lengths = [*rng.integers(0, 60_000, 60).tolist(), 3, 3, 3, 100_000, 3, 100_000, 100_000, 3]
    for step, n in enumerate(lengths):
        x = np.full(n, comm.rank + step, np.float32)
        md.allreduce(comm, x, algorithm="node")
        assert (x == sum(r + step for r in range(comm.size))).all(), (step, n)


@pytest.mark.ranks(3)
def test_ranks_in_different_operations_find_out(comm):
    """The key beside the counter: other shapes, both in the node's memory, raise everywhere."""
    for n in (10, 100_000):
        md.allreduce(comm, np.zeros(n, "f4"), algorithm="node")
        md.allreduce(comm, np.zeros(n + 1, "f4"), algorithm="node")
    other = comm.Dup()
    for n in (10, 100_000):
        fresh = other.Dup()
        for length in (n, n + 1):
            md.allreduce(fresh, np.zeros(length, "f4"), algorithm="node")
        with pytest.raises(MismatchError, match="allreduce"):
            md.allreduce(fresh, np.zeros(n + (comm.rank == 1), "f4"), algorithm="node")
        md.free(fresh)
    other.Free()


@pytest.mark.ranks(3)
def test_ranks_in_node_and_message_operations_find_out(comm):
    x = np.zeros(10, "f4")
    for name in ("node", "ring"):
        md.allreduce(comm, x, algorithm=name)
    with pytest.raises(MismatchError, match="allreduce"):
        md.allreduce(comm, x, algorithm="ring" if comm.rank == 2 else "node")


@pytest.mark.ranks(2, further=(4,))
def test_without_shared_memory_it_is_the_butterfly_and_said(comm, monkeypatch):
    """A full /dev/shm is an error at the start, never a SIGBUS; all ranks go without together."""

    def full(file, start, length):
        raise OSError(28, "No space left on device")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(arena_module.os, "posix_fallocate", full)
    memory = memory_of(of(comm))
    assert "o space left" in memory.reason
    assert settle(of(comm), "node") == "butterfly"
    x = np.full(5000, comm.rank, "f4")
    run = md.plan(comm, x, algorithm="node")
    assert run.algorithm == "butterfly"
    run()
    assert (x == sum(range(comm.size))).all()
    with md.Arena(comm, {"x": (9, "f4")}) as arena:
        assert not arena.shared
        assert "o space left" in arena.reason
        arena.flat[...] = comm.rank
        md.allreduce(comm, arena)
        assert (arena.flat == sum(range(comm.size))).all()
    comm.Barrier()
    assert not left_behind()


@pytest.mark.ranks(4)
def test_node_needs_one_node(comm):
    memory_of(of(comm), 2)
    with pytest.raises(ConfigError, match=r"on 2 nodes, expected one; use 'hierarchical'"):
        md.allreduce(comm, np.zeros(3), algorithm="node")


@pytest.mark.ranks(2)
def test_bad_arenas(comm):
    for spec in ([], {}, {"w": 3}, {"w": ((2, -1), "f4")}, {"w": (3, "nonsense")}, {"w": (3, "O")}):
        with pytest.raises(ConfigError, match="Arena"):
            md.Arena(comm, spec)
    with md.Arena(comm, {"x": (3, "f4")}) as arena:
        with pytest.raises(ConfigError, match="another communicator"):
            md.allreduce(MPI.COMM_SELF, arena)
        with pytest.raises(ConfigError, match="out="):
            md.allreduce(comm, arena, out=np.zeros(3, "f4"))


@pytest.mark.ranks(2, 3)
def test_on_processors_that_reorder_memory_mpi_is_the_barrier(comm, monkeypatch):
    monkeypatch.setattr(node_barrier, "ORDERED", False)
    for n in (10, 100_000):
        for _ in range(3):
            x = np.full(n, comm.rank + 1.0)
            md.allreduce(comm, x, algorithm="node")
            assert (x == comm.size * (comm.size + 1) / 2).all()


def test_which_lengths_are_flat():
    class Memory:
        topology = type("Two", (), {"local_size": 2})

    class Single:
        work = np.dtype("f4")

    most = node.FLAT_BYTES // 2 // 4
    assert node_short.can_run(Memory, Single, most)
    assert not node_short.can_run(Memory, Single, most + 1)
