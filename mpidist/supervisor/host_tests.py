"""Test which hosts can start a program now, without waiting long for hosts that cannot.

At first, a dead host looks the same as a slow host. The time limit for a host therefore depends on
the other hosts. As soon as the program has ended without an error on half of the hosts, the limit
is 10 times the time that they have needed (`TIMES`), but at least 3 s (`LEAST`):

    n1  0.2 s   ends well
    n2  0.3 s   ends well
    n3  0.2 s   ends well     half of the hosts have needed 0.2 s, so the limit is 3 s
    n4  ...     is silent     n4 has not ended after 3 s

After half of the limit the program is started a second time, because a launcher may hang although
its host is well.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..launch.processes import Started

#: The time limit in seconds for a host until the program has ended well on half of the hosts.
PROBE = 20.0
#: Afterwards the limit is TIMES times the time of these hosts, but at least LEAST seconds.
TIMES, LEAST = 10.0, 3.0
#: A second start follows after this part of the limit.
AGAIN = 0.5
#: How many hosts are tested at the same time.
_WIDTH = 64
#: Time limit in seconds for a connection to a host. A running host refuses a connection at once.
_CONNECT = 0.5


class _Patience:
    """The time limit for the test of a host, computed from the tests that have succeeded."""

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
    """Return the hosts on which a short program fails, or does not end within a time limit.

    Parameters
    ----------
    hosts : sequence of str
        The hosts to test.
    words : callable
        ``words(host)`` returns the command that starts the program on a host.
    environment : mapping
        The environment of the command.
    doors : mapping, optional
        For each host, the address and the port at which a daemon of the host must accept
        connections. A host that refuses them counts as silent.
    """
    patience = _Patience(len(hosts))

    def is_silent(host: str) -> bool:
        if doors and host in doors and refuses(*doors[host]):
            return True
        began, tests = time.monotonic(), list[tuple[float, Started]]()
        well = False
        while not well and (late := time.monotonic() - began) < patience.seconds():
            if len(tests) < (1 if late < AGAIN * patience.seconds() else 2):
                try:
                    tests.append((time.monotonic(), Started(words(host), env=environment)))
                except OSError:
                    if not tests:  # else the first one may still end well
                        break
            time.sleep(0.01)
            codes = [test.process.poll() for _, test in tests]
            well = 0 in codes
            if well:
                patience.note(time.monotonic() - tests[codes.index(0)][0])
            elif None not in codes:
                break
        for _, test in tests:
            if test.process.poll() == 0:
                test.finish(0)
                continue
            # In a thread, because it may take seconds to end the processes of a waiting launcher.
            threading.Thread(target=test.finish, args=(0,), name="mpidist-host-test").start()
        return not well

    with ThreadPoolExecutor(_WIDTH) as pool:
        return list(itertools.compress(hosts, pool.map(is_silent, hosts)))


def refuses(address: str, port: int) -> bool:
    """Return whether a host refuses connections to a port. Blocks for at most 0.5 s."""
    try:
        socket.create_connection((address, port), _CONNECT).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # for example, the host does not answer; then only the test itself can decide
        return False
    return False
