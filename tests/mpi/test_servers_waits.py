"""Workers that wait for each other in calls of one group are told, all of them, within a second."""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ProtocolError
from mpidist.servers.deadlock import stalled

SGD = md.optim.sgd(1.0)
ONES = {"x": np.ones(6)}


def told(comm, work):
    """The text that `work` raises on every rank within two seconds (one, and a busy machine)."""
    own = comm.Dup()
    start = time.monotonic()
    with pytest.raises(ProtocolError) as caught:
        work(own)
    assert time.monotonic() - start < 2
    md.free(own)
    own.Free()
    assert "workers wait for each other: " in str(caught.value)
    return str(caught.value)


@pytest.mark.covering
@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("mode", [md.BSP(), md.SSP(0)], ids=str)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_two_models_in_opposite_order(comm, mode, placement):
    """With more workers, and with several servers; others may be in any call."""

    def run(own):
        servers = 2 if comm.size > 4 else 1
        with md.ServerGroup(own, servers=servers, placement=placement) as group:
            one, two = (
                group.add(name, {"x": np.zeros(6)}, optimizer=SGD, consistency=mode)
                for name in ("one", "two")
            )
            if one is not None:
                for client in (one, two) if comm.rank else (two, one):
                    client.push_pull(ONES)

    text = told(comm, run)
    assert "waits in a pull of 'one' for rank 0" in text
    assert "rank 0 waits in a pull of 'two' for rank 1" in text


@pytest.mark.covering
@pytest.mark.ranks(3, 5)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_a_worker_in_a_barrier(comm, placement):
    def run(own):
        with md.parameter_server(own, ONES, optimizer=SGD, placement=placement) as client:
            if client is not None:
                client.group.barrier()
                client.pull()
                if comm.rank == 1:
                    client.group.barrier()
                while True:
                    client.push_pull(ONES)

    text = told(comm, run)
    assert "rank 0 waits in a pull of 'model' for rank 1" in text
    assert "rank 1 waits in barrier for rank 0" in text


@pytest.mark.ranks(3)
def test_a_worker_in_a_pause(comm):
    def run(own):
        with md.parameter_server(own, ONES, optimizer=SGD, on_pause=print) as client:
            if client is not None and comm.rank == 1:
                client.group.pause("now")
            while client is not None:
                client.push_pull(ONES)

    assert "rank 1 waits in pause for rank 0" in told(comm, run)


@pytest.mark.ranks(3)
def test_a_barrier_of_those_who_are_left(comm):
    """A worker that has left the group comes to no barrier."""

    def run(own):
        with md.parameter_server(own, ONES, optimizer=SGD) as client:
            if client is not None and comm.rank == 1:
                client.group.barrier()

    assert "rank 1 waits in barrier for rank 0, which has left the group" in told(comm, run)


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_no_false_alarm(comm, placement):
    """Barriers, pauses, uneven steps and long waits in any order that ends: nobody is accused."""
    with md.ServerGroup(comm, servers=1, placement=placement) as group:
        one = group.add("one", ONES, optimizer=SGD)
        two = group.add("two", ONES, optimizer=SGD, consistency=md.SSP(1))
        if one is None:
            group.serve(on_pause=lambda tag: None)
            return
        me = group.workers.rank
        for step in range(6):
            if step % 3 == me % 3:
                end = time.monotonic() + 0.16  # the others look around after 0.05 s
                while time.monotonic() < end:
                    group.progress()
                    time.sleep(0.005)
            one.push_pull(ONES)
            two.push_pull(ONES)
            if step % 2:
                group.barrier()
            if step == 3:
                group.pause(step)
        one.close()
        for _ in range(3 * me):
            two.push_pull(ONES)
        two.close()
        group.barrier()


@pytest.mark.ranks(4)
def test_no_false_alarm_under_a_bound_that_moves(comm):
    """One worker is in a barrier, one waits for the slow one: its rule opens when that one moves.

    The first worker is a little slower than the last, so it may pass it when the slow one is gone.
    """
    with md.parameter_server(comm, ONES, optimizer=SGD, consistency=md.DSSP(0, 8)) as client:
        if client is not None:
            steps, work = [(22, 0.01), (21, 0.06), (20, 0.005)][client.group.workers.rank]
            for _ in range(steps):
                time.sleep(work)
                client.push_pull(ONES)
            client.group.barrier()
            assert client.finished == steps


@pytest.mark.ranks(1)
def test_the_graph(comm):
    assert stalled({}) == []
    assert stalled({0: ([1], 1)}) == []
    assert stalled({0: ([1], 1), 1: ([0], 1)}) == [0, 1]
    assert stalled({0: ([1], 1), 1: ([2], 1), 2: ([1], 1), 3: ([4], 1)}) == [0, 1, 2]
    # 0 needs one of two, and one of them works.
    assert stalled({0: ([1, 2], 1), 1: ([0], 1)}) == []
    assert stalled({0: ([1, 2], 2), 1: ([0], 1)}) == [0, 1]
    assert stalled({0: ([], 0), 1: ([0], 1)}) == []
    assert stalled({0: ([0], 1)}) == [0]
