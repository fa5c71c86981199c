"""Raise an exception at every point of every algorithm of a node, and let the program catch it.

One rank raises before or after the k-th barrier, copy, sum or division, for every k. Then no rank
may wait for ever or return a partial sum, neither in this call nor in two more calls. The tests
wrap the functions at these points, so the code itself has no test points.
"""

import signal
import time

import numpy as np
import pytest
from broken_calls import Problem, TimeLimit, Trap, check_all, check_case, heal

import mpidist as md
from mpidist.collectives.engines import cross_copy, node_barrier, node_short
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.collectives.schedules import node
from mpidist.errors import MismatchError
from mpidist.runtime import polling
from mpidist.runtime.context import of


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Waits begin to listen early, so that a thousand of them take seconds."""
    monkeypatch.setattr(polling.wait_until, "__defaults__", (None, 0.05))


@pytest.fixture
def trap(monkeypatch):
    """A trap whose wraps go with the test."""
    return Trap(monkeypatch)


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 4, 5)
@pytest.mark.parametrize("few", [0, 16])
def test_staged(comm, trap, monkeypatch, few):
    monkeypatch.setattr(node, "ROUND_BYTES", 64 * comm.size)
    monkeypatch.setattr(node_barrier, "FEW_RANKS", few)
    monkeypatch.setattr(node, "FEW_RANKS", few)
    monkeypatch.setattr(node_short, "can_run", lambda *_: False)
    n = 11 * comm.size  # two rounds
    call = md.plan(comm, np.empty(n), "mean", algorithm="node")
    engine = call.plan.engine
    trap.wrap(engine.gate, "sync")
    trap.wrap(engine.gate, "announce")
    trap.wrap(engine.gate, "check")
    trap.wrap_program(engine)
    assert check_all(Problem(comm, lambda x: call.plan(x), n), trap) > 20


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 4, 5)
@pytest.mark.parametrize("few", [0, 16])
def test_flat(comm, trap, monkeypatch, few):
    """Before, in and after its one sync. After it a rank is alone with its exception."""
    monkeypatch.setattr(node_barrier, "FEW_RANKS", few)
    reduce = node_short.finish_mean
    monkeypatch.setattr(node_short, "finish_mean", lambda *args: (trap.point(), reduce(*args)))
    call = md.plan(comm, np.empty(10), "mean", algorithm="node")
    gate = call.plan.short.gate
    trap.wrap(gate, "sync")
    problem = Problem(comm, lambda x: call.plan(x), 10)
    for victim in range(comm.size):
        trap.passed, trap.at = 0, (3 if few == 0 else 1) if comm.rank == victim else None
        assert (problem.outcome() == "whole") == (comm.rank != victim)
        for _ in range(2):
            assert problem.outcome() == "whole"

        # A copy that raises, as an array of too little memory does.
        class Raising:
            dtype = np.dtype("f8")

            def __array__(self, *args, **kwargs):
                raise MemoryError("no room")

        run = problem.call
        if comm.rank == victim:
            problem.call = lambda x: call.plan.short.run(Raising())
        first = problem.outcome()
        assert isinstance(first, MemoryError if comm.rank == victim else MismatchError)
        problem.call = run
        for _ in range(2):
            assert isinstance(problem.outcome(), MismatchError)
        heal(comm)
        assert problem.outcome() == "whole"

        # In the wait, where a signal comes most often.
        if comm.rank == victim:
            wait = gate.wait

            def interrupted(count):
                raise KeyboardInterrupt

            gate.wait = interrupted
        else:
            time.sleep(0.02)
        first = problem.outcome()
        if comm.rank == victim:
            gate.wait = wait
            assert isinstance(first, KeyboardInterrupt)
        else:
            assert first == "whole"  # it has arrived: nobody needs more of it
        assert isinstance(problem.outcome(), MismatchError)
        heal(comm)
        assert problem.outcome() == "whole"


@pytest.mark.ranks(2, 3, 4, 5)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_an_overflow_that_raises_on_one_rank(comm, op):
    """Everybody used to go on with half a sum: ``[2, 2, ..., 3e38]``."""
    for n in (10, 50_000):
        call = md.plan(comm, np.empty(n, "f4"), op, algorithm="node")
        x = np.ones(n, "f4")
        x[-1] = 3e38
        error = None
        old = np.seterr(over="raise" if comm.rank == comm.size - 1 else "ignore")
        try:
            call.plan(x)
        except (FloatingPointError, MismatchError) as raised:
            error = raised
        finally:
            np.seterr(**old)
        if comm.rank == comm.size - 1:
            assert isinstance(error, FloatingPointError)  # the owner of the last part, and flat
        elif n == 10:
            assert (x[:-1] == (comm.size if op == "sum" else 1)).all()
            assert x[-1] == np.inf
        else:
            assert isinstance(error, MismatchError)
            assert "FloatingPointError" in str(error)
            assert f"rank {comm.size - 1} of" in str(error)
        if n == 10:  # the others have all of it: the communicator goes on
            x[...] = 1
            call.plan(x)
            assert (x == (comm.size if op == "sum" else 1)).all()
    for _ in range(2):
        with pytest.raises(MismatchError, match="broken off"):
            call.plan(x)


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 4, 5)
@pytest.mark.parametrize("kernel_copies", [True, False])
def test_single_copy(comm, trap, monkeypatch, kernel_copies):
    monkeypatch.setattr(cross_copy, "PIECE_BYTES", 128)
    monkeypatch.setattr(node_short, "can_run", lambda *_: False)
    n = 20 * comm.size
    call = md.plan(comm, np.empty(n), "mean", algorithm="single_copy")
    engine = call.plan.engine
    trap.wrap(engine.gate, "sync")
    trap.wrap_program(engine)
    trap.wrap(engine.memory, "read")
    trap.wrap(engine.memory, "write")
    if not kernel_copies:
        monkeypatch.setattr(engine.memory, "holds", lambda *_: False)
    assert check_all(Problem(comm, lambda x: call.plan(x), n), trap) > 15


@pytest.mark.ranks(2, 3, further=(4, 5))
def test_an_arena(comm, trap, monkeypatch):
    monkeypatch.setattr(node, "IN_PLACE_BYTES", 128)
    n = 1100 * comm.size
    arena = md.Arena(comm, {"x": (n, "f8")})
    call = md.plan(comm, arena, "mean")
    engine = call.plan[0].engine
    points = Trap(monkeypatch)
    trap.wrap(engine.gate, "sync")
    trap.wrap_program(engine)
    del points
    # Of the sums only some: there is one for each 16 elements.
    monkeypatch.setattr(engine, "ufunc", engine.ufunc.ufunc)
    problem = Problem(comm, lambda x: call(), n, arena.flat)
    check_all(problem, trap)


@pytest.mark.ranks(4, further=(3, 5))
def test_hierarchical(comm, trap, monkeypatch):
    """Two ranks a node: also what breaks off on one node reaches the others, and the lanes."""
    monkeypatch.setattr(node, "ROUND_BYTES", 64 * 2)
    n = 100

    def fresh():
        """A communicator for each case: messages between nodes may be left under way."""
        other = comm.Dup()
        memory_of(of(other), 2)
        call = md.plan(other, np.empty(n), "mean", algorithm="hierarchical")
        engine = call.plan.engine
        mine = Trap(monkeypatch)
        mine.wrap(engine.gate, "sync")
        mine.wrap_program(engine.first)
        mine.wrap_program(engine.second)
        return Problem(other, lambda x: call.plan(x), n), mine

    problem, counting = fresh()
    assert problem.outcome() == "whole"
    points = comm.allgather(counting.passed)
    assert points[0] > 20
    for case in range(9):
        victim = case % comm.size  # the last of an odd number is alone on its node: few points
        problem, mine = fresh()
        assert problem.outcome() == "whole"
        check_case(problem, victim, mine, 1 + case * (points[victim] - 1) // 8)


@pytest.mark.ranks(2, 3, further=(4, 5))
def test_where_a_barrier_of_mpi_stands_in_their_place(comm, monkeypatch):
    monkeypatch.setattr(node_barrier, "ORDERED", False)
    monkeypatch.setattr(node, "ROUND_BYTES", 64 * comm.size)
    monkeypatch.setattr(node_short, "can_run", lambda *_: False)
    n = 11 * comm.size
    for at in (1, 4, 9, 14, 19, 24):
        other = comm.Dup()
        call = md.plan(other, np.empty(n), "mean", algorithm="node")
        engine, trap = call.plan.engine, Trap(monkeypatch)
        trap.wrap(engine.gate, "sync")
        trap.wrap_program(engine)
        problem = Problem(other, lambda x, call=call: call.plan(x), n)
        assert problem.outcome() == "whole"
        assert trap.passed >= 24
        check_case(problem, at % comm.size, trap, at)


@pytest.mark.ranks(3, further=(2,))
def test_a_rank_that_says_nothing(comm, monkeypatch):
    """It left its mark and could not tell why: the others name it."""
    monkeypatch.setattr(node_barrier, "HEARSAY", 0.4)
    other = comm.Dup()
    call = md.plan(other, np.empty(10), algorithm="node")
    call()
    gate = call.plan.short.gate
    if comm.rank == 1:
        gate.lines[gate.mine] = ~gate.count
        comm.Barrier()
    else:
        with pytest.raises(MismatchError, match=r"broken off by rank 1 of .*, which has not said"):
            call()
        comm.Barrier()


@pytest.mark.covering
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("n", "algorithm"), [(4, "node"), (30_000, "node"), (30_000, "single_copy")]
)
def test_a_time_limit_of_the_program(comm, n, algorithm):
    """A signal at any time, as a program sets it for itself."""
    inside = False

    def over(*_):
        if inside:
            raise TimeLimit
        signal.setitimer(signal.ITIMER_REAL, 0.0001)

    def fresh():
        """A communicator as new: an agreement may be left under way on the one before."""
        other = comm.Dup()
        plan = md.plan(other, np.empty(n), "mean", algorithm=algorithm).plan

        def call(x):
            nonlocal inside
            inside = True
            try:
                plan(x)
            finally:
                inside = False

        return Problem(other, call, n)

    problem = fresh()
    old = signal.signal(signal.SIGALRM, over)
    try:
        for case in range(10):
            victim, context = case % comm.size, of(problem.comm)
            last, results = context.sequence + 200, []
            comm.Barrier()
            if comm.rank == victim:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0007 * (case % 7))
            while context.sequence < last:
                results.append(problem.outcome())
                if isinstance(results[-1], MismatchError):
                    break
            signal.setitimer(signal.ITIMER_REAL, 0)
            bad = [r for r in results if r != "whole"]
            assert all(isinstance(r, TimeLimit | MismatchError) for r in bad), bad
            if comm.allreduce(any(isinstance(r, MismatchError) for r in bad)):
                problem = fresh()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
