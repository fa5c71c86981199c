"""A rank's end of a group's messages: buffers in flight, polled waits, notices of failure.

A rank that fails sends a notice to all others; every wait here looks for one, so nobody waits for
a rank that has given up. A rank with a server half serves it from inside every wait.

The messages travel on the control communicator of the context, with tags of the group's own, so a
group makes no communicator for them. It uses no MPI collectives there either: `Link.exchange`
gathers values up a tree to rank 0 and hands them down again, by messages that are polled like all
others. A group that fails leaves messages behind; the context is then never freed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import events
from ..errors import ClosedError, MismatchError, MpidistError, ProtocolError, described
from ..partition import pieces
from ..runtime import polling
from ..runtime.agreement.run_on_all import run_on_all
from ..runtime.context import Context
from . import protocol
from .deadlock import check_stuck
from .protocol import DOWN, HEADER_BYTES, NOTICE, UP, Header, Incoming, Pool

_NOTICE_BYTES = 2000
_SPINS = 200  # looks of a wait before it yields the core
_GROUP, _VERDICT = b"g", b"v"  # what a notice ends

#: Links that were broken off: MPI may still write into their buffers.
_abandoned: list[Link] = []


class GroupCall:
    """Lets one thread at a time into a call of the group, as a ``with`` block.

    It is made once for a call of the step loop, and entered again and again.
    """

    __slots__ = ("link", "name")

    def __init__(self, link: Link, name: str):
        self.link, self.name = link, name

    def __enter__(self) -> None:
        link = self.link
        try:
            link.turn.pop()
        except IndexError:
            raise ProtocolError(
                f"{self.name}: another call of this server group is under way on this rank, in "
                "another thread or in what a signal handler interrupted; use one thread at a time"
            ) from None
        try:
            link.touched = False
            if link.careful:
                link.check_call(self.name)
            link.check_notice()
        except BaseException:
            link.turn.append(None)
            raise

    def __exit__(self, kind, error, trace) -> None:
        try:
            if error is not None:
                self.link.broken(self.name, error)
        finally:
            self.link.turn.append(None)


class Link:
    """Sends, receives and waits of one rank. Methods are collective only where said.

    Attributes
    ----------
    context : Context
        Whose control communicator carries the messages.
    tag : int
        Added to every tag of `protocol`: the group's own.
    turn : list
        Empty while a thread is in a call of the group. Its `pop` is as atomic as a lock, and takes
        half of the time.
    failed : str or None
        Why nothing more may be sent: this rank broke a call off, or heard that another did.
    heard : bool
        `failed` is what another rank has told.
    touched : bool
        Something was sent, or a receive posted, since somebody set this to False.
    careful : bool
        The next call must ask `check_call`: the group has failed, or MPI was started below
        MPI_THREAD_MULTIPLE (`one_thread`) and the main thread alone may call.
    background : callable
        What is done in every wait: the server half of this rank. True when it did something.
    on_note : callable or None
        Called on the first server with the rank of a worker and its `Client.note`.
    waits : dict
        Seconds waited, per kind of peer.
    trail : events.Trail
        What this rank asked of others and did for them.
    """

    def __init__(self, context: Context, group: int):
        self.context, self.comm = context, context.control
        self.tag = protocol.first_tag(group)
        self.pool = Pool(keep=2 * self.comm.size + 4)
        self.turn = [None]
        self.careful = self.one_thread = MPI.Query_thread() < MPI.THREAD_MULTIPLE
        self.failed: str | None = None
        self.heard = self.touched = False
        self.background: Callable[[], bool] = nothing
        self.on_note: Callable[[int, tuple[int, int]], None] | None = None
        self.waits = {"server": 0.0, "worker": 0.0, "all": 0.0}
        self.trail = events.Trail(self.comm.rank, self.comm.size)
        self.counters = events.Counters()
        self.bytes_in_flight = 0
        self._sending: list[tuple[list[MPI.Request], np.ndarray, int]] = []
        self.receiving: set[Incoming] = set()  # MPI writes into their buffers
        self._pinned: list = []  # operations that can no longer end, with their buffers

    # -- one call at a time ------------------------------------------------------------------

    def check_call(self, name: str) -> None:
        """Raise what forbids a call on this rank, if anything does."""
        if self.one_thread and not MPI.Is_thread_main():
            # The library may know nothing of other threads.
            raise ProtocolError(
                f"{name}: called in thread {threading.current_thread().name!r}, and MPI was "
                "started below MPI_THREAD_MULTIPLE; call it in the main thread, or set "
                "mpi4py.rc.thread_level to 'multiple'"
            )
        if self.failed is not None:
            raise self._ended(f"this server group failed earlier: {self.failed}")

    def broken(self, name: str, error: BaseException) -> None:
        """Tell all ranks of a call that failed after its first message. Does not raise.

        Before its first message a call has changed nothing: it may be made again.
        """
        if self.touched and self.failed is None:
            self.failed = f"{name} was broken off by {described(error)}"
            self.careful = True
            self.abandon(error)

    def abandon(self, error: BaseException) -> None:
        """Give up because of `error`: tell all others, and keep what MPI may still write to."""
        self.context.leftovers = True
        if self not in _abandoned:
            _abandoned.append(self)
        self.notify(error)

    # -- messages ------------------------------------------------------------------------------

    def send(self, buffer: np.ndarray, nbytes: int, dest: int, tag: int) -> None:
        """Send the front of a buffer of the pool; it goes back there when it is out."""
        self.touched = True
        requests: list[MPI.Request] = []
        # Kept before the first piece is sent: whatever fails, no buffer goes while MPI reads it.
        self._sending.append((requests, buffer, nbytes))
        self.bytes_in_flight += nbytes
        for start, stop in pieces(0, nbytes, protocol.MESSAGE_BYTES):
            view = [buffer[start:stop], MPI.BYTE]
            requests.append(self.comm.Isend(view, dest, self.tag + tag))
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

    def probe(self, source: int, tag: int, status: MPI.Status | None = None) -> bool:
        """Whether a message of `source` is waiting to be received."""
        return self.comm.Iprobe(source, self.tag + tag, status)

    def tell(self, flags: int, dest: int, tag: int, data: bytes = b"") -> None:
        """Send a message of a few bytes."""
        total = HEADER_BYTES + len(data)
        buffer = self.pool.take(total)
        Header(flags, total=total).write(buffer)
        buffer.data[HEADER_BYTES:total] = data
        self.send(buffer, total, dest, tag)

    def receive(self, source: int, tag: int, nbytes: int) -> Incoming:
        """Begin to receive a message, of at most `nbytes` where it is of one piece."""
        self.touched = True
        return Incoming(self, source, self.tag + tag, nbytes)

    def received(self, nbytes: int) -> None:
        """Count one message that is here."""
        for counters in (self.counters, events.total):
            counters.messages_received += 1
            counters.bytes_received += nbytes

    # -- waiting -------------------------------------------------------------------------------

    def wait(
        self,
        test: Callable[[], bool],
        ranks: Callable[[], Sequence[int]] = tuple,
        peers: str | None = None,
    ) -> float:
        """Wait until `test()`, serving in the background; return the seconds it took.

        `ranks()` are those that it waits for. Where one of them waits for this rank, in a call
        that this rank cannot come to, all ranks get a MismatchError. `peers` says where in `waits`
        the seconds are counted.

        It has a loop of its own, not `wait_until`: what is served here is served three calls
        below the wait, and a server never waits so long that it would not serve.
        """
        start = began = time.monotonic()
        waited, look_around, looks = polling.waited, start + polling.PATIENCE, 0
        while not test():
            served, now, looks = self.background(), time.monotonic(), looks + 1
            if served:  # only a wait without any event is a long one
                began, look_around, looks = now, now + polling.PATIENCE, 0
                continue
            self.check_notice()
            if now >= look_around:
                check_stuck(self.context, self.trail, ranks())
                look_around = now + 0.1
            # With more ranks than cores the core is somebody else's: it is given away for a
            # fortieth of the time idle so far, so that latency stays in proportion. A server that
            # is idle for long looks every 2 ms and uses about a hundredth of a core.
            if now - began > 0.001:
                time.sleep(min((now - began) / 40, 0.002))
            elif looks > _SPINS:
                os.sched_yield()
        seconds = time.monotonic() - start
        polling.waited = waited + seconds  # what is served waits as well: it counts once
        if peers is not None:
            self.waits[peers] += seconds
        return seconds

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Serve nothing in the background for a while."""
        background, self.background = self.background, nothing
        try:
            yield
        finally:
            self.background = background

    # -- notices -------------------------------------------------------------------------------

    def check_notice(self) -> None:
        """Raise what another rank has sent before it gave up."""
        status = MPI.Status()
        try:
            if not self.probe(MPI.ANY_SOURCE, NOTICE, status):
                return
        except MPI.Exception:
            if self.context.closed:
                raise ClosedError("server group: md.free(comm) has freed what it needs") from None
            raise
        text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self.comm.Recv([text, MPI.BYTE], status.Get_source(), self.tag + NOTICE)
        kind, self.failed = text[:1].tobytes(), text[1:].tobytes().decode(errors="replace")
        self.heard = self.careful = True
        if kind == _VERDICT and not self.context.failed:
            self.context.failed, self.context.stopped = self.failed, True
        raise self._ended(self.failed)

    def _ended(self, text: str) -> MpidistError:
        error: MpidistError
        error = MismatchError(text) if self.context.failed else ProtocolError(text)
        error.secondary = self.heard  # the rank that knows the cause speaks, with its traceback
        self._mark(error)
        return error

    def notify(self, failure: BaseException) -> None:
        """Tell all other ranks that this one gives up because of `failure`.

        Not what all of them know: what came as a notice of this group, for its sender has told
        everyone, and what all have raised together.
        """
        if getattr(failure, "known_on", None) is self:
            return
        self._mark(failure)
        text = f"parameter server: rank {self.comm.rank} gave up with {described(failure)}"
        kind = _GROUP
        if self.context.failed:  # the end of all on this communicator, not of the group alone
            kind, text = _VERDICT, self.context.failed
        data = np.frombuffer((kind + text.encode(errors="replace"))[:_NOTICE_BYTES], np.uint8)
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        requests: list[MPI.Request] = []
        self._pinned.append((requests, data))
        for rank in others:
            requests.append(self.comm.Isend([data, MPI.BYTE], rank, self.tag + NOTICE))
        # Small messages leave by themselves; one second covers a peer that is slow to connect.
        end = time.monotonic() + 1.0
        while not MPI.Request.Testall(requests) and time.monotonic() < end:
            time.sleep(0.0005)

    # -- all ranks -----------------------------------------------------------------------------

    def run_on_all(
        self, doing: str, local: Callable[[], Any], decide: Callable[[list], Any] | None = None
    ):
        """Do `run_on_all` of all ranks of the group. Collective over `comm`.

        After a failure that all have agreed on the group goes on, and no notice need tell it.
        """
        rounds = 0

        def exchange(fact) -> list:
            nonlocal rounds
            everyone = self.exchange(fact)
            rounds += 1
            return everyone

        try:
            return run_on_all(self.comm, doing, local, decide, exchange=exchange)
        except BaseException as error:
            if rounds == 2:  # the findings of all, and the verdict
                self.touched = False
                self._mark(error)
            raise

    def _mark(self, error: Any) -> None:
        with suppress(Exception):  # one of a user's own may refuse
            error.known_on = self

    def exchange(self, fact) -> list:
        """Give a JSON fact to all ranks and return everyone's. Collective over `comm`.

        Up a binomial tree to rank 0 and down it: 2 messages per rank.
        """
        rank, size = self.comm.rank, self.comm.size
        lowest = rank & -rank if rank else size
        steps = [1 << k for k in range(size.bit_length()) if 1 << k < lowest]
        children = [rank + step for step in steps if rank + step < size]
        operation = self.trail.begin("exchange")
        known = [[rank, fact]]
        for child in children:
            known += json.loads(self._take(child, UP))
        if rank:
            self._give([rank & (rank - 1)], UP, json.dumps(known).encode())
            everything = self._take(rank & (rank - 1), DOWN)
        else:
            everything = json.dumps([fact for _, fact in sorted(known)]).encode()
        self._give(children, DOWN, everything)
        operation[events.OPEN] = False
        return json.loads(everything)

    def _give(self, ranks: Sequence[int], tag: int, data: bytes) -> None:
        self.touched = True
        sending: list[MPI.Request] = []
        with self._pin(sending, data):
            for rank in ranks:
                sending.append(self.comm.Isend([data, MPI.BYTE], rank, self.tag + tag))
            self.wait(lambda: MPI.Request.Testall(sending), peers="all")

    def _take(self, source: int, tag: int) -> bytes:
        status = MPI.Status()
        self.wait(lambda: self.probe(source, tag, status), lambda: [source], "all")
        data = bytearray(status.Get_count(MPI.BYTE))
        request = self.comm.Irecv([data, MPI.BYTE], source, self.tag + tag)
        with self._pin(request, data):
            self.wait(request.Test, peers="all")
        return bytes(data)

    @contextmanager
    def _pin(self, *buffers) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._pinned.append(buffers)
            raise


def nothing() -> bool:
    """Do nothing in the background."""
    return False
