"""Test which hosts can start a program now, without waiting long for those that cannot.

If a host is switched off, or its daemon has died, a launcher waits for it, often for minutes. Such
a host looks like a slow one. So the time of the other hosts limits how long each host gets:

    n1  0.2 s   ends well
    n2  0.3 s   ends well
    n3  0.2 s   ends well     half of the hosts have ended well after 0.2 s, so all others have
    n4  ...     is silent     3 s (`LEAST`), and would have 10 s (`TIMES`) if they had needed 1 s

A host that fails a test is left out of one attempt only, since each attempt has its own tests.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..launch.processes import Started

#: Seconds that each host has to start a program and end it, as long as most hosts have not done so.
PROBE = 20.0
#: If half of the hosts have ended well, the others have this many times as long, and these seconds.
TIMES, LEAST = 10.0, 3.0
#: How many hosts are tested at once.
_WIDTH = 64
#: Seconds for a connection to a host: the refusal of a host that is there comes at once.
_CONNECT = 0.5


class _Patience:
    """The time limit for the test of a host, computed from the tests that have ended well."""

    def __init__(self, hosts: int):
        self._half, self._took = (min(hosts, _WIDTH) + 1) // 2, list[float]()

    def note(self, seconds: float) -> None:
        self._took.append(seconds)

    def seconds(self) -> float:
        if len(self._took) < self._half:
            return PROBE
        return min(PROBE, max(LEAST, TIMES * sorted(self._took)[self._half - 1]))


def silent_hosts(
    hosts: Sequence[str],
    words: Callable[[str], Sequence[str]],
    environment: Mapping[str, str],
    doors: Mapping[str, tuple[str, int]] | None = None,
) -> list[str]:
    """Return the hosts on which a short program does not end well in time.

    Parameters
    ----------
    hosts : sequence of str
    words : callable
        Returns the command that starts the program on a host.
    environment : mapping
        The environment of the command.
    doors : mapping, optional
        Addresses and ports on which hosts must listen. A host that is there and refuses the
        connection is silent, without any wait.
    """
    patience = _Patience(len(hosts))

    def is_silent(host: str) -> bool:
        if doors and host in doors and refuses(*doors[host]):
            return True
        began = time.monotonic()
        try:
            test = Started(words(host), env=environment)
        except OSError:
            return True
        while test.process.poll() is None and time.monotonic() - began < patience.seconds():
            time.sleep(0.01)
        well = test.process.poll() == 0
        if well:
            patience.note(time.monotonic() - began)
            test.finish(0)
        else:
            # To end the processes of a launcher that waits may take seconds.
            threading.Thread(target=test.finish, args=(0,), name="mpidist-host-test").start()
        return not well

    with ThreadPoolExecutor(_WIDTH) as pool:
        return list(itertools.compress(hosts, pool.map(is_silent, hosts)))


def refuses(address: str, port: int) -> bool:
    """Return whether a host refuses connections to a port. Blocks for at most `_CONNECT` s."""
    try:
        socket.create_connection((address, port), _CONNECT).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # such as a host that is away: only the test itself can tell
        return False
    return False
