"""TCP connections without an answer: which are found, and what is set on them (R45)."""

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from mpidist.runtime.network import tcp_backoff
from mpidist.runtime.network.tcp_backoff import Connections, Stalled, is_other_host, patience

FILES = Path("/proc/self/fd")
LONGEST, GIVE_UP = tcp_backoff._LONGEST, tcp_backoff._GIVE_UP
ASK, PAUSE = tcp_backoff._ASK, tcp_backoff._PAUSE


@pytest.fixture
def pair():
    """Two ends of a connection of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
        with near, far:
            yield near, far


def settings(connection):
    """All that may be changed on a connection."""
    return tcp_backoff._values(connection)


def kernel(monkeypatch, *, resent=0, probes=0, backoff=0, state=1, route=True, busy=False):
    """Let the kernel say so of all connections, which then lead to another host."""
    told = tcp_backoff._TcpState(state, resent + max(probes - 1, 0), resent, probes, backoff)
    monkeypatch.setattr(tcp_backoff, "_state", lambda _: told)
    monkeypatch.setattr(tcp_backoff, "_queued", lambda _: int(busy))
    monkeypatch.setattr(tcp_backoff, "has_route", lambda _: route)
    monkeypatch.setattr(tcp_backoff, "is_other_host", lambda *_: True)


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


def test_connections_within_a_host_are_left_alone(pair):
    near, far = pair
    before, looking = settings(near), Connections()
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    assert looking.look(waits=False) == looking.look(waits=True) == []
    assert settings(near) == before


def test_other_files_are_no_connections(tmp_path):
    with socket.socket(socket.AF_UNIX), socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.connect(("127.0.0.1", 9))
        with (tmp_path / "file").open("w"), socket.create_server(("127.0.0.1", 0)):
            assert Connections().look(waits=True) == []


def test_a_connection_that_has_sent_again_is_found(pair, monkeypatch):
    near, far = pair
    kernel(monkeypatch, resent=4)
    found = {one.fd: one for one in Connections().look(waits=False)}
    assert {near.fileno(), far.fileno()} <= set(found)
    inode = os.fstat(near.fileno()).st_ino
    assert found[near.fileno()] == Stalled(near.fileno(), inode, "127.0.0.1", 4)
    kernel(monkeypatch, resent=4, state=8)  # the other side has ended
    assert Connections().look(waits=False) == []


def test_pauses_are_shortened_and_set_back(pair, monkeypatch):
    near, far = pair
    before, files = settings(near), len([*FILES.iterdir()])
    looking = Connections()
    kernel(monkeypatch, resent=1, busy=True)  # one message was lost: TCP's own work
    looking.look(waits=True)
    assert settings(near) == before
    for tries in (2, 3):
        kernel(monkeypatch, resent=tries, busy=True)
        looking.look(waits=tries > 2)
        if LONGEST in before:
            retries = int(tcp_backoff._RETRIES.read_text())
            late = patience(retries, before[LONGEST])
            assert settings(near) == {**before, LONGEST: 1000, GIVE_UP: late}
        else:  # before Linux 6.15, nothing can be set, and nothing is
            assert settings(near) == before
    kernel(monkeypatch)
    assert looking.look(waits=False) == []
    assert settings(near) == before
    assert len([*FILES.iterdir()]) == files
    near.sendall(b"still open")
    assert far.recv(10) == b"still open"


def test_pauses_stay_short_until_tcp_has_forgotten_them(pair, monkeypatch):
    """After the first answer, the next loss would else make it wait for minutes."""
    near, _ = pair
    before, looking = settings(near), Connections()
    kernel(monkeypatch, backoff=9, busy=True)  # its other side reads nothing: that is well
    assert looking.look(waits=True) == []
    assert settings(near) == before
    kernel(monkeypatch, resent=3, backoff=3, busy=True)
    looking.look(waits=True)
    kernel(monkeypatch, backoff=3, busy=True)
    assert looking.look(waits=True) == []
    assert settings(near).get(LONGEST, 1000) == 1000
    # But with questions that only count, Linux gives up after 15: these get their usual pauses.
    kernel(monkeypatch, backoff=3, probes=3, busy=True)
    looking.look(waits=True)
    assert settings(near) == before
    kernel(monkeypatch)
    looking.look(waits=False)
    assert settings(near) == before


def test_a_connection_that_is_being_made(monkeypatch):
    """It is tried every second, and as long as before."""
    kernel(monkeypatch, resent=3, state=2, busy=True)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as near:
        monkeypatch.setattr(tcp_backoff, "_addresses", lambda *_: ("10.0.0.1", "10.0.0.3"))
        inode = os.fstat(near.fileno()).st_ino
        before = settings(near)
        found = Connections().look(waits=True)
        assert Stalled(near.fileno(), inode, "10.0.0.3", 3) in found
        if LONGEST in before:
            assert settings(near) == {**before, LONGEST: 1000, (socket.IPPROTO_TCP, 7): 127}
        near.connect(listening.getsockname())


def test_addresses(pair, monkeypatch):
    near, _ = pair
    inode = os.fstat(near.fileno()).st_ino
    assert tcp_backoff._addresses(near, inode) == ("127.0.0.1", "127.0.0.1")

    def unknown(self):
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(socket.socket, "getpeername", unknown, raising=False)
    assert tcp_backoff._addresses(near, inode) == ("127.0.0.1", "127.0.0.1")  # from the table
    with pytest.raises(OSError, match="has ended"):  # since the look at its state
        tcp_backoff._addresses(near, 1)


def test_a_question_after_hours(pair, monkeypatch):
    """Linux allows no pause of more than nine hours."""
    near, _ = pair
    kernel(monkeypatch, probes=255)
    assert near.fileno() in [one.fd for one in Connections().look(waits=True)]
    assert settings(near)[PAUSE] == 1 << 14


def test_an_address_of_a_link_does_not_say_which_link():
    assert tcp_backoff.has_route("fe80::1")


def test_what_the_user_has_set_stays(pair, monkeypatch):
    near, _ = pair
    near.setsockopt(*GIVE_UP, 77_000)
    before, looking = settings(near), Connections()
    kernel(monkeypatch, resent=3, busy=True)
    looking.look(waits=True)
    assert near.getsockopt(*GIVE_UP) == 77_000
    kernel(monkeypatch)
    looking.look(waits=False)
    assert settings(near) == before


def test_a_far_host_gets_time_to_answer(pair, monkeypatch):
    near, _ = pair
    monkeypatch.setattr(tcp_backoff, "_round_trip", lambda _: 700)
    kernel(monkeypatch, resent=3, busy=True)
    Connections().look(waits=False)
    assert settings(near).get(LONGEST, 2800) == 2800


def test_a_waiting_rank_asks_what_is_idle(pair, monkeypatch):
    near, _ = pair
    before, looking = settings(near), Connections()
    kernel(monkeypatch)
    looking.look(waits=False)
    assert settings(near) == before
    # Each question without an answer: 1 s at first, then twice as long as before.
    for probes, pause in ((0, 1), (1, 1), (3, 1), (4, 2), (9, 64)):
        kernel(monkeypatch, probes=probes)
        found = looking.look(waits=True)
        assert near.getsockopt(*ASK) == 1
        assert near.getsockopt(*PAUSE) == pause
        assert near.getsockopt(*GIVE_UP) == 0  # its other side may read nothing for hours
        assert {one.tries for one in found} == ({probes - 1} if probes > 1 else set())
    kernel(monkeypatch, probes=9)
    looking.look(waits=False)  # the wait is over, but not what it has found
    assert near.getsockopt(*ASK) == 1
    kernel(monkeypatch)
    looking.look(waits=False)
    assert settings(near) == before


def test_questions_end_when_there_is_something_to_send(pair, monkeypatch):
    near, _ = pair
    before, looking = settings(near), Connections()
    kernel(monkeypatch)
    looking.look(waits=True)
    kernel(monkeypatch, busy=True)
    looking.look(waits=True)
    assert settings(near) == before


def test_a_program_that_asks_itself_is_left_alone(pair, monkeypatch):
    near, _ = pair
    near.setsockopt(*ASK, 1)
    before, looking = settings(near), Connections()
    kernel(monkeypatch)
    looking.look(waits=True)
    assert settings(near) == before


def test_without_a_link_nothing_is_asked(pair, monkeypatch):
    """Linux would give up after 15 questions, as soon as something cannot leave this host."""
    near, far = pair
    before = settings(near)
    kernel(monkeypatch, route=False)
    found = Connections().look(waits=True)
    assert {near.fileno(), far.fileno()} <= {one.fd for one in found}
    assert settings(near) == before


def test_at_most_so_many_connections_are_asked(monkeypatch):
    monkeypatch.setattr(tcp_backoff, "_MOST", 3)
    looking, opened = Connections(), []
    with contextlib.ExitStack() as closing:
        listening = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        for _ in range(3):
            opened.append(closing.enter_context(socket.create_connection(listening.getsockname())))
            opened.append(closing.enter_context(listening.accept()[0]))
        kernel(monkeypatch)
        looking.look(waits=True)
        assert sum(one.getsockopt(*ASK) for one in opened) <= 3
        assert len(looking._before) == 3


def test_a_number_may_become_another_file(pair, monkeypatch):
    """MPI closes a connection, and the program opens another one at once."""
    near, far = pair
    before, looking = settings(near), Connections()
    kernel(monkeypatch)
    looking.look(waits=True)
    inode = os.fstat(far.fileno()).st_ino
    os.dup2(near.fileno(), far.fileno())  # the number of the other end is now this connection
    near.setsockopt(*PAUSE, 33)
    monkeypatch.undo()
    looking._restore(inode, far.fileno(), before)
    assert near.getsockopt(*PAUSE) == 33
    assert not looking.answers(Stalled(far.fileno(), inode, "10.0.0.3", 2))


def test_whether_a_connection_answers_again(pair):
    near, far = pair
    one, looking = Stalled(near.fileno(), os.fstat(near.fileno()).st_ino, "", 2), Connections()
    assert looking.answers(one)
    far.close()  # the other process has ended
    deadline = time.monotonic() + 5
    while looking.answers(one) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not looking.answers(one)
    near.close()
    assert not looking.answers(one)


def test_a_way_to_this_host_is_known():
    assert tcp_backoff.has_route("127.0.0.1")
    assert not tcp_backoff.has_route("ff02::1%nowhere")
