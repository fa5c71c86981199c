"""Objects that exist longer than a call: handles, bound plans, statuses, failed communicators."""

import gc
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.collectives import selection
from mpidist.collectives.engines import native
from mpidist.errors import MismatchError
from mpidist.runtime import context, polling


@pytest.mark.ranks(2, 3, further=(4,))
def test_handles_are_waited_for_in_any_order(comm):
    """R33: a wait makes progress for all that runs, also on another communicator."""
    other = comm.Dup()
    for _ in range(3):
        x, y = np.ones(5000), np.ones(300)
        handles = [
            md.iallreduce(comm, x, algorithm="ring"),
            md.iallreduce(other, y, algorithm="recursive_doubling"),
        ]
        for handle in handles[:: 1 if comm.rank % 2 else -1]:
            handle.wait()
        assert (x == comm.size).all()
        assert (y == comm.size).all()
        h = md.iallreduce(comm, x, algorithm="ring")
        if comm.rank:
            h.wait()
        md.allreduce(other, y, algorithm="ring")
        h.wait()
        assert (x == comm.size**2).all()
    assert not context.running
    md.free(other)
    other.Free()


@pytest.mark.ranks(3)
def test_free_finishes_what_nobody_waited_for(comm):
    x = np.ones(5000)
    handle = md.iallreduce(comm, x, algorithm="ring")
    if comm.rank == 0:
        time.sleep(0.1)
    md.free(comm)
    assert (x == 3).all()
    assert handle.wait() is x


@pytest.mark.ranks(2)
def test_a_bound_plan_outlives_the_cache(comm, monkeypatch):
    monkeypatch.setattr("mpidist.collectives.plan.MAX_PLANS", 4)
    short, long = np.ones(4), np.ones(5000)
    bound = [md.plan(comm, x, algorithm="native") for x in (short, long)]
    for n in range(10):
        md.allreduce(comm, np.ones(20 + n), algorithm="ring")
    assert len(context.of(comm).plans) == 4 + len(bound)
    for x, call in zip((short, long), bound, strict=True):
        x[:] = 1
        assert call() is x
        assert (x == 2).all()


@pytest.mark.ranks(2, 3)
def test_a_handle_outlives_its_plan(comm, monkeypatch):
    """R41: too many plans, and the one that is dropped has a handle under way."""
    monkeypatch.setattr("mpidist.collectives.plan.MAX_PLANS", 4)
    arrays = [np.full(3000 + n, comm.rank + 1.0) for n in range(20)]
    handles = [md.iallreduce(comm, x, "mean", algorithm="ring") for x in arrays]
    for handle, x in zip(handles[::-1], arrays[::-1], strict=True):
        assert handle.wait() is x
        assert (x == (comm.size + 1) / 2).all()
    assert len(context.of(comm).plans) == 4


@pytest.mark.ranks(3)
def test_no_status_is_left_behind(comm):
    """A status that nobody read would reach the next communicator of the same number."""
    for _ in range(2):
        mine = comm.Dup()
        md.allreduce(mine, np.ones(3), algorithm="ring")
        if comm.rank == 0:
            time.sleep(0.2)  # the others tell where they are, and nobody needs to know
        md.allreduce(mine, np.ones(3), algorithm="ring")
        md.free(mine)
        mine.Free()
        later = [comm.Dup() for _ in range(6)]
        comm.Barrier()
        assert not any(c.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for c in later)
        for c in later:
            c.Free()


@pytest.mark.ranks(3)
def test_a_failed_communicator_can_be_freed_and_used_anew(comm):
    """Requests that never end are kept with their buffers; a new context begins afresh."""
    for algorithm in ("native", "ring"):
        four, five = np.ones(4), np.ones(5)
        for x in (four, five):
            md.allreduce(comm, x, algorithm=algorithm)
        with pytest.raises(MismatchError, match="rank 1"):
            md.allreduce(comm, five if comm.rank == 1 else four, algorithm=algorithm)
        with pytest.raises(MismatchError, match="failed earlier"):
            md.allreduce(comm, four, algorithm=algorithm)
        comm.Barrier()
        md.free(comm)
        x = np.ones(4)
        md.allreduce(comm, x, algorithm=algorithm)
        assert (x == 3).all()


@pytest.mark.ranks(2)
def test_a_restored_choice_holds_for_cached_plans_too(comm):
    """R32: a run that is resumed in the same process adds as the saved table says."""
    x = np.ones(3000, np.float32)
    md.allreduce(comm, x)
    (key, entry), *_ = selection.table(comm).items()
    for algorithm in ("ring", "butterfly"):
        selection.restore(comm, {key: {**entry, "algorithm": algorithm}})
        md.allreduce(comm, x)
        (plan,) = [p for k, p in context.of(comm).plans.items() if k[2] == "auto"]
        assert plan.algorithm == algorithm


@pytest.mark.ranks(2)
def test_a_plan_that_runs_stays_and_one_that_does_not_goes(comm, monkeypatch):
    """Too many plans: whoever ran since the last look stays, and what went is still counted."""
    monkeypatch.setattr("mpidist.collectives.plan.MAX_PLANS", 4)
    mine = comm.Dup()
    kept, started = np.ones(4), context.of(mine).counters.native_calls
    md.allreduce(mine, kept, algorithm="native")
    plan = next(iter(context.of(mine).plans.values()))
    for n in range(10):
        md.allreduce(mine, np.ones(20 + n), algorithm="native")
        md.allreduce(mine, kept, algorithm="native")
    assert len(context.of(mine).plans) == 4
    assert plan in context.of(mine).plans.values()
    assert context.of(mine).counters.native_calls - started == 21
    # Each of the eleven plans was agreed on in an operation of its own.
    assert context.of(mine).sequence == 21 + 11
    assert context.of(mine).operation(32).shape == "(4)"
    assert context.of(mine).operation(31).shape == "(29)"
    assert context.of(mine).operation(33) is None
    md.free(mine)
    mine.Free()


@pytest.mark.ranks(3, further=(4,))
def test_who_comes_after_the_others_have_left_makes_no_blocking_call(comm, monkeypatch):
    """The handshake of MPI's own allreduce would tell it that all are here: they have begun it."""
    monkeypatch.setattr(native, "GRACE", 0.2)
    monkeypatch.setattr(polling, "PATIENCE", 0.2)
    mine = comm.Dup()
    md.allreduce(mine, np.ones(3000), algorithm="native")

    def interrupt(*_):
        raise KeyboardInterrupt("stopped by the test")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        if comm.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        if comm.rank == 1:
            time.sleep(1.0)
        with pytest.raises((KeyboardInterrupt, MismatchError), match="stopped by the test"):
            md.allreduce(mine, np.ones(3000), algorithm="native")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.ranks(2)
def test_closed_arenas_leave_no_plan_behind(comm):
    """R41: nothing grows without bound; the plan of a user's own array of that shape stays."""
    md.allreduce(comm, x := np.ones(7, np.float32))
    own = md.plan(comm, x)
    before = set(context.of(comm).plans), len(context.of(comm).runs)
    for n in range(1, 51):
        with md.Arena(comm, {"w": (n, "f4"), "b": (5000, "f8")}) as arena:
            for name in arena:
                arena[name][...] = 1
            md.allreduce(comm, arena)
            assert arena["w"][-1] == arena["b"][-1] == comm.size
    assert (set(context.of(comm).plans), len(context.of(comm).runs)) == before
    x[:] = 1
    assert own()[0] == comm.size


@pytest.mark.ranks(2)
def test_the_memory_of_a_forgotten_arena_is_given_back(comm):
    """R41: one that nobody closed goes with its last view; no plan holds it."""
    mine = comm.Dup()

    def shared():
        gc.collect()
        return Path("/proc/self/maps").read_text(encoding="ascii").count("/dev/shm/mpidist-")

    def sum_of_ones(algorithm):
        arena = md.Arena(mine, {"w": (30_000, "f4"), "b": (7, "f8")})
        for name in arena:
            arena[name][...] = 1
        md.allreduce(mine, arena, algorithm=algorithm)
        assert arena["w"][-1] == arena["b"][-1] == comm.size

    sum_of_ones("auto")
    before = shared()
    for algorithm in ("auto", "native", "ring", "node"):
        sum_of_ones(algorithm)
    assert shared() == before
    md.free(mine)
    mine.Free()


def resident():
    """Bytes of this process that are in memory."""
    with Path("/proc/self/statm").open(encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("algorithm", ["ring", "node", "native", "auto"])
def test_many_shapes_cost_no_memory(comm, algorithm):
    """R41: plans of 30 shapes of 2 MB float16 share one work vector of float32, and scratch."""
    mine = comm.Dup()
    md.allreduce(mine, np.ones(1_000_000, np.float16), algorithm=algorithm)
    before = resident()
    for n in range(30):
        x = np.full(1_000_000 + 500 * n, 1.5, np.float16)
        assert (md.allreduce(mine, x, algorithm=algorithm)[::1000] == 3).all()
    assert resident() - before < 48 << 20  # of their own they would keep 120 MB and more
    assert context.of(mine).pool.kept < 32 << 20
    md.free(mine)
    mine.Free()
