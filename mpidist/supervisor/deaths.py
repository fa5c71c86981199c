"""Which ranks of this host have ended, and in which order; and a quick end for the others.

The kernel tells at once, by a handle (pidfd) of each process, and a handle never means another
process that has got its number. Where the kernel has none (before Linux 5.3), or a rank is in a
container that counts its processes by itself, nothing is known, and all is left to the launcher.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from ..launch.heartbeat import Sign
from ..launch.process_table import born


class Deaths:
    """The ranks of this host, while they live and when they end.

    The thread that makes it gets SIGCHLD at each end, as if they were its own children.
    """

    def __init__(self):
        self.order: list[int] = []
        self._host, self._caller = socket.gethostname(), threading.get_ident()
        self._pids: dict[int, int] = {}
        self._seen: set[int] = set()
        self._poll = select.epoll()
        self._end, self._ended = os.pipe()
        self._poll.register(self._end, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="mpidist-deaths", daemon=True)
        self._thread.start()

    def watch(self, signs: Sequence[Sign]) -> None:
        """Take note of the ends of these ranks too."""
        for sign in signs:
            if sign.host == self._host and sign.pid not in self._seen:
                self._seen.add(sign.pid)
                with suppress(OSError, AttributeError):
                    self._watch(os.pidfd_open(sign.pid), sign)

    def _watch(self, handle: int, sign: Sign) -> None:
        if born(sign.pid) != str(sign.born):
            os.close(handle)
            return
        self._pids[handle] = sign.pid
        self._poll.register(handle, select.EPOLLIN)

    def _run(self) -> None:
        while True:
            for handle, _ in self._poll.poll(maxevents=1):
                if handle == self._end:
                    return
                self.order.append(self._pids[handle])
                self._poll.unregister(handle)
                signal.pthread_kill(self._caller, signal.SIGCHLD)

    def kill(self) -> None:
        """Kill all that still live. Twice is fine."""
        for handle in self._pids:
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def close(self) -> None:
        """Stop taking note. Twice is fine."""
        if self._thread.is_alive():
            os.write(self._ended, b"!")
            self._thread.join()
            self._poll.close()
            for handle in (self._end, self._ended, *self._pids):
                os.close(handle)
            self._pids.clear()
