"""If ranks make different calls with arenas, all get one error, never a wrong sum or a hang."""

import time

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import ClosedError, ConfigError, MismatchError, MpidistError
from mpidist.runtime.context import of
from mpidist.runtime.node_memory import arena as arena_module

SPEC = {"a": ((3, 4), "f4"), "b": ((4, 3), "f4")}

#: What rank 1 gives -> what is said on all ranks.
BAD_SPECS = {
    "empty": ({}, ConfigError, "names no tensor"),
    "no mapping": (["a", "b"], ConfigError, "expected a mapping"),
    "no dtype": ({"a": (3, "nonsense"), "b": (4, "f4")}, ConfigError, "expected a mapping"),
    "negative": ({"a": ((3, -4), "f4"), "b": ((4, 3), "f4")}, ConfigError, "expected a mapping"),
    "not whole": ({"a": ((3.5, 4), "f4"), "b": ((4, 3), "f4")}, ConfigError, "expected a mapping"),
    "beyond any memory": ({"a": (10**30, "f4")}, ConfigError, "expected a mapping"),
    "order": (
        {"b": ((4, 3), "f4"), "a": ((3, 4), "f4")}, MismatchError,
        r"tensor 0 differs: .*rank 1: \('b', \(4, 3\), 'float32'\)",
    ),
    "name": ({"a": ((3, 4), "f4"), "c": ((4, 3), "f4")}, MismatchError, "tensor 1 .*'c'"),
    "shape": (
        {"a": ((3, 4), "f4"), "b": ((3, 4), "f4")}, MismatchError, r"tensor 1 .*'b', \(3, 4\)"
    ),
    "dtype": ({"a": ((3, 4), "f4"), "b": ((4, 3), "i4")}, MismatchError, "tensor 1 .*'int32'"),
    "fewer": ({"a": ((3, 4), "f4")}, MismatchError, "tensor 1 .*rank 1: nothing"),
    "more": ({**SPEC, "c": (1, "f4")}, MismatchError, "tensor 2 .*rank 1: .'c'"),
}  # fmt: skip


def usable(comm):
    """The communicator works after an error that all ranks raised together."""
    x = np.ones(5)
    assert md.allreduce(comm, x)[0] == comm.size
    with md.Arena(comm, SPEC) as arena:
        arena.flat[...] = 1
        md.allreduce(comm, arena)
        assert (arena.flat == comm.size).all()


def raised_by_all(comm, act, kind=MismatchError, match=None, seconds=8):
    """Run `act`, which must raise on this rank, in time; returns the error."""
    began = time.perf_counter()
    with pytest.raises(kind, match=match) as caught:
        act()
    assert time.perf_counter() - began < seconds
    return caught.value


@pytest.mark.covering
@pytest.mark.ranks(2, 5)
@pytest.mark.parametrize("case", BAD_SPECS)
def test_a_spec_that_one_rank_alone_has(comm, case):
    spec, kind, text = BAD_SPECS[case]
    # Rank 1 alone, in a round where all is cached and in one where nothing is.
    for _ in range(2):
        error = raised_by_all(
            comm, lambda: md.Arena(comm, spec if comm.rank == 1 else SPEC), kind, text
        )
        assert error.everywhere
        assert "rank 1" in str(error)
    usable(comm)


@pytest.mark.ranks(2, 4)
def test_other_nodes_on_one_rank(comm):
    for given in (1, 0, "two"):
        raised_by_all(
            comm,
            lambda given=given: md.Arena(comm, SPEC, ranks_per_node=given if comm.rank else 2),
            MpidistError, f"ranks_per_node.*{given}",
        )  # fmt: skip
    usable(comm)


@pytest.mark.covering
@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2])
@pytest.mark.parametrize("n", [5, 5000])
@pytest.mark.parametrize("cached", [False, True])
def test_two_arenas_crosswise(comm, ranks_per_node, n, cached):
    """Of one size, so nothing but their numbers tells them apart."""
    memory_of(of(comm), ranks_per_node)
    arenas = [md.Arena(comm, {"x": (n, "f4")}, ranks_per_node=ranks_per_node) for _ in range(2)]
    if cached:
        for arena in arenas:
            arena.flat[...] = 1
            md.allreduce(comm, arena)
            assert (arena.flat == comm.size).all()
    mine = arenas[comm.rank == 1]
    raised_by_all(comm, lambda: md.allreduce(comm, mine), match=r"arena [12]")
    raised_by_all(comm, lambda: md.allreduce(comm, arenas[0]))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("ranks_per_node", "algorithm"), [(None, "auto"), (1, "auto"), (2, "auto"), (None, "ring")]
)
@pytest.mark.parametrize("cached", [False, True])
def test_an_array_against_an_arena(comm, ranks_per_node, algorithm, cached):
    memory_of(of(comm), ranks_per_node)
    arena = md.Arena(comm, {"x": (300, "f4")}, ranks_per_node=ranks_per_node)
    x = np.ones(300, "f4")
    if cached:
        md.allreduce(comm, arena, algorithm=algorithm)
        md.allreduce(comm, x, algorithm=algorithm)
    target = x if comm.rank == 1 else arena
    raised_by_all(comm, lambda: md.allreduce(comm, target, algorithm=algorithm), match="arena 1")


def acts(comm):
    """Pairs of calls that do not belong together; rank 1 makes the second of each."""
    x = np.ones(7)
    weights = {"w": np.zeros(5, "f4")}
    return {
        "constructor, allreduce": (lambda: md.Arena(comm, SPEC), lambda: md.allreduce(comm, x)),
        "allreduce, constructor": (lambda: md.allreduce(comm, x), lambda: md.Arena(comm, SPEC)),
        "constructor, broadcast": (lambda: md.Arena(comm, SPEC), lambda: md.broadcast(comm, x)),
        "constructor, gradients": (
            lambda: md.Arena(comm, SPEC), lambda: md.Gradients(comm, weights)
        ),
        "gradients, allreduce": (
            lambda: md.Gradients(comm, weights), lambda: md.allreduce(comm, x)
        ),
        "allreduce, gradients": (
            lambda: md.allreduce(comm, x), lambda: md.Gradients(comm, weights)
        ),
    }  # fmt: skip


NAMES = list(acts(MPI.COMM_SELF))


@pytest.mark.covering
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cached", [False, True])
def test_a_constructor_against_another_call(comm, name, cached):
    if cached:  # else it is the first call on a new communicator
        usable(comm)
        for act in acts(comm)[name]:
            made = act()
            if hasattr(made, "close"):
                made.close()
    raised_by_all(comm, acts(comm)[name][comm.rank == 1])


@pytest.mark.ranks(3, further=(2,))
def test_closing_on_one_rank_alone_hangs_nobody(comm):
    """`md.train` with other `steps` on one rank: it has left when the others still reduce."""
    arena = md.Arena(comm, SPEC)
    md.allreduce(comm, arena)
    if comm.rank == 1:
        arena.close()
        raised_by_all(comm, lambda: md.allreduce(comm, np.ones(3)))
    else:
        raised_by_all(comm, lambda: md.allreduce(comm, arena))
        arena.close()


@pytest.mark.ranks(1, 2)
def test_a_closed_arena_is_not_reduced(comm):
    arena = md.Arena(comm, SPEC)
    run = md.plan(comm, arena)
    run()
    arena.close()
    for act in (run, lambda: md.allreduce(comm, arena)):
        with pytest.raises(ClosedError, match="arena was closed"):
            act()
    usable(comm)


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["open", "ftruncate", "posix_fallocate", "mapped_file"])
@pytest.mark.parametrize("rank", [0, 1])
def test_no_shared_memory_on_one_rank(comm, monkeypatch, where, rank):
    """Then all go without, and all know why."""

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if comm.rank == rank:
        module = arena_module if where == "mapped_file" else arena_module.os
        monkeypatch.setattr(module, where, fail)
    memory_of(of(comm))
    arena = md.Arena(comm, SPEC)
    monkeypatch.undo()
    reaches = where != "ftruncate" or rank == 0
    assert arena.shared is not reaches
    assert not reaches or "No space left" in arena.reason
    assert len(set(comm.allgather(arena.reason))) == 1
    arena.flat[...] = 1
    md.allreduce(comm, arena)
    assert (arena.flat == comm.size).all()
    arena.close()


@pytest.mark.ranks(2, 3)
def test_no_memory_at_all_on_one_rank(comm, monkeypatch):
    real = np.zeros

    def zeros(count, *more, **named):
        if isinstance(count, int) and count > 1 << 20:
            raise MemoryError("no")
        return real(count, *more, **named)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arena_module.os, "posix_fallocate", fail)
    if comm.rank == 1:
        monkeypatch.setattr(arena_module.np, "zeros", zeros)
    kind = MemoryError if comm.rank == 1 else MpidistError
    raised_by_all(comm, lambda: md.Arena(comm, {"x": (1 << 20, "f4")}), kind)
    monkeypatch.undo()
    usable(comm)


@pytest.mark.covering
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_an_exception_between_the_vectors_of_an_arena(comm, ranks_per_node, monkeypatch):
    """Rank 1 stops after the first of two: the others do not wait for the second."""
    memory_of(of(comm), ranks_per_node)
    spec = {"a": (3000, "f4"), "b": (3000, "f8")}
    arena = md.Arena(comm, spec, ranks_per_node=ranks_per_node)
    run = md.plan(comm, arena)
    run()

    def stop_here(vector):
        raise KeyboardInterrupt

    if comm.rank == 1:
        run.plan[1] = stop_here
        raised_by_all(comm, run, KeyboardInterrupt)
    else:
        raised_by_all(comm, run, match="KeyboardInterrupt")
    raised_by_all(comm, lambda: md.allreduce(comm, arena))
