"""Record in which order ranks on this host have ended, and kill the remaining ranks.

The kernel reports the end of a process through a handle (pidfd). Before Linux 5.3, and for ranks in
a container with its own process numbers, nothing is recorded.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from ..launch.heartbeat import Sign
from ..launch.process_table import born


class Deaths:
    """Watches the processes of the ranks on this host, and records in which order they end.

    The thread that creates this object gets the signal SIGCHLD when a rank ends.
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
        """Begin to watch the processes of this host's ranks.

        `signs` has the newest heartbeat of each rank, which says on which host it runs, and with
        which process ID.
        """
        for sign in signs:
            if sign.host == self._host:
                self.watch_process(sign.pid, partial(_is_born_at, sign.pid, sign.born))

    def watch_process(self, pid: int, is_ours: Callable[[], bool]) -> bool:
        """Begin to watch the process `pid` if ``is_ours()`` is true; return whether it was true."""
        if pid in self._seen:
            return True
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):
            return is_ours()
        # The handle is open now, so the process number cannot pass to another process.
        if not is_ours():
            os.close(handle)
            return False
        self._seen.add(pid)
        self._pids[handle] = pid
        self._poll.register(handle, select.EPOLLIN)
        return True

    def _run(self) -> None:
        while True:
            for handle, _ in self._poll.poll(maxevents=1):
                if handle == self._end:
                    return
                self.order.append(self._pids[handle])
                self._poll.unregister(handle)
                signal.pthread_kill(self._caller, signal.SIGCHLD)

    def kill(self, only: Collection[int] | None = None) -> None:
        """Kill the watched ranks that still run; with `only`, only those with these process IDs."""
        for handle, pid in [*self._pids.items()]:
            if only is not None and pid not in only:
                continue
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

    def close(self) -> None:
        """Stop the thread that watches the ranks; a second call does nothing."""
        if self._thread.is_alive():
            os.write(self._ended, b"!")
            self._thread.join()
            self._poll.close()
            for handle in (self._end, self._ended, *self._pids):
                os.close(handle)
            self._pids.clear()


def _is_born_at(pid: int, when: int) -> bool:
    return born(pid) == str(when)
