"""Notice that another host cannot be reached, tell the user, and make TCP send again sooner.

    mpidist: rank 1 of 4 on n2 has had no answer from n3 for 3 s, in md.allreduce
             (train.py:31); is a host or the network down?
    mpidist: rank 1 of 4 on n2 gets answers from n3 again after 32 s, and goes on

A host acknowledges data even if its processes are busy or stopped. So a thread of each rank asks
the kernel once a second about the connections of the process. The thread uses at most 0.2 % of a
core.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from ... import events
from ...launch.environment import is_on_one_host
from .. import polling
from ..communicator import public_call
from .tcp_backoff import Connections, Stalled, has_route

#: After this many seconds without an answer, a rank tells the user.
PATIENCE = 3.0
#: Seconds between two checks of the connections: normally, and while a connection gets no answer. A
#: process with many connections checks less often, so that it spends at most 0.2 % of its time on
#: checks.
_LOOK, _SOON, _SHARE = 1.0, 0.25, 0.002

_started = threading.Lock()


def watch_network(name: str) -> None:
    """Watch the network of this rank from now on; a second call does nothing.

    `name` is the name of this rank in messages. Does nothing if all ranks are on one host, or if
    there is no /proc.
    """
    if not is_on_one_host() and os.path.isdir("/proc/self/fd") and _started.acquire(False):  # noqa: PTH112
        watch = NetworkWatch(name, Connections())
        threading.Thread(target=watch.run, name="mpidist-network", daemon=True).start()


class NetworkWatch:
    """Notices, in a thread of this process, other hosts that give no answer."""

    def __init__(self, name: str, connections: Connections):
        self.name, self.connections = name, connections
        self._away: dict[int, tuple[Stalled, float]] = {}  # inode -> connection, since when
        self._names: dict[str, str] = {}
        self._since: float | None = None  # since when the first connection has had no answer
        self._lost = False
        self._told: _Telling | None = None
        self._place: tuple = ()  # the instruction that the main thread runs
        self._moved = 0.0

    def run(self) -> None:
        """Call `look` about once a second, until the process ends."""
        pause = _LOOK
        while True:
            time.sleep(pause)
            start = time.thread_time()
            with contextlib.suppress(OSError, RuntimeError):  # such as too many open files
                self.look(time.monotonic())
            spent = time.thread_time() - start
            pause = max(_SOON if self._away else _LOOK, spent / _SHARE)

    def look(self, now: float) -> None:
        """Look for connections without an answer; if the program waits, report them to the user."""
        waits = self._waits(now)
        stalled = self.connections.look(waits)
        for one in stalled:
            if one.inode not in self._away:
                self._away[one.inode] = one, now
                if one.host not in self._names:
                    self._names[one.host] = one.host
                    _aside(self._find_name, one.host)
        for inode in self._away.keys() - {one.inode for one in stalled}:
            one, _ = self._away[inode]
            if has_route(one.host):  # without a route, the host is still away
                del self._away[inode]
                self._lost = self._lost or not self.connections.answers(one)
        polling.unreachable = bool(self._away)
        if self._away:
            since = min(since for _, since in self._away.values())
            self._since = since if self._since is None else self._since
            if self._told is None and waits and now - since >= PATIENCE:
                self._told = self._telling()
                self._told.begin(now - self._since)
        elif self._since is not None:
            if self._told is not None:
                self._told.end(now - self._since, self._lost)
            self._since, self._told, self._lost = None, None, False

    def _waits(self, now: float) -> bool:
        """Return whether the rank waits: it polls for MPI, or its main thread stands still."""
        frame = _main_frame()
        place = id(frame), frame and frame.f_lasti
        if place != self._place:
            self._place, self._moved = place, now
        return now - polling.long_wait < 2 * _LOOK or now - self._moved > _LOOK

    def _telling(self) -> _Telling:
        hosts = sorted({one.host for one, _ in self._away.values()})
        route = all(map(has_route, hosts))
        return _Telling(self.name, [self._names[host] for host in hosts], route)

    def _find_name(self, host: str) -> None:
        with contextlib.suppress(OSError):
            self._names[host] = socket.gethostbyaddr(host)[0].split(".")[0]


class _Telling:
    """The reports of one process about one period in which some hosts did not answer.

    Only one rank of each node prints these reports.
    """

    def __init__(self, name: str, hosts: list[str], route: bool):
        self.name, self.hosts, self.route = name, hosts, route
        self.doing = public_call(_main_frame())
        # Only one process of a host can have the name of a socket, so only the process that gets
        # the name prints. The name is free again when the process ends.
        self._first = socket.socket(socket.AF_UNIX)
        self._speaks = bool(events.VERBOSITY)
        try:
            self._first.bind(f"\0mpidist-network-{os.getuid()}-{os.getppid()}")
        except OSError:
            self._speaks = False

    def begin(self, seconds: float) -> None:
        """Report that hosts do not answer."""
        self._emit("network_away", seconds)
        # If there is no route, a line would not reach the launcher. The launcher's daemon would try
        # to send the line in vain, and because of these attempts it would be late when the network
        # is back.
        if self.route:
            self._say(f"has had no answer from {_few(self.hosts)} for {seconds:.0f} s{self.doing}; "
                      "is a host or the network down?")  # fmt: skip

    def end(self, seconds: float, lost: bool) -> None:
        """Report that the hosts answer again; if `lost`, only log that the connections are lost."""
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


def _main_frame():
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _aside(call: Callable, *arguments) -> None:
    """Call, in a thread, a function that may wait for a name server or a network file system."""
    threading.Thread(target=call, args=arguments, name="mpidist-network-line", daemon=True).start()


def _few(hosts: list[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
