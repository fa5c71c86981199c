"""A rank's end of the private communicator: buffers in flight, polled waits, notices of failure.

A rank that fails sends a notice to all others; every wait here looks for one, so nobody waits for
a rank that has given up. A rank with a server half serves it from inside every wait.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import events, waiting
from ..errors import ProtocolError
from ..partition import bounds_of, pieces
from ..waiting import wait_until
from . import protocol
from .protocol import NOTICE, Incoming, Pool

_NOTICE_BYTES = 2000


class Link:
    """Sends, receives and waits of one rank. Local, except where said.

    Attributes
    ----------
    comm : MPI.Comm
        Private: every tag on it is ours.
    background : callable or None
        The server half of this rank; true when it did something.
    on_wait : callable or None
        Called with the seconds of a long wait; ends it by raising.
    on_note : callable or None
        Called on the first server with the rank of a worker and its `Client.note`.
    waits : dict
        Seconds waited, per kind of peer.
    trail : events.Trail
        What this rank asked of others and did for them.
    """

    def __init__(self, comm: MPI.Comm):
        self.comm = comm
        self.pool = Pool(keep=2 * comm.size + 4)
        self.background: Callable[[], bool] | None = None
        self.on_wait: Callable[[float], None] | None = None
        self.on_note: Callable[[int, tuple[int, int]], None] | None = None
        self.waits = {"server": 0.0, "worker": 0.0, "all": 0.0}
        self.trail = events.Trail(comm.rank, comm.size)
        self.counters = events.Counters()
        self.bytes_in_flight = 0
        self._sending: list[tuple[list[MPI.Request], np.ndarray, int]] = []
        self._pinned: list = []  # operations that can no longer end, with their buffers

    def send(self, buffer: np.ndarray, nbytes: int, dest: int, tag: int) -> None:
        """Send the front of a buffer of the pool; it goes back there when it is out."""
        requests = [
            self.comm.Isend([buffer[start:stop], MPI.BYTE], dest, tag)
            for start, stop in pieces(0, nbytes, protocol.MESSAGE_BYTES)
        ]
        self._sending.append((requests, buffer, nbytes))
        self.bytes_in_flight += nbytes
        for counters in (self.counters, events.total):
            counters.messages_sent += len(requests)
            counters.bytes_sent += nbytes

    def reap(self) -> bool:
        """Take back the buffers that are out; true when all are."""
        still = []
        for requests, buffer, nbytes in self._sending:
            if MPI.Request.Testall(requests):
                self.pool.give(buffer)
                self.bytes_in_flight -= nbytes
            else:
                still.append((requests, buffer, nbytes))
        self._sending = still
        return not still

    def receive(self, source: int, tag: int, first: int, total: int = 0) -> Incoming:
        """Begin to receive a message whose first piece has at most `first` bytes."""
        return Incoming(self.comm, self.pool, source, tag, first, total)

    def received(self, nbytes: int) -> None:
        """Count one message that is here."""
        for counters in (self.counters, events.total):
            counters.messages_received += 1
            counters.bytes_received += nbytes

    def wait(self, test: Callable[[], bool]) -> float:
        """Wait until `test()`, serving in the background; return the seconds it took."""
        start, waited = time.monotonic(), waiting.waited
        done = False
        while not done:
            # Serving counts as the end of one wait: only a wait without any event is a long one.
            began = time.monotonic()

            def look(began=began):
                nonlocal done
                done = test()
                if done or (self.background is not None and self.background()):
                    return True
                self.check_notice()
                _back_off(time.monotonic() - began)
                return False

            wait_until(look, self.on_wait)
        seconds = time.monotonic() - start
        waiting.waited = waited + seconds  # with the looks at its beginning: they sleep, too
        return seconds

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Serve nothing in the background for a while."""
        background, self.background = self.background, None
        try:
            yield
        finally:
            self.background = background

    def check_notice(self) -> None:
        """Raise what another rank has sent before it gave up."""
        status = MPI.Status()
        if not self.comm.Iprobe(MPI.ANY_SOURCE, NOTICE, status):
            return
        text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self.comm.Recv([text, MPI.BYTE], status.Get_source(), NOTICE)
        error: Any = ProtocolError(text.tobytes().decode(errors="replace"))
        error.from_notice = True
        raise error

    def notify(self, failure: BaseException) -> None:
        """Tell all other ranks that this one gives up because of `failure`.

        What came as a notice is not passed on: its sender has told everyone. Nor is what all
        ranks have raised together.
        """
        if getattr(failure, "from_notice", False) or getattr(failure, "everywhere", False):
            return
        lines = str(failure).strip().splitlines() or [""]
        what = f"{type(failure).__name__}: {lines[0]}"
        text = f"parameter server: rank {self.comm.rank} gave up with {what}"
        data = np.frombuffer(text.encode()[:_NOTICE_BYTES], np.uint8)
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        requests = [self.comm.Isend([data, MPI.BYTE], rank, NOTICE) for rank in others]
        self._pinned.append((requests, data))
        # Small messages leave by themselves; one second covers a peer that is slow to connect.
        end = time.monotonic() + 1.0
        while not MPI.Request.Testall(requests) and time.monotonic() < end:
            time.sleep(0.0005)

    def exchange(self, fact) -> list:
        """Give a JSON fact to all ranks and return everyone's. Collective over `comm`."""
        operation = self.trail.begin("exchange")
        data = np.frombuffer(json.dumps(fact).encode(), np.uint8)
        sizes = np.zeros(self.comm.size, np.int64)
        self._finish(self.comm.Iallgather(np.array([data.size], np.int64), sizes), sizes)
        bounds = bounds_of([int(n) for n in sizes])
        everything = np.empty(bounds[-1], np.uint8)
        target = [everything, sizes, bounds[:-1], MPI.BYTE]
        self._finish(self.comm.Iallgatherv([data, MPI.BYTE], target), data, everything)
        operation[events.OPEN] = False
        parts = itertools.pairwise(bounds)
        return [json.loads(everything[start:stop].tobytes()) for start, stop in parts]

    def _finish(self, request: MPI.Request, *buffers) -> None:
        try:
            self.waits["all"] += self.wait(request.Test)
        except BaseException:
            self._pinned.append((request, buffers))
            raise


def _back_off(idle: float) -> None:
    """Give the core away: a fortieth of the time idle so far, so that latency stays in proportion.

    With more ranks than cores the core is somebody else's; a server that is idle for long looks
    every 2 ms and uses about a hundredth of a core.
    """
    if idle > 0.001:
        time.sleep(min(idle / 40, 0.002))
