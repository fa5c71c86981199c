"""Find TCP connections that get no answer, and make TCP send again every second.

    network down    TCP sends again after 0.2 0.4 0.8 1.6 3.2 6.4 12.8 25.6 51.2 ... s
    network is up   TCP sends only at the next of these times, perhaps after a long pause
    with this       TCP sends again after 0.2 0.4 0.8 1.6 1 1 1 1 ... s

On a connection that only receives, TCP sends nothing and does not notice that the network is down.
While a rank waits, this module therefore makes TCP ask the other side (keepalive). It changes only
connections to other hosts, and restores their settings afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from socket import (
    IPPROTO_TCP,
    SO_KEEPALIVE,
    SOL_SOCKET,
    TCP_INFO,
    TCP_KEEPCNT,
    TCP_KEEPIDLE,
    TCP_KEEPINTVL,
    TCP_NODELAY,
    TCP_SYNCNT,
    TCP_USER_TIMEOUT,
)
from typing import NamedTuple

#: The longest pause before TCP sends again, in milliseconds. Linux does not allow a smaller value.
PAUSE = 1000
#: The number of the socket option TCP_RTO_MAX_MS (the longest pause in milliseconds), which Linux
#: 6.15 and newer have.
RTO_MAX = getattr(socket, "TCP_RTO_MAX_MS", 44)
#: On at most this many idle connections of a process, TCP is made to send questions.
_MOST = 32
#: Two numbers of TCP's questions without an answer (see `_look`). From the first number on, a
#: doubled pause is no longer a reason to shorten pauses. From the second number on, TCP is not made
#: to ask at once when a wait is over.
_FEW, _ENOUGH = 3, 10
#: The shortest pause before TCP in Linux sends again, in milliseconds.
_RTO_MIN = 200
#: The states of an established connection, and of a connection that is being established.
_ESTABLISHED, _CONNECTING = 1, 2
#: The file in which the kernel lists all connections of this host.
_TABLE = "/proc/self/net/tcp"
_RETRIES = Path("/proc/sys/net/ipv4/tcp_retries2")

_GIVE_UP, _LONGEST = (IPPROTO_TCP, TCP_USER_TIMEOUT), (IPPROTO_TCP, RTO_MAX)
_COUNT, _PAUSE = (IPPROTO_TCP, TCP_KEEPCNT), (IPPROTO_TCP, TCP_KEEPINTVL)
_FIRST, _ASK = (IPPROTO_TCP, TCP_KEEPIDLE), (SOL_SOCKET, SO_KEEPALIVE)
_BEGIN = (IPPROTO_TCP, TCP_SYNCNT)
#: The options that are changed, in the order in which they are set; they are restored in the
#: reverse order.
_OPTIONS = (_GIVE_UP, _BEGIN, _LONGEST, _COUNT, _PAUSE, _FIRST, _ASK)
Values = dict[tuple[int, int], int]


class Stalled(NamedTuple):
    """A connection without an answer from `host`; TCP has tried again `tries` times."""

    fd: int
    inode: int
    host: str
    tries: int


def is_other_host(mine: str, theirs: str) -> bool:
    """Return whether the address `theirs` belongs to another host than `mine`."""
    there = ipaddress.ip_address(theirs)
    there = getattr(there, "ipv4_mapped", None) or there
    return mine != theirs and not there.is_loopback


def patience(retries: int, longest: int) -> int:
    """Return the milliseconds after which Linux gives up a connection that gets no answer.

    Linux sends again `retries` times, with pauses that grow to at most `longest` milliseconds.
    """
    doublings = min(max(longest // _RTO_MIN, 1).bit_length() - 1, retries)
    return ((2 << doublings) - 1) * _RTO_MIN + (retries - doublings) * longest


class Connections:
    """The TCP connections of this process to other hosts; it changes the settings of some."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, Values]] = {}  # inode -> file, old settings

    def look(self, waits: bool) -> list[Stalled]:
        """Return the connections that get no answer, and make TCP send on them again sooner.

        If this rank waits (`waits`), TCP also asks the other side of idle connections for a sign of
        life. A connection that works again gets its old settings back.
        """
        found, changed = [], set()
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a path for each file costs more
            with contextlib.suppress(OSError):
                one = self._look(int(name), waits)
                if one is not None:
                    changed.add(one.inode)
                    found += [one] if one.tries else []
        for inode in self._before.keys() - changed:
            self._restore(inode, *self._before.pop(inode))
        return found

    def answers(self, one: Stalled) -> bool:
        """Return whether the connection `one`, which got no answer, is open and works again."""
        with contextlib.suppress(OSError), _opened(one.fd, one.inode) as connection:
            return _state(connection)[:2] == (_ESTABLISHED, 0)
        return False

    def _look(self, fd: int, waits: bool) -> Stalled | None:
        about = os.fstat(fd)
        if not stat.S_ISSOCK(about.st_mode):
            return None
        inode = about.st_ino
        with _opened(fd, inode) as connection:
            tcp = _state(connection)
            idle = waits and not _queued(connection)
            if tcp.state > _CONNECTING or not (tcp.tries or tcp.backoff or idle):
                return None  # the usual case: the connection works
            mine, theirs = _addresses(connection, inode)
            if not is_other_host(mine, theirs):
                return None
            if not (route := has_route(theirs)):
                tcp = tcp._replace(tries=max(tcp.tries, 1))  # without a route there is no answer
            changed = inode in self._before
            old = self._before[inode][1] if changed else _values(connection)
            wanted = {}
            if tcp.resent > 1 or (changed and tcp.backoff and tcp.probes < _FEW):
                wanted = _short(tcp.state, old, _round_trip(connection))
            elif route and idle and not old[_ASK] and (changed or len(self._before) < _MOST):
                wanted = _asking(tcp.probes)
            elif tcp.tries and connection.getsockopt(*_ASK) and not old[_ASK]:
                wanted = _asking(tcp.probes)
                if route and tcp.probes < _ENOUGH:
                    connection.setsockopt(*_FIRST, 1)  # asks at once, because the wait is over
            if wanted or changed:
                self._before[inode] = fd, old
                _set(connection, {**old, **wanted})
            if connection.getsockopt(IPPROTO_TCP, TCP_NODELAY):
                # Setting TCP_NODELAY again makes TCP send, if possible, the data that could not
                # leave this host before. TCP itself would try this only at its long pauses, and its
                # pauses must not become shorter here, because TCP gives up after 15 tries.
                connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        return Stalled(fd, inode, theirs, tcp.tries)

    def _restore(self, inode: int, fd: int, old: Values) -> None:
        with contextlib.suppress(OSError), _opened(fd, inode) as connection:
            _set(connection, dict(reversed(old.items())))


def _short(state: int, old: Values, round_trip: int) -> Values:
    """Return the settings with which TCP sends again every second; {} before Linux 6.15."""
    # TCP must not send again before an answer can have arrived; an answer of a distant host may
    # take seconds.
    pause = max(PAUSE, 4 * round_trip)
    if old.get(_LONGEST, 0) <= pause:
        return {}
    if state == _CONNECTING:
        return {_BEGIN: 127, _LONGEST: pause}
    late = old[_GIVE_UP] or patience(int(_RETRIES.read_text()), old[_LONGEST])
    return {_GIVE_UP: late, _LONGEST: pause}


def _asking(probes: int) -> Values:
    """Return settings with which TCP asks an idle other side, but never gives up because of it."""
    pause = 1 << min(max(probes - 3, 0), 14)  # Linux allows at most 32,767 s
    return {_COUNT: 127, _PAUSE: pause, _FIRST: 1, _ASK: 1}


def has_route(host: str) -> bool:
    """Return whether the kernel of this host knows a way (a route) to `host`."""
    if ipaddress.ip_address(host).is_link_local and ":" in host:
        return True  # the address does not say which network device of this host leads there
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, 9))  # sends nothing: the kernel only chooses a route
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _opened(fd: int, inode: int) -> Iterator[socket.socket]:
    """Duplicate the descriptor of another library's connection, which stays open afterwards.

    Raises OSError if `fd` belongs to another file by now.
    """
    mine = os.dup(fd)
    # If the address family is given, Python need not ask the kernel for it. The options are the
    # same for IPv4 and IPv6.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=mine) as connection:
        if os.fstat(mine).st_ino != inode:
            raise OSError(f"file {fd} has changed")
        yield connection


def _addresses(connection: socket.socket, inode: int) -> tuple[str, str]:
    """Return the address of this end and of the other end of a connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as known:  # Python finds the family
        mine = known.getsockname()[0]
        with contextlib.suppress(OSError):
            return mine, known.getpeername()[0]
        # If the connection is not established yet, the kernel shows the other end only in the file
        # `_TABLE`.
        table = Path(_TABLE + "6" * (known.family == socket.AF_INET6))
        lines = map(str.split, table.read_text().splitlines())
        theirs = next((line[2] for line in lines if line[9] == str(inode)), "").partition(":")[0]
        if not theirs:
            raise OSError(f"the connection {inode} has ended")
        words = [int(theirs[k : k + 8], 16) for k in range(0, len(theirs), 8)]
        return mine, socket.inet_ntop(known.family, struct.pack(f"={len(words)}I", *words))


class _TcpState(NamedTuple):
    """The state of a connection: how often TCP has tried, sent again, and asked without answer."""

    state: int
    tries: int
    resent: int
    probes: int
    backoff: int


def _state(connection: socket.socket) -> _TcpState:
    state, _, resent, probes, backoff = connection.getsockopt(IPPROTO_TCP, TCP_INFO, 5)
    # The newest question of TCP is not counted, because its answer may still come.
    return _TcpState(state, resent + max(probes - 1, 0), resent, probes, backoff)


def _queued(connection: socket.socket) -> int:
    """Return the number of bytes that the other side has not acknowledged yet."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0])


def _round_trip(connection: socket.socket) -> int:
    """Return the time until an answer comes, in milliseconds, as measured by TCP."""
    info = connection.getsockopt(IPPROTO_TCP, TCP_INFO, 72)
    return int(struct.unpack_from("I", info, 68)[0]) // 1000


def _set(connection: socket.socket, values: Values) -> None:
    for option, value in values.items():
        if connection.getsockopt(*option) != value:
            connection.setsockopt(*option, value)


def _values(connection: socket.socket) -> Values:
    """Return the settings of a connection that this kernel supports."""
    found: Values = {}
    for option in _OPTIONS:
        with contextlib.suppress(OSError):
            found[option] = connection.getsockopt(*option)
    return found
