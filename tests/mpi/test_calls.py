"""An exception of one rank reaches all ranks; threads; no rank waits without need (R97)."""

import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.errors import ConfigError, MismatchError
from mpidist.runtime import context, context_setup


def seconds_of(call):
    """What `call` raises, and after how many seconds."""
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        call()
    return caught.value, time.monotonic() - start


BAD = {
    "op": ({"op": "bogus"}, "unknown op 'bogus'"),
    "algorithm": ({"algorithm": "bogus"}, "unknown allreduce algorithm 'bogus'"),
    "weight": ({"weight": 2.0}, "weight=2.0 needs op='mean'"),
    "out": ({"out": np.ones(3)}, r"out has shape \(3,\)"),
}


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("call", [md.allreduce, md.iallreduce, md.plan], ids=lambda f: f.__name__)
def test_a_bad_argument_on_one_rank_is_heard_by_all(comm, name, call):
    """R97: rank 1 raises what is wrong; the others name it, its host and its words."""
    if call is md.plan and name in ("weight", "out"):
        return
    bad, words = BAD[name]
    mine = comm.Dup()
    x = np.ones(1000)
    md.allreduce(mine, x)

    def run():
        made = call(mine, x, **(bad if comm.rank == 1 else {}))
        if call is not md.allreduce:
            made.wait() if call is md.iallreduce else made()

    error, seconds = seconds_of(run)
    assert seconds < 5
    if comm.rank == 1:
        assert isinstance(error, ConfigError)
    else:
        assert isinstance(error, MismatchError)
        assert "rank 1 raised ConfigError: " in str(error)
        assert error.secondary  # the rank that knows why speaks first
        assert MPI.Get_processor_name().split(".")[0] in str(error) or "test_calls.py" in str(error)
    with pytest.raises(Exception, match=words):
        raise error
    with pytest.raises(MismatchError, match="rank 1 raised"):
        md.allreduce(mine, x)
    comm.Barrier()
    md.free(mine)


@pytest.mark.ranks(3, further=(1,))
def test_a_bad_argument_everywhere_harms_nothing(comm):
    mine = comm.Dup()
    for _ in range(3):
        for bad, words in BAD.values():
            with pytest.raises(ConfigError, match=words):
                md.allreduce(mine, np.ones(5), **bad)
    if comm.rank == 0:
        time.sleep(0.2)  # the others look around, and hear what they know
    x = np.ones(5)
    assert (md.allreduce(mine, x) == comm.size).all()
    md.free(mine)
    mine.Free()


@pytest.mark.ranks(2, 3)
def test_a_rank_that_raised_first_and_goes_on_is_told(comm):
    """The next call of the rank that caught its error is no second chance."""
    mine = comm.Dup()
    x = np.ones(10)
    if comm.rank == 1:
        with pytest.raises(ConfigError):
            md.allreduce(mine, x, "bogus")
    with pytest.raises(MismatchError, match="rank 1 raised ConfigError: unknown op 'bogus'"):
        md.allreduce(mine, x)
    comm.Barrier()
    md.free(mine)


class Interrupt(BaseException):
    """What a signal handler raises."""


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("n", [3, 5000])
def test_a_wait_that_is_broken_off_is_heard_by_all(comm, n, monkeypatch):
    mine = comm.Dup()
    x = np.ones(n)
    call = md.plan(mine, x, algorithm="native")
    call()
    if comm.rank == 1:
        real, looks = context.wait_until, []

        def interrupted(test, *args, **kwargs):
            if not looks:
                looks.append(1)
                comm.send("waiting", 0)
                raise Interrupt("in the wait")
            return real(test, *args, **kwargs)

        monkeypatch.setattr(context, "wait_until", interrupted)
    if comm.rank == 0:
        assert comm.recv(source=1) == "waiting"
    x[:] = 1
    start = time.monotonic()
    caught = None
    try:
        call()
    except (Interrupt, MismatchError) as error:
        caught = error
    if comm.rank == 1:
        assert isinstance(caught, Interrupt)
    elif caught is None:
        assert (x == comm.size).all()  # what rank 1 had to give it had given
    else:
        assert "was broken off by rank 1 of" in str(caught)
        assert "Interrupt: in the wait" in str(caught)
        assert caught.secondary
    assert time.monotonic() - start < 5
    error, seconds = seconds_of(call)
    assert isinstance(error, MismatchError)
    assert seconds < 5
    comm.Barrier()
    md.free(mine)


@pytest.mark.ranks(3)
def test_free_tells_of_a_call_that_not_all_made(comm):
    """Nobody waits for a broadcast of the root that others did not make: the end tells."""
    mine = comm.Dup()
    x = np.ones(4)
    for root in range(3):
        md.broadcast(mine, x, root=root)
    if comm.rank == 0:
        md.broadcast(mine, x, root=0)
    start = time.monotonic()
    with pytest.raises(MismatchError, match=r"left after \d+ operations|made different calls"):
        md.free(mine)
    assert time.monotonic() - start < 5


@pytest.mark.ranks(3, further=(2,))
def test_iallreduce_never_waits_for_the_peers(comm):
    """Neither the first call of a shape nor the sum of the weights."""
    mine = comm.Dup()
    md.allreduce(mine, np.ones(1), algorithm="native")
    x, y = np.full(3000, comm.rank + 1.0), np.full(7, 1.0)
    if comm.rank == 1:
        time.sleep(0.5)
    start = time.monotonic()
    handles = [
        md.iallreduce(mine, x, "mean", weight=comm.rank + 1.0),
        md.iallreduce(mine, y, algorithm="ring"),
    ]
    if comm.rank == 0:
        assert time.monotonic() - start < 0.25
    for handle in handles:
        handle.wait()
    weights = np.arange(comm.size) + 1.0
    np.testing.assert_allclose(x, (weights**2).sum() / weights.sum())
    assert (y == comm.size).all()
    bad = md.iallreduce(mine, x, "mean", weight=0.0)
    with pytest.raises(ConfigError, match="add up to 0"):
        bad.wait()
    md.free(mine)
    mine.Free()


@pytest.mark.ranks(2)
def test_a_plan_is_closed(comm):
    x = np.ones(9)
    with md.plan(comm, x, algorithm="ring") as run:
        assert run() is x
        assert run.algorithm == "ring"
    assert (x == 2).all()
    with pytest.raises(md.ClosedError, match="closed"):
        run()
    run.close()
    again = md.plan(comm, x, algorithm="ring")
    assert (again() == 4).all()
    again.close()


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bound", [False, True])
def test_an_exception_on_the_way_into_a_call_is_told(comm, bound, monkeypatch):
    """A signal may come before the call has begun: later calls must not pair up shifted."""
    mine = comm.Dup()
    x = np.ones(5000)
    call = partial(md.allreduce, mine, x, algorithm="ring")
    run = md.plan(mine, x, algorithm="ring") if bound else call
    run()
    if comm.rank == 1:
        with monkeypatch.context() as patch:

            def interrupted(self, kind):
                raise Interrupt("on the way")

            patch.setattr(context.Context, "call", interrupted)
            with pytest.raises(Interrupt):
                run()
    x[:] = 10 + comm.rank
    with pytest.raises(MismatchError, match="rank 1 raised Interrupt: on the way"):
        run()
    comm.Barrier()
    md.free(mine)


@pytest.mark.ranks(2, further=(3,))
def test_free_after_a_failure_is_quiet_and_the_communicator_is_new(comm):
    mine = comm.Dup()
    for _ in range(2):
        with pytest.raises(md.MpidistError):
            md.allreduce(mine, np.ones(4), "bogus" if comm.rank == 1 else "sum")
        comm.Barrier()
        md.free(mine)
        assert (md.allreduce(mine, np.ones(4)) == comm.size).all()
    md.free(mine)
    mine.Free()


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("cold", [True, False])
def test_an_argument_that_has_no_truth(comm, cold):
    mine = comm.Dup()
    if not cold:
        md.allreduce(mine, np.ones(4))
    wrong = {"reproducible": np.ones(3)} if comm.rank == 1 else {}
    expected = ConfigError if comm.rank == 1 else MismatchError
    with pytest.raises(expected, match=r"reproducible=array\(\[1., 1., 1.\]\): expected True or"):
        md.allreduce(mine, np.ones(4), **wrong)
    comm.Barrier()
    md.free(mine)


@pytest.mark.ranks(2, further=(3,))
def test_a_plan_that_one_rank_has_closed(comm):
    mine = comm.Dup()
    run = md.plan(mine, np.ones(4))
    run()
    if comm.rank == 1:
        run.close()
    with pytest.raises(md.MpidistError, match="this plan was closed"):
        run()
    comm.Barrier()
    md.free(mine)


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("step", range(1, 9))
def test_a_first_call_that_is_broken_off_goes_on_where_it_was(comm, step, monkeypatch):
    """An own time limit on one rank, at each request of the first call on a communicator."""
    mine = comm.Dup()
    if comm.rank == 1:
        real, looks = context_setup.wait_until, []

        def interrupted(test, *args):
            looks.append(1)
            if step % 2 and len(looks) == (step + 1) // 2:
                raise Interrupt
            real(test, *args)
            if not step % 2 and len(looks) == step // 2:
                raise Interrupt

        monkeypatch.setattr(context_setup, "wait_until", interrupted)
        with pytest.raises(Interrupt):
            md.allreduce(mine, np.ones(4))
    assert (md.allreduce(mine, np.ones(4)) == comm.size).all()
    md.free(mine)
    mine.Free()


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", ["tree", "ring", "direct"])
def test_memory_that_is_written_after_an_exception_reaches_nobody(comm, algorithm, monkeypatch):
    """Long messages are read from where they lie: not before they have ended is it the user's."""
    mine = comm.Dup()
    x = np.ones(300_000)
    call = partial(md.allreduce, mine, x, algorithm=algorithm)
    call()
    x[:] = comm.rank
    if comm.rank == 1:
        real, looks = context.wait_until, []

        def interrupted(test, *args, **kwargs):
            if not looks:
                looks.append(1)
                for rank in {*range(comm.size)} - {comm.rank}:
                    comm.send("waiting", rank)
                raise Interrupt
            return real(test, *args, **kwargs)

        monkeypatch.setattr(context, "wait_until", interrupted)
        with pytest.raises(Interrupt):
            call()
        x[:] = 1000
    else:
        assert comm.recv(source=1) == "waiting"
        try:
            call()
        except MismatchError:
            pass
        else:
            assert (x == sum(range(comm.size))).all()
    comm.Barrier()
    with suppress(MismatchError):  # a rank that has the whole sum hears of it here
        md.free(mine)
