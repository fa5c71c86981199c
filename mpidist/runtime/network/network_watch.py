"""Notice that another host cannot be reached, tell the user, and shorten the pauses of TCP.

    mpidist: rank 1 of 4 on n2 has had no answer from n3 for 5 s, in md.allreduce
             (train.py:31); is a host or the network down?
    mpidist: rank 1 of 4 on n2 gets answers from n3 again after 32 s, and goes on

A rank that waits for long may wait for a rank that computes. Only the kernel knows whether the
network is away: it keeps sending data that the other host does not acknowledge. A host acknowledges
data also if its processes are busy or stopped. So a thread of each rank asks the kernel once a
second about the connections of the process. It does not call MPI, and it also serves ranks that are
in a blocking call of MPI. Ranks that do not wait pay nothing for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ... import events
from ...launch.environment import is_on_one_host
from ..communicator import public_call
from . import tcp_backoff
from .tcp_backoff import Settings, Stalled

#: Seconds without an answer after which a rank tells the user.
PATIENCE = 5.0
#: Seconds between two looks, and between two looks while a connection gets no answer. A process
#: with many connections looks less often, so that it spends at most 0.2 % of its time on looks.
_LOOK, _SOON, _SHARE = 1.0, 0.25, 0.002

_started = threading.Lock()


def start(name: str) -> None:
    """Watch the network of this rank from now on; a second call does nothing.

    `name` is what lines call this rank. Does nothing if all ranks are on one host, and where there
    is no /proc.
    """
    if not is_on_one_host() and os.path.isdir("/proc/self/fd") and _started.acquire(False):  # noqa: PTH112
        watch = NetworkWatch(name)
        threading.Thread(target=watch.run, name="mpidist-network", daemon=True).start()


@dataclass
class _Away:
    """A connection that gets no answer, since when, and its settings before they were changed."""

    connection: Stalled
    since: float
    before: Settings | None = None
    shortened: bool = False


class NetworkWatch:
    """The watch of one process. Only its thread calls `look`."""

    def __init__(self, name: str):
        self.name = name
        self._away: dict[int, _Away] = {}
        self._names: dict[str, str] = {}
        self._since: float | None = None  # of the first connection without an answer
        self._told: _Telling | None = None

    def run(self) -> None:
        """Look for ever."""
        pause = _LOOK
        while True:
            time.sleep(pause)
            start = time.monotonic()
            self.look(start, tcp_backoff.stalled_connections())
            spent = time.monotonic() - start
            pause = max(_SOON if self._away else _LOOK, spent / _SHARE)

    def look(self, now: float, stalled: list[Stalled]) -> None:
        """Handle the connections that get no answer now."""
        for one in stalled:
            if one.inode not in self._away:
                self._away[one.inode] = _Away(one, now)
                if one.host not in self._names:
                    self._names[one.host] = one.host
                    _aside(self._find_name, one.host)
            away = self._away[one.inode]
            if one.resent > 1 and not away.shortened:
                away.before, away.shortened = tcp_backoff.shorten(one), True
        lost = False
        for inode in self._away.keys() - {one.inode for one in stalled}:
            away = self._away.pop(inode)
            lost = lost or not tcp_backoff.answers(away.connection)
            if away.before is not None:
                tcp_backoff.restore(away.connection, away.before)
        since = min((away.since for away in self._away.values()), default=None)
        if since is not None:
            self._since = since if self._since is None else self._since
        if self._since is None:
            return
        if self._told is None and since is not None and now - since >= PATIENCE:
            hosts = sorted({away.connection.host for away in self._away.values()})
            self._told = _Telling(self.name, [self._names[host] for host in hosts],
                                  all(map(tcp_backoff.has_route, hosts)))  # fmt: skip
            self._told.begin(now - self._since)
        if not self._away:
            if self._told is not None:
                self._told.end(now - self._since, lost)
            self._since = self._told = None

    def _find_name(self, host: str) -> None:
        with contextlib.suppress(OSError):
            self._names[host] = socket.gethostbyaddr(host)[0].split(".")[0]


class _Telling:
    """What one process tells of one time in which it got no answer from hosts.

    Of the ranks of a node, which one daemon has started, one prints.
    """

    def __init__(self, name: str, hosts: list[str], route: bool):
        self.name, self.hosts, self.route = name, hosts, route
        self.doing = public_call(sys._current_frames().get(threading.main_thread().ident or 0))
        # The name of a socket belongs to one process of a host, and is free when the process ends.
        self._first = socket.socket(socket.AF_UNIX)
        self._speaks = bool(events.VERBOSITY)
        try:
            self._first.bind(f"\0mpidist-network-{os.getuid()}-{os.getppid()}")
        except OSError:
            self._speaks = False

    def begin(self, seconds: float) -> None:
        """Tell that hosts do not answer."""
        self._emit("network_away", seconds)
        # Without a route, a line would not reach the launcher, but would make the launcher's daemon
        # send in vain, so that it would be late when the network is back.
        if self.route:
            self._say(f"has had no answer from {_few(self.hosts)} for {seconds:.0f} s{self.doing}; "
                      "is a host or the network down?")  # fmt: skip

    def end(self, seconds: float, lost: bool) -> None:
        """Tell that the hosts answer again, or, if `lost`, only note that connections are lost."""
        self._first.close()
        self._emit("network_lost" if lost else "network_back", seconds)
        if lost:
            return
        if self.route:
            self._say(f"gets answers from {_few(self.hosts)} again after {seconds:.0f} s, and goes "
                      "on")  # fmt: skip
        else:
            self._say(f"had no network for {seconds:.0f} s{self.doing}, and goes on")

    def _emit(self, kind: str, seconds: float) -> None:
        about = {"hosts": self.hosts, "seconds": round(seconds, 1), "route": self.route}
        _aside(partial(events.emit, kind, **about, doing=self.doing))

    def _say(self, text: str) -> None:
        if self._speaks:
            line = f"mpidist: {self.name} {text}"
            _aside(partial(print, line, file=sys.stderr, flush=True))


def _aside(call: Callable, *arguments) -> None:
    """Call a function that may wait for the network, such as a name server or a file system."""
    threading.Thread(target=call, args=arguments, name="mpidist-network-line", daemon=True).start()


def _few(hosts: list[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
