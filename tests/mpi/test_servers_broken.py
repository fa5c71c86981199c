"""Broken-off calls, wrong threads, ranks in other operations: all ranks raise, and none hangs."""

import gc
import signal
import threading
import time
import weakref
from contextlib import suppress

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.errors import MismatchError, MpidistError, ProtocolError
from mpidist.servers.link import GroupCall
from mpidist.servers.wire import node_share, wire_pieces

SGD = md.optim.sgd(1.0)
ONES = {"x": np.ones(6)}


def soon(work, kind=MpidistError):
    """What `work` raises on this rank, within ten seconds."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        work()
    assert time.monotonic() - start < 10
    return caught.value


@pytest.mark.ranks(3)
def test_an_error_between_two_calls_is_the_program_s_own(comm, own):
    """What a worker catches between two calls changes nothing."""
    with md.parameter_server(own, {"x": np.zeros(6)}, optimizer=SGD) as client:
        if client is not None:
            for step in range(3):
                client.pull()
                try:
                    if comm.rank == 1 and step == 1:
                        raise ValueError("a bad record")
                except ValueError:
                    pass
                client.push(ONES)
                client.clock()
            assert client.pull()["x"].tolist() == [-3.0] * 6


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_an_interrupt_within_a_wait(comm, own, placement):
    """KeyboardInterrupt in a pull that waits for a slower worker; the program catches it."""

    def run():
        with md.parameter_server(own, {"x": np.zeros(6)}, optimizer=SGD, placement=placement) as c:
            if c is None:
                return
            if comm.rank == 0:
                c.push_pull(ONES)
                signal.signal(signal.SIGALRM, interrupt)
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                with pytest.raises(KeyboardInterrupt):
                    c.push_pull(ONES)
                with pytest.raises(ProtocolError, match="failed earlier: push_pull 'model' was"):
                    c.pull()
                return
            c.push_pull(ONES)
            if comm.rank == 1:
                end = time.monotonic() + 0.8
                while time.monotonic() < end:  # a long step; colocated servers go on serving
                    c.group.progress() if time.monotonic() < end - 0.5 else time.sleep(0.01)
            while True:
                c.push_pull(ONES)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    error = soon(run, ProtocolError)
    if comm.rank:
        assert str(error) == "parameter server: rank 0 gave up with KeyboardInterrupt"
        assert error.secondary
    else:
        assert "failed earlier: push_pull 'model' was broken off by KeyboardInterrupt" in str(error)
        assert not error.secondary


class Breaks:
    """A communicator whose n-th send or receive raises."""

    def __init__(self, comm, n):
        self.comm, self.left = comm, n

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def _count(self):
        self.left -= 1
        if not self.left:
            raise MemoryError("no room")

    def Isend(self, *args):
        self._count()
        return self.comm.Isend(*args)

    def Irecv(self, *args):
        self._count()
        return self.comm.Irecv(*args)


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize("call", ["pull", "push", "clock", "push_pull", "push_pull again"])
@pytest.mark.parametrize("piece", [8, 1000])
def test_an_error_at_every_message(comm, monkeypatch, call, piece):
    """Two servers. Whichever send or receive of a call fails: every rank gets an error, soon."""
    monkeypatch.setattr(wire_pieces, "NODE_PIECE_BYTES", piece)
    monkeypatch.setattr(wire_pieces, "WINDOW", 2)
    monkeypatch.setattr(node_share, "enabled", False)
    through, n = False, 0
    while not through:
        n += 1
        own = comm.Dup()
        try:
            error, done = None, calls_with_a_fault(own, call, n)
        except MpidistError as caught:
            error, done = caught, False
        through = comm.bcast(done)  # rank 0 tells: it had fewer messages than that
        if through:
            assert error is None
        elif comm.rank:
            assert str(error) == "parameter server: rank 0 gave up with MemoryError: no room"
        else:
            assert f"failed earlier: {call.split()[0]}" in str(error)
        md.free(own)
        own.Free()
    assert n > 2


def calls_with_a_fault(comm, call, n):
    """Five clocks, in which the n-th message of one `call` of worker 0 fails; true where none did.

    The program catches the error and goes on as if nothing had been.
    """
    call, again, _ = call.partition(" again")
    out = {"out": {"x": np.zeros(6)}} if again else {}
    through = False
    with md.parameter_server(comm, {"x": np.zeros(6)}, servers=2, optimizer=SGD) as client:
        if client is None:
            return False
        for clock in range(5):
            fault = comm.rank == 0 and clock == 1
            for name in ["push_pull"] if call == "push_pull" else ["pull", "push", "clock"]:
                give = {} if name in ("pull", "clock") else {"gradients": ONES, **out}
                if not (fault and name == call):
                    getattr(client, name)(**give)
                    continue
                real, client._link.comm = client._link.comm, Breaks(client._link.comm, n)
                try:
                    getattr(client, name)(**give)
                    through = True
                except MemoryError:
                    pass
                client._link.comm = real
    return through


@pytest.mark.ranks(3)
def test_an_error_in_one_group_reaches_the_other(comm):
    """Rank 1 is in both groups: what ends the first for it ends the second for rank 2."""
    left = comm.Split(0 if comm.rank < 2 else MPI.UNDEFINED)
    right = comm.Split(0 if comm.rank else MPI.UNDEFINED)

    def run():
        if comm.rank == 0:
            with md.parameter_server(left, ONES, servers=[1], optimizer=SGD, placement="colocated"):
                raise ZeroDivisionError("loss")
        if comm.rank == 2:
            with md.parameter_server(right, ONES, servers=[1], optimizer=SGD) as client:
                assert client is None
        with (
            md.parameter_server(right, ONES, servers=[1], optimizer=SGD) as client,
            md.parameter_server(left, ONES, servers=[1], optimizer=SGD, placement="colocated") as c,
        ):
            while True:
                c.push_pull(ONES)
                client.push_pull(ONES)

    error = soon(run, Exception)
    if comm.rank == 0:
        assert isinstance(error, ZeroDivisionError)
    else:
        assert "gave up with ZeroDivisionError: loss" in str(error)
        assert error.secondary
    for part in (left, right):
        if part != MPI.COMM_NULL:
            md.free(part)
            part.Free()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_the_program_goes_on_without_the_memory_of_a_failed_group(comm, own, placement):
    """Messages may still arrive in buffers of the group, which are kept; the model is not."""
    shards = []

    def run():
        with md.ServerGroup(own, placement=placement) as group:
            client = group.add("m", {"x": np.zeros(6)}, optimizer=SGD)
            if group.is_server:
                shards.append(weakref.ref(group.hosted("m")[1].shard))
            if client is None:
                group.serve()
            client.push_pull(ONES)
            if comm.rank == 0:
                raise ZeroDivisionError("loss")
            while True:
                client.push_pull(ONES)

    soon(run, Exception)
    gc.collect()
    assert [shard() for shard in shards] == [None] * (comm.rank == 2)


@pytest.mark.ranks(3)
def test_what_workers_raise_together_reaches_the_server(comm, own):
    """An error that all workers know is news to the server."""

    def run():
        with md.parameter_server(own, ONES, optimizer=SGD) as client:
            if client is not None:
                md.check_replicas(client.group.workers, {"x": np.full(3, comm.rank)})

    error = soon(run)
    if comm.rank == 2:
        assert "gave up with ReplicaError: replicas differ" in str(error)
        assert error.secondary
    else:
        assert isinstance(error, md.ReplicaError)


def in_thread(work):
    """Start `work` in a thread; returns the thread, and where what it raised will be."""
    caught = []

    def run():
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, caught


@pytest.mark.ranks(3)
def test_a_second_thread_is_refused(comm, own):
    """B2: while one thread waits in a pull another one's call is refused by name, nothing more."""
    with md.parameter_server(own, {"x": np.zeros(6)}, optimizer=SGD) as client:
        if client is None:
            return
        client.push(ONES)
        if comm.rank == 0:
            thread, caught = in_thread(client.clock)
            thread.join()
            assert caught == []  # one after the other is fine
            thread, caught = in_thread(client.pull)
            time.sleep(0.2)
            calls = [client.pull, client.clock, lambda: client.push(ONES), client.group.barrier]
            for call in [*calls, lambda: client.push_pull(ONES), client.close, client.group.close]:
                with pytest.raises(ProtocolError, match="use one thread at a time"):
                    call()
            comm.Send(np.zeros(1), 1, 9)
            thread.join()
            assert caught == []
        else:
            # The other worker's pull waits for this clock.
            comm.Recv(np.zeros(1), 0, 9)
            client.clock()
        assert client.pull()["x"].tolist() == [-1.0] * 6


@pytest.mark.ranks(3)
def test_threads_that_meet(comm, own):
    """Two threads of a worker call as they like: every call works or is refused."""
    with md.parameter_server(own, {"x": np.zeros(600)}, consistency=md.ASP(), optimizer=SGD) as c:
        if c is None:
            return
        outcomes, refusals = [], []

        def calls():
            for _ in range(150):
                try:
                    c.push_pull({"x": np.ones(600)})
                    outcomes.append(True)
                except ProtocolError as error:
                    refusals.append(str(error))
                    outcomes.append(False)

        threads = [in_thread(calls) for _ in range(2)]
        for thread, _ in threads:
            thread.join()
        assert [caught for _, caught in threads] == [[], []]
        assert len(outcomes) == 300
        assert all("one thread at a time" in text for text in refusals)
        assert c.finished == sum(outcomes) > 0


@pytest.mark.ranks(3)
def test_a_thread_below_thread_multiple(comm, own):
    """Where MPI was started for its main thread alone another one is refused by name."""
    with md.parameter_server(own, {"x": np.zeros(6)}, optimizer=SGD) as client:
        if client is None:
            return
        client.group.link.careful = client.group.link.one_thread = True
        for call in (client.pull, client.clock, lambda: client.push(ONES), client.close):
            thread, caught = in_thread(call)
            thread.join()
            assert "below MPI_THREAD_MULTIPLE" in str(caught[0])
        client.push_pull(ONES)


def elsewhere(comm):
    md.allreduce(comm, np.ones(1000))


@pytest.mark.covering
@pytest.mark.ranks(3)
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("where", ["group", "add", "close", "serve", "guard", "watch"])
def test_ranks_in_another_operation(comm, own, who, where):
    """A4: one rank is in an allreduce, the others set up, serve or leave: all get one error."""

    def run():
        if where in ("group", "guard", "watch"):
            if comm.rank == who:
                elsewhere(own)
            entry = {"group": md.ServerGroup, "guard": md.guard, "watch": md.watch}[where]
            entry(own)
        with md.ServerGroup(own) as group:
            if where == "add" and comm.rank == who:
                elsewhere(own)
            client = group.add("m", {"x": np.zeros(6)}, optimizer=SGD)
            if where == "serve" and comm.rank == who:
                elsewhere(own)
            if client is None:
                group.serve()
            elif where == "serve":
                while True:
                    client.push_pull(ONES)
            if comm.rank == who:
                elsewhere(own)

    error = soon(run)
    words = ("ranks must make the same calls", "gave up with MismatchError")
    assert isinstance(error, MismatchError | ProtocolError)
    assert any(word in str(error) for word in words), str(error)
    assert "allreduce" in str(error)


@pytest.mark.ranks(3)
def test_the_cause_is_named_after_the_communicator_is_freed(comm):
    """A failed communicator is given up, not freed: a notice that lies there is still read."""
    own = comm.Dup()
    group = md.ServerGroup(own, servers=1)
    client = group.add("t", {"w": np.zeros(4, "f4")}, optimizer=md.optim.sgd(0.1))
    comm.Barrier()  # else a rank may read the notice while it is still in `add`

    def fail():
        client.push({"w": np.zeros(4, "f4")})
        with GroupCall(group.link, "pull"):
            group.link.touched = True
            raise RuntimeError("stopped by the test")

    if comm.rank == 0:
        with pytest.raises(RuntimeError):
            fail()
    comm.Barrier()
    md.free(own)
    if comm.rank:
        with pytest.raises(ProtocolError, match="stopped by the test"):
            client.pull() if client is not None else group.serve()
    with suppress(MpidistError):
        group.close()
