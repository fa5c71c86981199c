"""Connections without an answer: which are found, what is set on them, and what is told (R45)."""

import os
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from mpidist import events
from mpidist.launch.environment import is_on_one_host
from mpidist.runtime.communicator import public_call
from mpidist.runtime.network import network_watch, tcp_backoff
from mpidist.runtime.network.network_watch import NetworkWatch
from mpidist.runtime.network.tcp_backoff import RetryTimes, Stalled, is_other_host, patience

FILES = Path("/proc/self/fd")
TCP = socket.IPPROTO_TCP
LONGEST, GIVE_UP = 44, socket.TCP_USER_TIMEOUT


@pytest.fixture
def pair():
    """Two ends of a connection of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
        with near, far:
            yield near, far


def stalled(connection, resent=3):
    fd = connection.fileno()
    return Stalled(fd, os.fstat(fd).st_ino, "10.0.0.3", resent)


def settings(connection):
    """The longest pause of a connection and when it gives up; None before Linux 6.15."""
    try:
        return connection.getsockopt(TCP, LONGEST), connection.getsockopt(TCP, GIVE_UP)
    except OSError:
        return None


def test_other_hosts():
    assert is_other_host("10.0.0.1", "10.0.0.3")
    assert is_other_host("fe80::1%eth0", "fe80::3%eth0")
    assert is_other_host("::ffff:10.0.0.1", "::ffff:10.0.0.3")


@pytest.mark.parametrize("theirs", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_loopback_leads_to_no_other_host(theirs):
    assert not is_other_host("127.0.0.2", theirs)


def test_two_ranks_of_a_host_may_use_its_own_address():
    assert not is_other_host("10.0.0.1", "10.0.0.1")


def test_when_linux_gives_up():
    """What ip-sysctl of Linux says of tcp_retries2 = 15: 924.6 s; and what 1 s would make of it."""
    assert patience(15, 120_000) == 924_600
    assert patience(3, 120_000) == 3_000
    assert patience(0, 120_000) == 200
    assert patience(15, 1000) == 14_400


def test_healthy_connections_are_not_found(pair):
    near, far = pair
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    assert tcp_backoff.stalled_connections() == []


def test_other_files_are_no_connections(tmp_path):
    with socket.socket(socket.AF_UNIX), socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.connect(("127.0.0.1", 9))
        with (tmp_path / "file").open("w"), socket.create_server(("127.0.0.1", 0)):
            assert tcp_backoff.stalled_connections() == []


def test_a_connection_that_has_sent_again_is_found(pair, monkeypatch):
    """As seen from here: the kernel's words are those of a network that is away."""
    near, far = pair
    ends = {near.fileno(), far.fileno()}
    monkeypatch.setattr(tcp_backoff, "_state", lambda _: (1, 4))
    assert tcp_backoff.stalled_connections() == []  # both are on this host
    monkeypatch.setattr(tcp_backoff, "is_other_host", lambda *_: True)
    found = {one.fd: one for one in tcp_backoff.stalled_connections()}
    assert ends <= set(found)
    assert found[near.fileno()] == stalled(near, 4)._replace(host="127.0.0.1")
    monkeypatch.setattr(tcp_backoff, "_state", lambda _: (2, 4))  # still connecting
    assert tcp_backoff.stalled_connections() == []


def test_pauses_are_shortened_and_restored(pair):
    near, far = pair
    before, files = settings(near), len([*FILES.iterdir()])
    found = tcp_backoff.shorten(stalled(near))
    if before is None:  # before Linux 6.15, nothing can be set, and nothing is
        assert found is None
        assert near.getsockopt(TCP, GIVE_UP) == 0
        return
    assert found == RetryTimes(*before)
    retries = int(tcp_backoff._RETRIES.read_text())
    assert settings(near) == (1000, patience(retries, before[0]))
    assert settings(far) == before
    assert tcp_backoff.shorten(stalled(near)) is None  # they are short already
    tcp_backoff.restore(stalled(near), found)
    assert settings(near) == before
    assert len([*FILES.iterdir()]) == files
    near.sendall(b"still open")
    assert far.recv(10) == b"still open"


def test_what_the_user_has_set_stays(pair):
    near, _ = pair
    near.setsockopt(TCP, GIVE_UP, 77_000)
    found = tcp_backoff.shorten(stalled(near))
    assert near.getsockopt(TCP, GIVE_UP) == 77_000
    if settings(near) is not None:
        assert found.give_up == 77_000
        tcp_backoff.restore(stalled(near), found)
    assert near.getsockopt(TCP, GIVE_UP) == 77_000


def test_a_far_host_gets_time_to_answer(pair, monkeypatch):
    near, _ = pair
    monkeypatch.setattr(tcp_backoff, "_round_trip", lambda _: 700)
    tcp_backoff.shorten(stalled(near))
    assert settings(near) is None or settings(near)[0] == 2800


def test_another_file_of_this_number_is_left_alone(pair):
    near, far = pair
    wrong = stalled(near)._replace(inode=stalled(far).inode)
    before = settings(near)
    assert tcp_backoff.shorten(wrong) is None
    tcp_backoff.restore(wrong, RetryTimes(1000, 5000))
    assert settings(near) == before
    assert not tcp_backoff.answers_again(wrong)


def test_whether_a_connection_answers_again(pair):
    near, far = pair
    one = stalled(near)
    assert tcp_backoff.answers_again(one)
    far.close()  # the other process has ended
    deadline = time.monotonic() + 5
    while tcp_backoff.answers_again(one) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not tcp_backoff.answers_again(one)
    near.close()
    assert not tcp_backoff.answers_again(one)


def test_a_way_to_this_host_is_known():
    assert tcp_backoff.has_route("127.0.0.1")
    assert not tcp_backoff.has_route("ff02::1%nowhere")


# -------------------------------------------------------------------------- what the watch does


@pytest.fixture
def watched(monkeypatch, capsys):
    """A watch whose kernel is `calls`, and a function that returns what it has printed."""
    calls = []

    def fake(name, result):
        monkeypatch.setattr(
            tcp_backoff, name, lambda *given: calls.append((name, *given)) or result
        )

    fake("shorten", RetryTimes(120_000, 0))
    fake("restore", None)
    fake("answers_again", True)
    fake("has_route", True)
    monkeypatch.setattr(network_watch, "_aside", lambda call, *given: call(*given))
    monkeypatch.setattr(socket, "gethostbyaddr", lambda host: (f"n{host[-1]}.cluster", [], []))
    monkeypatch.setattr(events, "recent", [])
    monkeypatch.setattr(events, "VERBOSITY", 1)
    watch = NetworkWatch("rank 1 of 4 on n2")
    watch.calls, watch.fake = calls, fake
    watch.printed = lambda: capsys.readouterr().err
    watch.seen = lambda: [(kind, about["hosts"], about["seconds"]) for _, kind, about in
                          events.recent]  # fmt: skip
    return watch


ONE = Stalled(7, 70, "10.0.0.3", 1)
TWO = Stalled(8, 80, "10.0.0.4", 1)


def named(calls, name):
    return [call[1:] for call in calls if call[0] == name]


def test_a_host_is_away_and_comes_back(watched):
    watched.look(0.0, [])
    watched.look(1.0, [ONE])
    assert named(watched.calls, "shorten") == []  # one message was lost: that is TCP's own work
    for now in (1.25, 1.5, 3.75):
        watched.look(now, [ONE._replace(resent=2)])
    assert len(named(watched.calls, "shorten")) == 1
    assert watched.printed() == ""
    watched.look(4.0, [ONE._replace(resent=5)])
    line = watched.printed()
    assert line.startswith("mpidist: rank 1 of 4 on n2 has had no answer from n3 for 3 s, in ")
    assert line.endswith("; is a host or the network down?\n")
    watched.look(33.0, [ONE._replace(resent=33)])
    assert watched.printed() == ""
    assert named(watched.calls, "restore") == []
    watched.look(33.25, [])
    assert watched.printed() == (
        "mpidist: rank 1 of 4 on n2 gets answers from n3 again after 32 s, and goes on\n"
    )
    assert named(watched.calls, "restore") == [(ONE, RetryTimes(120_000, 0))]
    assert watched.seen() == [("network_away", ["n3"], 3.0), ("network_back", ["n3"], 32.2)]
    watched.look(34.0, [])
    assert watched.printed() == ""


def test_a_short_time_is_not_told(watched):
    watched.look(1.0, [ONE._replace(resent=2)])
    watched.look(3.5, [])
    watched.look(3.75, [TWO._replace(resent=2)])
    watched.look(6.0, [])
    assert watched.printed() == ""
    assert watched.seen() == []
    assert len(named(watched.calls, "restore")) == 2


def test_it_is_over_when_all_hosts_answer(watched):
    watched.look(0.0, [ONE, TWO])
    watched.look(3.0, [ONE, TWO])
    assert "no answer from n3, n4 for 3 s" in watched.printed()
    watched.look(5.0, [TWO])
    assert watched.printed() == ""
    watched.look(9.0, [])
    assert "from n3, n4 again after 9 s" in watched.printed()


def test_one_rank_of_a_node_speaks(watched):
    other = NetworkWatch("rank 0 of 4 on n2")
    for now in (0.0, 3.0):
        watched.look(now, [ONE])
        other.look(now, [ONE])
    line = watched.printed()
    assert line.count("\n") == 1
    assert "rank 1 of 4" in line
    other.look(5.0, [])
    watched.look(5.0, [])
    assert watched.printed().count("\n") == 1
    assert len(watched.seen()) == 4  # each rank has its events
    for now in (6.0, 9.0):
        other.look(now, [ONE])  # the next time, any of them
    assert "rank 0 of 4" in watched.printed()
    other.look(10.0, [])


def test_a_rank_without_a_link_speaks_afterwards(watched):
    """Until then its line would only make the launcher's daemon send in vain."""
    watched.fake("has_route", False)
    watched.look(0.0, [ONE])
    watched.look(3.0, [ONE])
    assert watched.printed() == ""
    watched.look(30.0, [])
    line = watched.printed()
    assert line.startswith("mpidist: rank 1 of 4 on n2 had no network for 30 s, in ")
    assert line.endswith(", and goes on\n")


def test_a_host_that_has_gone_does_not_answer_again(watched):
    """The connection has been closed; what follows is told by who notices the death."""
    watched.fake("answers_again", False)
    watched.look(0.0, [ONE])
    watched.look(3.0, [ONE])
    assert "no answer" in watched.printed()
    watched.look(900.0, [])
    assert watched.printed() == ""
    assert watched.seen()[-1] == ("network_lost", ["n3"], 900.0)


def test_errors_only(watched, monkeypatch):
    monkeypatch.setattr(events, "VERBOSITY", 0)
    watched.look(0.0, [ONE])
    watched.look(3.0, [ONE])
    watched.look(4.0, [])
    assert watched.printed() == ""
    assert len(watched.seen()) == 2


def test_a_host_without_a_name(watched, monkeypatch):
    def unknown(host):
        raise socket.herror(1, "Unknown host")

    monkeypatch.setattr(socket, "gethostbyaddr", unknown)
    watched.look(0.0, [ONE])
    watched.look(3.0, [ONE])
    assert "no answer from 10.0.0.3 for 3 s" in watched.printed()
    watched.look(4.0, [])


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
