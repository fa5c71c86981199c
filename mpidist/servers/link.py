"""How a rank of a server group sends and receives messages, waits, and reports failures.

A rank that fails sends a notice (a short message) to all other ranks. Every wait looks for notices,
so no rank waits for ever for a rank that has failed. A rank that is both worker and server answers
requests of other workers inside every wait. The messages travel on a duplicate of the user's
communicator, which is never freed if the group fails, because messages then stay unreceived.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any

import numpy as np
from mpi4py import MPI

from .. import events
from ..errors import ClosedError, MismatchError, MpidistError, ProtocolError, described
from ..partition import pieces
from ..runtime import polling, ulfm
from ..runtime.agreement.run_on_all import run_on_all
from ..runtime.context import Context
from ..runtime.elastic_requests import test_one
from ..runtime.ulfm import is_death, keep_alive, rank_failure
from . import protocol
from .deadlock import check_stuck
from .pieces.tree_exchange import tree_exchange
from .protocol import FIRST_TAG, GROUPS, HEADER_BYTES, NOTICE, TAGS, Header, Incoming, MessagePool

_NOTICE_BYTES = 2000
_SPINS = 200  # the number of tests before a wait yields the core
_REST, _REST_IN_PIECES = 0.001, 0.01  # idle seconds before a wait sleeps
_GROUP, _VERDICT = b"g", b"v"  # first byte of a notice: it ends the group, or the communicator

#: Links of failed groups, which are kept because MPI may still write into their buffers.
_abandoned: set[Link] = set()


class GroupCall:
    """A ``with`` block for a call of a server group; only one thread at a time may be in a call.

    If the call fails after its first message, all ranks are notified that the group has failed.
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
                "another thread or in code that a signal interrupted; use one thread at a time"
            ) from None
        try:
            link.touched = False
            if link.careful:
                link.check_call(self.name)
            link.check_notice()
        except BaseException as error:
            link.turn.append(None)
            if isinstance(error, MPI.Exception) and is_death(error):
                raise rank_failure(error) from error
            raise

    def __exit__(self, kind, error, trace) -> None:
        try:
            if error is not None:
                self.link.broken(self.name, error)
                if isinstance(error, MPI.Exception) and is_death(error):
                    raise rank_failure(error) from error
        finally:
            self.link.turn.append(None)


class Link:
    """The sends, receives and waits of one rank of a server group."""

    def __init__(self, context: Context, group: int):
        self.context, self.comm = context, context.control
        # A call takes `turn` by `list.pop`, which is as atomic as a lock and takes half of the
        # time.
        self.tag, self.turn = FIRST_TAG + TAGS * (group % GROUPS), [None]
        self.pool = MessagePool(keep=2 * self.comm.size + 4)
        # With `one_thread`, only the main thread may call MPI.
        self.careful = self.one_thread = MPI.Query_thread() < MPI.THREAD_MULTIPLE
        # Why the group has failed.
        self.failed: str | None = None
        # Whether `failed` is another rank's text; whether an error in the present call ends the
        # group, as messages were sent; whether a piece of a message came or went, so a wait does
        # not sleep yet.
        self.heard = self.touched = self.moved = False
        # Every wait calls it again and again: `Server.poll` on a rank that serves. True if it did
        # something.
        self.background: Callable[[], bool] = nothing
        # On the first server: called with a worker's rank and the two numbers of its request.
        self.on_note: Callable[[int, tuple[int, int]], None] | None = None
        self.waits = {"server": 0.0, "worker": 0.0, "all": 0.0}
        self.trail, self.counters = events.Trail(self.comm.rank, self.comm.size), events.Counters()
        self.bytes_in_flight = self._exchanges = 0
        self._sending: list[tuple[deque[MPI.Request], np.ndarray, int]] = []
        self.receiving: set[Any] = set()  # messages and streams whose memory MPI uses
        # For each rank: messages sent to its server, and messages received from its worker.
        self.sent, self.taken = [0] * self.comm.size, [0] * self.comm.size
        self.checksums: Any = None
        self.models: list = []
        self.doors: Any = None  # the first model's memory that is shared with ranks of this host
        self._pinned: list = []  # requests and buffers that MPI may use after a wait has failed
        self.death: Any = None  # in an elastic run, a copy of the RankFailure that has ended a call

    # -- one call at a time ------------------------------------------------------------------

    def check_call(self, name: str) -> None:
        """Raise an error if this thread must not call MPI, or if the group has failed."""
        if self.one_thread and not MPI.Is_thread_main():
            raise ProtocolError(
                f"{name}: called in thread {threading.current_thread().name!r}, and MPI was "
                "started below MPI_THREAD_MULTIPLE; call it in the main thread, or set "
                "mpi4py.rc.thread_level to 'multiple'"
            )
        if self.failed is not None:
            raise self._ended(f"this server group failed earlier: {self.failed}")

    def broken(self, name: str, error: BaseException) -> None:
        """Notify all ranks that the call `name` failed, if it had sent messages. Does not raise."""
        if self.touched and self.failed is None:
            self.failed, self.careful = f"{name} was broken off by {described(error)}", True
            self.abandon(error)

    def abandon(self, error: BaseException) -> None:
        """Notify all other ranks of `error`, and keep all buffers that MPI may still write to."""
        # After a death in an elastic program, all ranks notice the death.
        if ulfm.current is not None and is_death(error):
            self.death = copy(rank_failure(error))  # without the traceback, which keeps the model
            keep_alive(self._sending, self.receiving, self._pinned)
            return
        self.context.leftovers = True
        _abandoned.add(self)
        self.notify(error)

    # -- messages ------------------------------------------------------------------------------

    def send(self, buffer: np.ndarray, nbytes: int, dest: int, tag: int) -> deque:
        """Begin to send the first `nbytes` bytes of `buffer`, which `MessagePool.take` returned.

        Returns the MPI requests. `reap` later returns the buffer to the pool.
        """
        self.touched = True
        requests: deque[MPI.Request] = deque()
        # Stored first, so that a failed send does not free the buffer while MPI reads it.
        self._sending.append((requests, buffer, nbytes))
        if self.checksums is not None:
            self.checksums.before_send(buffer, nbytes, dest, tag)
        self.bytes_in_flight += nbytes
        for start, stop in pieces(0, nbytes, protocol.MESSAGE_BYTES):
            view = [buffer[start:stop], MPI.BYTE]
            requests.append(self.comm.Isend(view, dest, self.tag + tag))
        self.sent[dest] += tag == protocol.TO_SERVER
        self.count_pieces(len(requests), nbytes, 0, 0)
        return requests

    def reap(self) -> bool:
        """Give buffers of completed sends back to the pool; return whether no send is left."""
        if not self._sending:
            return True
        still, status = [], MPI.Status()
        for requests, buffer, nbytes in self._sending:
            while requests and test_one(requests[0], status):
                requests.popleft()
            if not requests:
                self.pool.give(buffer)
                self.bytes_in_flight -= nbytes
            else:
                still.append((requests, buffer, nbytes))
        self._sending = still
        return not still

    def tell(self, flags: int, dest: int, tag: int, data: bytes = b"") -> None:
        """Send a message of a header and a few bytes; the header's `flags` say what it asks for."""
        total = HEADER_BYTES + len(data)
        buffer = self.pool.take(total)
        Header(flags, total=total).write(buffer)
        buffer.data[HEADER_BYTES:total] = data
        self.send(buffer, total, dest, tag)

    def receive(self, source: int, tag: int, nbytes: int) -> Incoming:
        """Begin to receive a message, and return it; `Incoming.test` says whether it has arrived.

        `nbytes` is the largest size of the message's first piece, which is one MPI message.
        """
        self.touched = True
        return Incoming(self, source, self.tag + tag, nbytes)

    def wait_for(self, messages: Sequence[Incoming], peers: str | None = None) -> None:
        """Wait until all `messages` have arrived.

        If `peers` ("server", "worker" or "all") is given, the seconds are added to
        ``waits[peers]``.
        """
        self.wait(
            lambda: all([message.test() for message in messages]),
            lambda: [message.source for message in messages if not message.test()],
            peers,
        )

    def wait_for_size(self, source: int, tag: int, peers: str | None = None) -> int:
        """Wait until a message from `source` can be received; return its size in bytes."""
        status = MPI.Status()
        self.wait(lambda: self.comm.Iprobe(source, self.tag + tag, status), lambda: [source], peers)
        return status.Get_count(MPI.BYTE)

    @contextmanager
    def doing(self, kind: str, peer: int | None = None) -> Iterator[None]:
        """Context manager that records an operation of this rank in the log `trail`."""
        operation = self.trail.begin(kind, peer)
        yield
        # After an error in the block, the record stays unfinished.
        operation[events.OPEN] = False

    def received(self, nbytes: int) -> None:
        """Count one message of `nbytes` bytes that has arrived."""
        self.count_pieces(0, 0, 1, nbytes)

    def count_pieces(self, sent: int, sent_bytes: int, received: int, received_bytes: int) -> None:
        """Count the pieces of messages that are about to be sent and received."""
        for counters in (self.counters, events.total):
            counters.messages_sent += sent
            counters.bytes_sent += sent_bytes
            counters.messages_received += received
            counters.bytes_received += received_bytes

    # -- waiting -------------------------------------------------------------------------------

    def wait(
        self,
        test: Callable[[], bool],
        ranks: Callable[[], Sequence[int]] = tuple,
        peers: str | None = None,
    ) -> float:
        """Wait until `test()` is true; call `background` while waiting; return the seconds waited.

        `ranks()` returns the ranks that this rank waits for. If one of them waits for this rank in
        another call, all ranks get a MismatchError.
        """
        start = began = time.monotonic()
        rest = _REST
        waited, look_around, looks = polling.waited, start + polling.PATIENCE, 0
        elastic = polling.elastic_wait(start)
        try:
            while not test():
                served, now, looks = self.background(), time.monotonic(), looks + 1
                if elastic is not None and now >= elastic.next:
                    elastic.look(now)
                if served or self.moved:  # the idle time begins again
                    # The next piece will arrive sooner than a sleep would end.
                    rest, self.moved = (_REST_IN_PIECES if self.moved else _REST), False
                    began, look_around, looks = now, now + polling.PATIENCE, 0
                    continue
                if looks & 7 == 1 or now >= look_around:  # not always, as a check takes 1 us
                    self.check_notice()
                if now >= look_around:
                    polling.long_wait = now
                    check_stuck(self.context, self.trail, ranks(), test)
                    look_around = now + 0.1
                # If there are more ranks than cores, another rank needs this core. The wait
                # therefore sleeps, each time for a fortieth of the idle time so far, so that the
                # delay of an answer stays small compared with the wait. A server that has been idle
                # for long polls every 2 ms and uses about 1 % of a core.
                if now - began > rest:
                    time.sleep(min((now - began) / 40, 0.002))
                elif looks > _SPINS:
                    os.sched_yield()
        finally:
            if elastic is not None:
                elastic.end()
        seconds = time.monotonic() - start
        polling.waited = waited + seconds  # waits inside `background` are part of `seconds`
        if peers is not None:
            self.waits[peers] += seconds
        return seconds

    @contextmanager
    def serving(self, background: Callable[[], bool]) -> Iterator[None]:
        """Let every wait in the ``with`` block call `background` instead of the usual function."""
        usual, self.background = self.background, background
        try:
            yield
        finally:
            self.background = usual

    # -- notices -------------------------------------------------------------------------------

    def check_notice(self) -> None:
        """Raise an error if another rank has sent a notice that the group has failed."""
        status = MPI.Status()
        try:
            if not self.comm.Iprobe(MPI.ANY_SOURCE, self.tag + NOTICE, status):
                return
        except MPI.Exception:
            if self.context.closed:  # `md.free` frees the control communicator
                raise ClosedError("this server group cannot be used after md.free(comm)") from None
            raise
        text = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self.comm.Recv([text, MPI.BYTE], status.Get_source(), self.tag + NOTICE)
        kind, self.failed = text[:1].tobytes(), text[1:].tobytes().decode(errors="replace")
        self.heard = self.careful = True
        if kind == _VERDICT and not self.context.failed:
            self.context.failed, self.context.stopped = self.failed, True
        raise self._ended(self.failed)

    def _ended(self, text: str) -> MpidistError:
        died = None if self.context.closed else copy(self.death)  # after the repair, nobody is dead
        error = died or (MismatchError if self.context.failed else ProtocolError)(text)
        error.secondary = self.heard  # the failed rank itself prints its traceback
        self._mark(error)
        return error

    def notify(self, failure: BaseException) -> None:
        """Tell all other ranks that this rank has failed because of `failure`."""
        # This rank has received `failure` as a notice, or all ranks have raised it together.
        # Then all ranks know it already.
        if getattr(failure, "known_on", None) is self:
            return
        self._mark(failure)
        text = f"parameter server: rank {self.comm.rank} gave up with {described(failure)}"
        kind = _GROUP
        if self.context.failed:  # the communicator has failed, too
            kind, text = _VERDICT, self.context.failed
        data = np.frombuffer((kind + text.encode(errors="replace"))[:_NOTICE_BYTES], np.uint8)
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        requests: list[MPI.Request] = []
        self._pinned.append((requests, data))
        for rank in others:
            requests.append(self.comm.Isend([data, MPI.BYTE], rank, self.tag + NOTICE))
        # MPI sends small messages immediately, but a connection may take time, so this rank tests
        # the sends for up to one second.
        end = time.monotonic() + 1.0
        while not MPI.Request.Testall(requests) and time.monotonic() < end:
            time.sleep(0.0005)

    # -- all ranks -----------------------------------------------------------------------------

    def run_on_all(self, doing: str, local: Callable[[], Any], decide: Callable | None = None):
        """Run `local` on all ranks; if one rank fails, all raise an error. Collective over `comm`.

        The function `agreement.run_on_all.run_on_all` explains the arguments.
        """
        before = self._exchanges
        try:
            return run_on_all(self.comm, doing, local, decide, exchange=self.exchange)
        except BaseException as error:
            # After two exchanges, of the results and of the error, all ranks know the error.
            if self._exchanges == before + 2:
                self.touched = False
                self._mark(error)
            raise

    def _mark(self, error: Any) -> None:
        with suppress(Exception):  # a user's exception class may forbid new attributes
            error.known_on = self

    def exchange(self, fact) -> list:
        """Return the JSON values `fact` of all ranks in rank order. Collective over `comm`."""
        with self.doing("exchange"):
            everything = tree_exchange(self, fact)
        self._exchanges += 1
        return everything

    @contextmanager
    def pinned(self, *memory) -> Iterator[None]:
        """Keep the requests and buffers in `memory` alive while a ``with`` block runs."""
        self.touched = True
        # If the block fails, they are kept for ever, because MPI may still use them.
        self._pinned.append(memory)
        yield
        self._pinned.pop()


def nothing() -> bool:
    """Return false: a rank that is not a server has no requests to answer while it waits."""
    return False
