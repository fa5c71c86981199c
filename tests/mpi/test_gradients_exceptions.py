"""If one rank raises while gradients are summed, all ranks raise, and none gets a partial sum."""

import contextlib
import threading

import numpy as np
import pytest
from mpi4py import MPI
from test_gradients_errors import BACKWARD, parameters, raised_here, step

import mpidist as md
from mpidist.collectives.engines import fused_pieces
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import MismatchError, MpidistError
from mpidist.gradients.exchange import Gradients
from mpidist.runtime.context import of

#: Where rank 1 raises in a bucket that goes by lanes.
STAGES = {
    "begin": ("start", None),
    "first line": ("arrive", 0),
    "at the first line": ("everyone_at", 0),
    "add": ("add", None),
    "lane": ("lane", None),
    "show": ("show", None),
    "second line": ("arrive", 8),
    "at the second line": ("everyone_at", 8),
}


def raising(real, when, error):
    def act(*args, **named):
        if when(*args):
            raise error
        return real(*args, **named)

    return act


def break_bucket(gradients, monkeypatch, stage, error):
    """Make the second bucket of this rank raise `error` at `stage`."""
    start = gradients._starts[1]
    bucket = start.__self__
    assert isinstance(bucket, fused_pieces.LaneBucket)
    kind, line = STAGES[stage]
    if kind == "start":
        monkeypatch.setattr(bucket.context, "begin", raising(None, lambda *_: True, error))
    elif kind in ("arrive", "everyone_at"):
        wanted = bucket.line + line
        act = raising(getattr(bucket, kind), lambda where: where == wanted, error)
        monkeypatch.setattr(bucket, kind, act)
    elif kind == "lane":
        act = raising(fused_pieces.Run, lambda program, *_: program is bucket.program, error)
        monkeypatch.setattr(fused_pieces, "Run", act)
    else:
        program = getattr(bucket, kind)
        monkeypatch.setattr(program, "compute", raising(None, lambda *_: True, error))


def by_lanes(comm):
    """Gradients on nodes of two ranks, with a bucket for each tensor, after a first step."""
    memory_of(of(comm), 2)
    gradients = Gradients(comm, parameters(), bucket_bytes=1)
    step(comm, gradients)
    return gradients


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_at_each_stage_of_a_bucket(comm, monkeypatch, stage):
    """Nobody returns with a sum that is not whole, and nobody waits for ever."""
    gradients = by_lanes(comm)
    step(comm, gradients)
    assert len(gradients._starts) > 2
    if comm.rank == 1:
        error = KeyboardInterrupt("stopped by the test")
        if stage == "begin":  # the first bucket has begun by then
            real, calls = of(comm).begin, []

            def begin(*args, **named):
                calls.append(1)
                if len(calls) == 2:
                    raise error
                return real(*args, **named)

            monkeypatch.setattr(of(comm), "begin", begin)
        elif stage == "lane" and gradients._starts[1].__self__.program is None:
            break_bucket(gradients, monkeypatch, "show", error)  # no lane of its own
        else:
            break_bucket(gradients, monkeypatch, stage, error)
        raised_here(lambda: step(comm, gradients, 3.0), KeyboardInterrupt, "stopped by the test")
        monkeypatch.undo()
    else:
        # On another node the whole sum may be there already; `step` looks at it. Of 5 ranks on
        # nodes of two, rank 1 has no lane: rank 0 adds all once rank 1 has arrived at the line.
        late = ["show", "second line", "at the second line", "lane"]
        late += ["at the first line", "add"] * (comm.size == 5)
        whole = comm.rank > 1 and stage in late
        with contextlib.suppress(MismatchError) if whole else pytest.raises(MismatchError):
            step(comm, gradients, 3.0)
    raised_here(lambda: md.allreduce(comm, np.ones(3)))
    raised_here(lambda: step(comm, gradients), MpidistError)
    gradients.close()


@pytest.mark.ranks(4)
def test_a_slow_rank_still_ends_the_step_before_the_failure(comm):
    """Rank 1 has left a bucket, begins the next step and fails; rank 0 reads its counters late."""
    gradients = by_lanes(comm)
    bucket = gradients._starts[1].__self__
    comm.Barrier()
    if comm.rank == 1:
        for _ in range(2):
            bucket.break_off(KeyboardInterrupt("stopped by the test"))
    comm.Barrier()
    if comm.rank == 0:
        assert bucket.everyone_at(bucket.line)
        assert bucket.everyone_at(bucket.line + 8)
        bucket.count += 1
        raised_here(lambda: bucket.everyone_at(bucket.line), match="stopped by the test")
    comm.Barrier()
    raised_here(lambda: step(comm, gradients), MpidistError)
    gradients.close()


@pytest.mark.ranks(4)
def test_a_sum_that_overflows_on_one_rank(comm):
    """`np.errstate(over="raise")` is one rank's own."""
    gradients = by_lanes(comm)
    step(comm, gradients)

    def act():
        with np.errstate(over="raise" if comm.rank == 1 else "ignore"):
            gradients.begin(1.0)
            for name in BACKWARD:
                gradients.views[name][...] = 3e38
                gradients.ready(name)
            gradients.reduce(0, 0)

    kind = FloatingPointError if comm.rank == 1 else MismatchError
    raised_here(act, kind, "overflow")
    gradients.close()


@pytest.mark.ranks(4)
def test_a_bucket_is_tested_by_one_thread_at_a_time(comm, monkeypatch):
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI.THREAD_MULTIPLE")
    gradients = by_lanes(comm)
    gradients.begin(1 / comm.size)
    bucket = gradients._starts[0].__self__
    gradients.vectors[0][...] = comm.rank
    run = gradients._starts[0]()
    inside, go_on, found = threading.Event(), threading.Event(), []
    real = bucket.everyone_at

    def slow(line):
        inside.set()
        assert go_on.wait(10)
        return real(line)

    monkeypatch.setattr(bucket, "everyone_at", slow)
    thread = threading.Thread(target=lambda: found.append(run.test()))
    thread.start()
    assert inside.wait(10)
    assert run.test() is False  # at once, though the other thread stands still
    go_on.set()
    thread.join()
    run.wait()
    assert len(found) == 1
    k, start, stop = gradients._spans[0]
    assert (gradients.vectors[k][start:stop] == sum(range(comm.size))).all()
    comm.Barrier()
    gradients.close()
