"""Find TCP connections that get no answer, and let TCP send again every second.

    link away       TCP sends again after 0.2 0.4 0.8 1.6 3.2 6.4 12.8 25.6 51.2 ... s
    link is back    nothing happens before the next of these times, up to as long as it was away
    `shorten`       TCP sends again after 0.2 0.4 0.8 1.6 1 1 1 1 ... s

Only established connections to other hosts on which TCP has sent again in vain are changed. They
may also belong to the user's program, which does no harm: TCP sends a few packets more, gives up
after the same time as before, and has its old settings again when the other host has answered.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: The longest pause of TCP, in milliseconds; Linux allows no shorter one.
PAUSE = 1000
#: An option of Linux 6.15 and newer, in milliseconds.
_RTO_MAX = getattr(socket, "TCP_RTO_MAX_MS", 44)
#: The shortest pause of TCP in Linux, in milliseconds.
_RTO_MIN = 200
#: The state of an established connection in `tcp_info`, and where the round-trip time stands.
_ESTABLISHED, _RTT = 1, 68
_RETRIES = Path("/proc/sys/net/ipv4/tcp_retries2")


class Stalled(NamedTuple):
    """A connection that gets no answer: its file, the other host, and how often TCP has sent."""

    fd: int
    inode: int
    host: str
    resent: int


class Settings(NamedTuple):
    """The longest pause of a connection and the time after which TCP gives up, in milliseconds.

    If `give_up` is 0, the number of retries decides.
    """

    pause: int
    give_up: int


def is_other_host(mine: str, theirs: str) -> bool:
    """Return whether a connection between two addresses leads to another host."""
    there = ipaddress.ip_address(theirs)
    there = getattr(there, "ipv4_mapped", None) or there
    return mine != theirs and not there.is_loopback


def patience(retries: int, longest: int) -> int:
    """Return the milliseconds after which Linux gives up a connection after so many retries.

    The pauses begin with 200 ms and double up to `longest` milliseconds.
    """
    doublings = min(max(longest // _RTO_MIN, 1).bit_length() - 1, retries)
    return ((2 << doublings) - 1) * _RTO_MIN + (retries - doublings) * longest


def stalled_connections() -> list[Stalled]:
    """Return the connections of this process to other hosts on which TCP has sent again in vain."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a path for each file costs more
        with contextlib.suppress(OSError):
            one = _stalled(int(name))
            found += [one] if one else []
    return found


def _stalled(fd: int) -> Stalled | None:
    about = os.fstat(fd)
    if not stat.S_ISSOCK(about.st_mode):
        return None
    # With the family given, Python asks the kernel nothing; most connections are well.
    with _opened(fd, socket.AF_INET) as quick:
        state, resent = _state(quick)
    if state != _ESTABLISHED or not resent:
        return None
    with _opened(fd) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        mine, theirs = connection.getsockname()[0], connection.getpeername()[0]
        ours = os.fstat(connection.fileno()).st_ino == about.st_ino
    return (
        Stalled(fd, about.st_ino, theirs, resent) if ours and is_other_host(mine, theirs) else None
    )


def answers(one: Stalled) -> bool:
    """Return whether a connection that got no answer is established and gets answers again."""
    with contextlib.suppress(OSError), _opened(one.fd, socket.AF_INET) as connection:
        if os.fstat(connection.fileno()).st_ino == one.inode:
            return _state(connection) == (_ESTABLISHED, 0)
    return False


def shorten(one: Stalled) -> Settings | None:
    """Let TCP send again every second on a connection; return its old settings.

    Returns None, and changes nothing, if the pauses are short already or Linux is older than 6.15.
    """
    with contextlib.suppress(OSError), _opened(one.fd, socket.AF_INET) as connection:
        if os.fstat(connection.fileno()).st_ino != one.inode:
            return None
        before = Settings(
            connection.getsockopt(socket.IPPROTO_TCP, _RTO_MAX),
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        )
        # TCP must not send again before an answer can be here: a far host may need seconds.
        pause = max(PAUSE, 4 * _round_trip(connection))
        if before.pause <= pause:
            return None
        # Linux counts retries, so with short pauses it would give up after 14 s and not after 15
        # minutes. The time to give up is set first: if it cannot be set, the pauses stay.
        if not before.give_up:
            give_up = patience(int(_RETRIES.read_text()), before.pause)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, give_up)
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, pause)
        return before
    return None


def restore(one: Stalled, before: Settings) -> None:
    """Give a connection its old settings back, if it is still open.

    With a time to give up, Linux would also end a connection whose other side reads nothing for so
    long, which may only be busy.
    """
    with contextlib.suppress(OSError), _opened(one.fd, socket.AF_INET) as connection:
        if os.fstat(connection.fileno()).st_ino == one.inode:
            connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX, before.pause)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, before.give_up)


def has_route(host: str) -> bool:
    """Return whether this host knows a way to `host`; it has none if its own link is down."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, 9))  # sends nothing: the kernel only chooses a route
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _opened(fd: int, family: int = -1) -> Iterator[socket.socket]:
    """Open the connection of another library once more, so that closing it does not end it."""
    kind = -1 if family == -1 else socket.SOCK_STREAM
    mine = os.dup(fd)
    try:
        connection = socket.socket(family, kind, fileno=mine)
    except OSError:
        os.close(mine)
        raise
    with connection:
        yield connection


def _state(connection: socket.socket) -> tuple[int, int]:
    """Return the state of a connection, and how often TCP has sent again without an answer."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
    return info[0], info[2]


def _round_trip(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT + 4)
    return int(struct.unpack_from("I", info, _RTT)[0]) // 1000
