"""What a rank tells when another host does not answer, and when it tells nothing (R45)."""

import socket
import sys
from functools import partial
from pathlib import Path

import pytest

from mpidist import events
from mpidist.launch.environment import is_on_one_host
from mpidist.runtime import polling
from mpidist.runtime.communicator import public_call
from mpidist.runtime.network import network_watch
from mpidist.runtime.network.network_watch import NetworkWatch
from mpidist.runtime.network.tcp_backoff import Stalled


class Kernel:
    """Connections as the kernel would tell of them."""

    stalled: tuple = ()
    well = True

    def look(self, waits):
        self.waits = waits
        return [*self.stalled]

    def answers(self, one):
        return self.well


class Watched(NetworkWatch):
    """A watch to which a test says what the kernel says, in a rank that waits."""

    def at(self, now, *stalled):
        self.connections.stalled = stalled
        polling.long_wait = now
        self.look(now)


@pytest.fixture
def seen(monkeypatch):
    """The events, with their hosts and seconds."""
    found = []
    monkeypatch.setattr(network_watch, "_aside", lambda call, *given: call(*given))
    monkeypatch.setattr(network_watch, "has_route", lambda _: True)
    monkeypatch.setattr(socket, "gethostbyaddr", lambda host: (f"n{host[-1]}.cluster", [], []))
    monkeypatch.setattr(events, "emit", lambda kind, hosts, seconds, **_: found.append(
        (kind, hosts, seconds)))  # fmt: skip
    monkeypatch.setattr(events, "VERBOSITY", 1)
    monkeypatch.setattr(polling, "long_wait", 0.0)
    monkeypatch.setattr(polling, "unreachable", False)
    return found


@pytest.fixture
def watched(seen):
    return Watched("rank 1 of 4 on n2", Kernel())


@pytest.fixture
def printed(capsys):
    return lambda: capsys.readouterr().err


ONE = Stalled(7, 70, "10.0.0.3", 1)
TWO = Stalled(8, 80, "10.0.0.4", 1)


def test_a_host_is_away_and_comes_back(watched, printed, seen):
    watched.at(0.0)
    watched.at(1.0, ONE)
    watched.at(3.75, ONE._replace(tries=4))
    assert printed() == ""
    assert polling.unreachable
    watched.at(4.0, ONE._replace(tries=5))
    line = printed()
    assert line.startswith("mpidist: rank 1 of 4 on n2 has had no answer from n3 for 3 s, in ")
    assert line.endswith("; is a host or the network down?\n")
    watched.at(33.0, ONE._replace(tries=33))
    assert printed() == ""
    watched.at(33.25)
    line = "mpidist: rank 1 of 4 on n2 gets answers from n3 again after 32 s, and goes on\n"
    assert printed() == line
    assert seen == [("network_away", ["n3"], 3.0), ("network_back", ["n3"], 32.2)]
    assert not polling.unreachable
    watched.at(34.0)
    assert printed() == ""


def test_a_short_time_is_not_told(watched, printed, seen):
    watched.at(1.0, ONE)
    watched.at(3.5)
    watched.at(3.75, TWO)
    watched.at(6.0)
    assert printed() == ""
    assert seen == []


def test_a_rank_that_does_not_wait_says_nothing(watched, printed, monkeypatch):
    """A program may have other connections, to a host that is none of the job."""
    frames = iter([sys._getframe(), None] * 20)
    monkeypatch.setattr(network_watch, "_main_frame", lambda: next(frames))
    watched.connections.stalled = (ONE,)
    for now in range(10, 20):
        watched.look(float(now))
        assert not watched.connections.waits
    assert printed() == ""
    monkeypatch.setattr(network_watch, "_main_frame", sys._getframe)
    watched.at(21.0, ONE)  # now it waits
    assert "for 11 s, in" in printed()
    watched.at(22.0)


def test_a_rank_in_a_blocking_call_waits(watched, printed, monkeypatch):
    frame = sys._getframe()
    monkeypatch.setattr(network_watch, "_main_frame", lambda: frame)
    watched.connections.stalled = (ONE,)
    polling.long_wait = -100.0
    for now in (10.0, 10.5, 11.5, 13.0):
        watched.look(now)
    assert watched.connections.waits
    assert "for 3 s, in" in printed()
    watched.at(14.0)


def test_it_is_over_when_all_hosts_answer(watched, printed):
    watched.at(0.0, ONE, TWO)
    watched.at(3.0, ONE, TWO)
    assert "no answer from n3, n4 for 3 s" in printed()
    watched.at(5.0, TWO)
    assert printed() == ""
    watched.at(9.0)
    assert "from n3, n4 again after 9 s" in printed()


def test_one_rank_of_a_node_speaks(watched, printed, seen):
    other = Watched("rank 0 of 4 on n2", Kernel())
    for now in (0.0, 3.0):
        watched.at(now, ONE)
        other.at(now, ONE)
    line = printed()
    assert line.count("\n") == 1
    assert "rank 1 of 4" in line
    other.at(5.0)
    watched.at(5.0)
    assert printed().count("\n") == 1
    assert len(seen) == 4  # each rank has its events
    for now in (6.0, 9.0):
        other.at(now, ONE)  # the next time, any of them
    assert "rank 0 of 4" in printed()
    other.at(10.0)


def test_a_rank_without_a_link_speaks_afterwards(watched, printed, monkeypatch):
    """Until then its line would only make the launcher's daemon send in vain."""
    monkeypatch.setattr(network_watch, "has_route", lambda _: False)
    watched.at(0.0, ONE)
    watched.at(3.0, ONE)
    watched.at(5.0)  # it does not wait now
    assert printed() == ""
    monkeypatch.setattr(network_watch, "has_route", lambda _: True)
    watched.at(30.0)
    line = printed()
    assert line.startswith("mpidist: rank 1 of 4 on n2 had no network for 30 s, in ")
    assert line.endswith(", and goes on\n")


def test_a_host_that_has_gone_does_not_answer_again(watched, printed, seen):
    """The connection has been closed; what follows is told by who notices the death."""
    watched.connections.well = False
    watched.at(0.0, ONE)
    watched.at(3.0, ONE)
    assert "no answer" in printed()
    watched.at(900.0)
    assert printed() == ""
    assert seen[-1] == ("network_lost", ["n3"], 900.0)


def test_errors_only(watched, printed, seen, monkeypatch):
    monkeypatch.setattr(events, "VERBOSITY", 0)
    watched.at(0.0, ONE)
    watched.at(3.0, ONE)
    watched.at(4.0)
    assert printed() == ""
    assert len(seen) == 2


def test_a_host_without_a_name(watched, printed, monkeypatch):
    def unknown(host):
        raise socket.herror(1, "Unknown host")

    monkeypatch.setattr(socket, "gethostbyaddr", unknown)
    watched.at(0.0, ONE)
    watched.at(3.0, ONE)
    assert "no answer from 10.0.0.3 for 3 s" in printed()
    watched.at(4.0)


def test_the_watch_goes_on_when_no_file_is_left(watched, monkeypatch):
    """Else it would end, perhaps while a host is away, and nobody would learn of its return."""
    looks, naps = [], iter([None, None])

    def look(waits):
        looks.append(waits)
        if len(looks) == 1:
            raise OSError(24, "Too many open files")
        return []

    watched.connections.look = look
    monkeypatch.setattr(network_watch.time, "sleep", lambda _: next(naps))
    polling.unreachable = True
    with pytest.raises(StopIteration):
        watched.run()
    assert len(looks) == 2
    assert not polling.unreachable


def test_what_the_main_thread_does():
    line = f"{Path(__file__).name}:{sys._getframe().f_lineno + 1}"
    assert public_call(sys._getframe()) == f", in {line}"
    assert public_call(None) == ""


@pytest.mark.parametrize(
    ("environ", "one"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "4"}, False),
        ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "4"}, False),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4",
          "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)  # fmt: skip
def test_jobs_on_one_host(environ, one):
    assert is_on_one_host(environ) is one


def test_a_job_on_one_host_is_not_watched(monkeypatch):
    begun = []
    monkeypatch.setattr(network_watch.threading, "Thread", partial(print, file=sys.stderr))
    monkeypatch.setattr(network_watch, "is_on_one_host", lambda: begun.append(1) or True)
    network_watch.watch_network("rank 0 of 2 on n1")
    assert begun == [1]
    assert not network_watch._started.locked()
