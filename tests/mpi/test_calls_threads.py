"""Calls from two threads, and ranks that wait for each other on two communicators."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from own_threads import in_threads
from test_calls import seconds_of
from until import wait_until

import mpidist as md
from mpidist.errors import MismatchError, ProtocolError
from mpidist.runtime import polling
from mpidist.runtime.context import of


@pytest.mark.ranks(2, 3)
def test_a_second_thread_is_refused(comm):
    """R97: two threads on one communicator; and a thread of its own for each of two."""
    mine = comm.Dup()
    x = np.ones(3)
    md.allreduce(mine, x)
    found, context = [], of(mine)

    def late():
        # The first thread is in its call then, and waits for the others.
        wait_until(lambda: context.stopped, 30)
        for call in (lambda: md.allreduce(mine, x), lambda: md.broadcast(mine, x)):
            try:
                call()
            except Exception as error:
                found.append(error)
        for rank in range(1, comm.size):
            comm.send(None, rank)

    thread = threading.Thread(target=late)
    if comm.rank == 0:
        thread.start()
    else:
        comm.recv(source=0)
    md.allreduce(mine, x)
    if comm.rank == 0:
        thread.join()
        assert [type(error) for error in found] == [ProtocolError, ProtocolError], found
        assert "another call on this communicator is under way" in str(found[0])
    md.free(mine)
    mine.Free()


def waits(thread):
    """Whether it waits for other ranks."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code is not polling.wait_until.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.ranks(2, further=(3,))
def test_a_second_thread_in_the_first_call_is_refused(comm):
    """R97: while the communicator is still cold; the first thread's call goes on."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("MPI was started below MPI_THREAD_MULTIPLE")
    for call in (md.allreduce, md.broadcast, md.plan):
        mine, x, found = comm.Dup(), np.ones(3), []
        first = threading.Thread(target=md.allreduce, args=(mine, x))
        if comm.rank == 1:
            first.start()
            wait_until(lambda: waits(first), 30)  # noqa: B023
            found.append(seconds_of(lambda: call(mine, np.ones(3))))  # noqa: B023
        comm.Barrier()
        if comm.rank == 1:
            first.join()
            ((error, seconds),) = found
            assert isinstance(error, ProtocolError)
            assert "the first call: another call on this communicator is under way" in str(error)
            assert seconds < 1
        else:
            md.allreduce(mine, x)
        assert x[0] == comm.size
        md.allreduce(mine, x)
        md.free(mine)
        mine.Free()


CALLS = 60


@pytest.mark.ranks(2, further=(3,))
def test_threads_on_communicators_of_their_own(comm):
    """A short version of tests/soak/threads.py, which makes 3 x 10,000 calls."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("no GPU: this MPI gives no THREAD_MULTIPLE")

    def work(mine, seed):
        rng = np.random.default_rng(seed)
        for k in range(CALLS):
            n = int(rng.integers(1, 3000))
            x = np.full(n, comm.rank + k, np.float32)
            kind = int(rng.integers(4))
            if kind == 0:
                md.allreduce(mine, x)
            elif kind == 1:
                md.iallreduce(mine, x).wait()
            elif kind == 2:
                handles = [md.iallreduce(mine, x), md.iallreduce(mine, np.ones(5))]
                for handle in handles[:: -1 if comm.rank else 1]:
                    handle.wait()
            else:
                md.allreduce(mine, x, algorithm="ring")
            expected = sum(r + k for r in range(comm.size))
            assert (x == expected).all(), (k, kind, x[0], expected)

    in_threads(comm, 3, work)


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", ["two", "new", "part"])
@pytest.mark.parametrize("n", [3, 5000])
def test_ranks_that_wait_for_each_other_on_two_communicators(comm, case, n):
    """Nobody is in another operation, and nobody can go on: both are told where the other is."""
    one = comm.Dup()
    x = np.ones(n)
    md.allreduce(one, x)
    other = one.Split(0 if comm.rank < 2 else 1) if case == "part" else one.Dup()
    if case == "two":
        md.allreduce(other, x)

    def run():
        order = (other, one) if comm.rank == 1 else (one, other)
        for which in order:
            md.allreduce(which, x)

    error, seconds = seconds_of(run)
    assert seconds < 8
    assert isinstance(error, MismatchError)
    if comm.rank < 2:
        assert "in one order" in str(error), error
        assert Path(__file__).name in str(error)
        assert "waits for rank" in str(error)
