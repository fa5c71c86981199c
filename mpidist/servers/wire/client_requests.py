"""The requests of one worker to the servers of one model, and the answers it waits for.

A worker waits only for the servers that hold the wanted tensors or rows. The other servers get only
the worker's gradients, which may be none, and the message that ends the step.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...events import OPEN
from ...runtime.node_memory.cross_memory import CrossMemory
from ..layout import routing
from ..layout.row_selection import Selection
from ..link import Link
from ..pieces.memory_push import addresses_of
from ..protocol import (
    CLOCK,
    HEADER_BYTES,
    MEMORY,
    NAMES,
    PIECES,
    PULL,
    PUSH,
    STREAM,
    TO_SERVER,
    TO_WORKER,
    Header,
    selection_words,
)
from .client_answer import ServerAnswer, ServerCall, whole_push
from .client_stream import ClientStream, CopiedPush
from .node_share import NodePair, NodeShare, count_shared
from .node_stream import NodeClientStream
from .wire_pieces import WirePiece

#: A worker asks each server at least once in `SILENT` clocks, and asks all servers when it has
#: waited for `LATE` seconds. Tests change these numbers.
# A worker asks more servers in four cases. Before it pushes or ticks in a clock without a pull, it
# sends an empty pull to every server. The first pull of a clock also asks servers not asked for
# `SILENT` clocks, so that few messages wait at a server. After `LATE` seconds it asks all servers,
# so that each knows who waits. With `Consistency.asks_all`, the first pull of each clock asks every
# server.
SILENT, LATE = 16, 0.25

_NOTHING = np.empty(0, np.int64)

#: A server, the wanted parts that it holds, and the array that lists these parts in a message.
Route = tuple[int, list[routing.ShardPart], np.ndarray | None]


class ClientRequests:
    """Sends a client's requests to the servers of a model, and receives the answers."""

    def __init__(
        self,
        link: Link,
        servers: Sequence[int],
        model: int,
        names: Selection,
        pieces: Sequence[list[WirePiece]],
        modes: Any,
        share: NodeShare | None = None,
        first: int = 0,
    ):
        self.share, self.first = share, first
        self.link, self.servers, self.model = link, servers, model
        self.layout, self._names, self._pieces = names.layout, names, pieces
        self.whole = [routing.WholeShard(self.layout, k) for k in range(len(servers))]
        self._has_pieces, self._modes = any(pieces), modes
        # How many updates each server had made when it sent its newest answer.
        self.versions = [0] * len(servers)
        # The finished steps; the newest step with an answered pull; the step of the newest push.
        self.clock, self.entered, self.pushed = 0, -1, -1
        # Two numbers for the first server with the next request; whether any message was sent.
        self.note, self.started = (0, 0), False
        # For each n: how often a server had messages of n workers when it received a request.
        self.queue: Counter[int] = Counter()
        self.silent: Counter[int] = Counter()  # server -> clocks since it was asked

    def go_on_from(self, before: ClientRequests) -> None:
        """Copy the step number and the counts of messages from `before`, the object used before."""
        self.clock, self.entered, self.pushed = before.clock, before.entered, before.pushed
        self.note, self.started, self.queue = before.note, before.started, before.queue
        newest = max(before.versions)
        self.versions[:] = (before.versions + [newest] * len(self.servers))[: len(self.servers)]

    def take_note(self) -> tuple[int, int]:
        """Return `note`, two integers that go to the first server once, and set `note` to zeros."""
        note, self.note = self.note, (0, 0)
        return note

    @property
    def has_entered(self) -> bool:
        """Whether the present step has begun, because a server has answered a pull in it.

        False in modes in which a step begins only when every server has answered.
        """
        return self.entered == self.clock and not self._modes.asks_all(self.clock)

    def _route(
        self, server: int, wanted: Mapping
    ) -> tuple[list[routing.ShardPart], np.ndarray | None]:
        """Return the wanted parts on a server, and the array that lists them, or None for all."""
        if routing.has_all(self.layout, wanted):
            return self.whole[server].parts, None
        number = self._names.number
        parts = routing.route(self.layout, server, {number[n]: rows for n, rows in wanted.items()})
        return parts, routing.encode_parts(parts)

    def post(
        self, server: int, flags: int, *, pushes=None, samples=None, pull: Any = _NOTHING, ahead=0
    ) -> list:
        """Send one message with flags, the data to push, and a list of the parts to pull."""
        rank = self.servers[server]
        operation = self.link.trail.begin(
            NAMES[flags], rank, self._names.model, self.clock, open=bool(flags & PULL)
        )
        # `pull` is None for all that the server holds. `pushes` and `pull` are PIECES or STREAM if
        # the data go in pieces of their own, or through shared memory. `pushes` may be the
        # addresses of gradients in this rank's memory.
        parts: list[routing.ShardPart] = []
        push: Any = _NOTHING
        if isinstance(pushes, int | np.ndarray):
            push = pushes
        elif pushes is not None:
            parts, push = self._route(server, {name: rows for name, (rows, _) in pushes.items()})
        words = [w for w in (push, pull) if isinstance(w, np.ndarray) and w.size]
        data_at = HEADER_BYTES + 8 * sum(w.size for w in words)
        total = data_at + routing.data_bytes(self.layout, parts)
        buffer = self.link.pool.take(total)
        note = self.take_note() if server == 0 else (0, 0)
        Header(
            flags,
            model=self.model,
            clock=self.clock + ahead,
            total=total,
            push_words=MEMORY if isinstance(pushes, np.ndarray) else selection_words(push),
            pull_words=selection_words(pull),
            samples=-1 if samples is None else samples,
            gap=int(self.has_entered),
            note0=note[0],
            note1=note[1],
        ).write(buffer)
        if words:
            np.concatenate(words, out=buffer[HEADER_BYTES:data_at].view(np.int64))
        for part, view in routing.views(self.layout, parts, buffer, data_at):
            rows, gradient = pushes[self.layout.tensors[part.piece.tensor].name]
            values, here = routing.part_of(self.layout, part, rows, gradient)
            view[...] = values[here].reshape(-1)
        self.started = True
        self.link.send(buffer, total, rank, TO_SERVER)
        self.link.reap()
        return operation

    def streams(self, clock: int) -> bool:
        """Whether servers apply and answer a push piece by piece, not only as a whole.

        `clock` is the step of the push.
        """
        return self._has_pieces and self._modes.streams(clock)

    def tell_all(self, flags: int, data: bytes) -> None:
        """Send a message with the bytes `data` to every server; `flags` says what it asks for."""
        total = HEADER_BYTES + len(data)
        for rank in self.servers:
            buffer = self.link.pool.take(total)
            Header(flags, model=self.model, clock=self.clock, total=total).write(buffer)
            buffer.data[HEADER_BYTES:total] = data
            self.link.send(buffer, total, rank, TO_SERVER)
        self.started = True

    def may_be_quiet(self, flags: int) -> bool:
        """Whether a call that needs no values may end without an answer of the servers."""
        # Allowed if the step has already begun, or if the mode needs no answer of all servers and
        # each server was asked in the last few steps.
        if not flags & CLOCK and self.entered == self.clock:
            return True
        if self._modes.asks_all(self.clock + bool(flags & CLOCK)):
            return False
        return max(self.silent.values(), default=0) < SILENT - 1

    def tick_quietly(self, flags: int, pushes, samples) -> None:
        """Send gradients and the end of a step to all servers, and do not ask for answers."""
        servers = range(len(self.servers))
        if flags & CLOCK or self.entered < self.clock:
            self.silent.update(servers)
        if flags & PUSH:
            self.pushed = self.clock
        # Nothing is sent if `flags` asks only for a pull.
        for server in servers if flags & CLOCK else ():
            self.post(server, flags & ~PULL, pushes=pushes, samples=samples)

    def push(self, pushes: Mapping, samples: int | None) -> None:
        """Send gradients to all servers. The gradients may be changed when this method returns."""
        gradients = whole_push(self.layout, pushes, {}) if self._has_pieces else None
        late = False
        for server in self._in_turn():
            pieces = self._pieces[server]
            if gradients is None or not pieces:
                self.post(server, PUSH, pushes=pushes, samples=samples)
                continue
            self.post(server, PUSH, pushes=PIECES, samples=samples)
            rank = self.servers[server]
            push = CopiedPush(self.link, rank, self.layout, pieces, gradients, late)
            self.link.wait(push.handed, partial(list, (rank,)))
            late = push.late  # so a call waits for only one of several busy servers
        self.pushed = self.clock

    def _in_turn(self) -> Sequence[int]:
        return *range(self.first, len(self.servers)), *range(self.first)

    def ask(
        self, flags: int, wanted: dict, results: dict, pushes=None, samples=None, known=()
    ) -> tuple[list[Header], float]:
        """Send a request to each server that must answer, and receive the answers into `results`.

        Returns the headers of the answers, and the seconds that this rank has waited for them.
        """
        # Servers in `known` already have the push.
        flat, finish = self._names.targets(wanted, results)
        gradients = whole_push(self.layout, pushes, flat) if self._has_pieces else None
        out = flat if routing.has_all(self.layout, wanted) else None
        call = ServerCall(flags, wanted, flat, pushes, samples, known, gradients, out)
        self.pushed = self.clock if flags & PUSH else self.pushed
        waiting, quiet = self._choose(call)
        answers: dict[int, ServerAnswer] = {}
        headers: list[Header] = []
        late = time.monotonic() + LATE

        def all_here() -> bool:
            if quiet and time.monotonic() > late:
                for server in quiet:
                    answers[server] = self._look_in(server, bool(flags & CLOCK))
                quiet.clear()
            for server in [server for server, answer in answers.items() if answer.test()]:
                answer = answers.pop(server)
                answer.operation[OPEN] = False
                headers.append(header := answer.unpack(self.link, self.layout, wanted, flat))
                self.versions[server] = header.version
                self.queue[header.queue] += 1
            while waiting and all(answer.handed for answer in answers.values()):
                server, parts, words = waiting.popleft()
                answers[server] = self._request(server, call, parts, words)
            return not (answers or waiting)

        waited = self.link.wait(all_here, lambda: [self.servers[s] for s in answers])
        finish()
        return headers, waited

    def _choose(self, call: ServerCall) -> tuple[deque[Route], list[int]]:
        """Return the servers to ask, in order, and the servers that need not answer."""
        flags, quiet = call.flags, []
        entering = bool(flags & CLOCK) or self.entered < self.clock
        waiting = deque[Route]()
        routes = [self._route(server, call.wanted) for server in range(len(self.servers))]
        asks_all = self._modes.asks_all(self.clock + bool(flags & CLOCK))
        may_skip = entering and not asks_all and any(parts for parts, _ in routes)
        for server in self._in_turn():
            if not (routes[server][0] or entering):
                continue
            self.silent[server] += 1
            if may_skip and not routes[server][0] and self.silent[server] < SILENT:
                quiet.append(server)
                if flags & CLOCK:
                    self.post(server, flags & ~PULL, pushes=call.pushes, samples=call.samples)
                continue
            self.silent[server] = 0
            waiting.append((server, *routes[server]))
        return waiting, quiet

    def _request(self, server: int, call: ServerCall, parts: Sequence, pull: Any) -> ServerAnswer:
        """Send the request of a call to one server, and begin to receive the answer."""
        link, rank, pieces = self.link, self.servers[server], self._pieces[server]
        flags = call.flags_of(server)
        push: Any = call.pushes if flags & PUSH else None
        gradients = call.gradients if push is not None and pieces else None
        out = call.out if pieces else None
        pair = self._pair(rank) if pieces else None
        in_step = gradients is not None and out is not None and self.streams(self.clock)
        if gradients is not None:
            push = STREAM if in_step else PIECES
            if pair is not None and not in_step and (memory := self._readable()) is not None:
                addresses = addresses_of(memory, self.whole[server], gradients)
                push = PIECES if addresses is None else addresses
        if out is not None:
            parts, pull = [], STREAM if in_step or pair is not None else PIECES
        # The receive of the answer is posted before the request is sent, so that MPI need not
        # buffer the answer.
        incoming = link.receive(
            rank, TO_WORKER, HEADER_BYTES + routing.data_bytes(self.layout, parts)
        )
        operation = self.post(server, flags, pushes=push, samples=call.samples, pull=pull)
        sends: ClientStream | None = None
        if isinstance(push, np.ndarray):
            count_shared(link, self.whole[server].nbytes)
        elif (push == PIECES or pair is None) and (gradients is not None or out is not None):
            there = out if pair is None else None  # else this rank copies it from shared memory
            sends = ClientStream(link, rank, self.layout, pieces, gradients, there, in_step)
        if pair is not None and out is not None:
            ring = gradients if in_step else None
            shared = NodeClientStream(link, rank, self.layout, pieces, pair, out, ring, sends)
            return ServerAnswer(incoming, operation, parts, shared)
        return ServerAnswer(incoming, operation, parts, sends)

    def _readable(self) -> CrossMemory | None:
        """Return what servers of this host use to read pushes in this rank's memory, or None."""
        return self.share.cross if self.share is not None and self._modes.in_memory else None

    def _pair(self, rank: int) -> NodePair | None:
        """Return the memory that this worker shares with a server, or None."""
        return None if self.share is None else self.share.pair(self.link.comm.rank, rank)

    def _look_in(self, server: int, ahead: bool) -> ServerAnswer:
        """Send an empty pull to a server, so that the server knows that this worker waits."""
        incoming = self.link.receive(self.servers[server], TO_WORKER, HEADER_BYTES)
        return ServerAnswer(incoming, self.post(server, PULL, ahead=ahead))
