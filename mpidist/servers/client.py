"""A worker's access to one model: pull, push, clock, and push_pull, which does all three at once.

    worker sends                    each server
    pull    -> names, rows          -> waits for slower workers -> answers with values, version
    push    -> gradients, samples   -> applies the gradients as the model's consistency says
    clock   -> tick                 -> advances the worker's clock, answers the pulls that waited
                                       for it

A clock is one training step of a worker, and a tick is the message that ends it. A pull asks only
the servers that hold the wanted tensors or rows: these must answer, and the worker waits for them.
The other servers get only the worker's push, which may be empty, and its tick. A worker asks more
servers in four cases:

- If a worker has not pulled in a clock after the first, its push or its tick first sends an empty
  pull to every server.
- The first pull of a clock asks each server at least once in `SILENT` clocks. So no server keeps
  the messages of more than `SILENT` clocks of a worker.
- If a worker has waited for `LATE` seconds, it asks all servers, so that each server knows which
  workers wait.
- In the modes with `Consistency.asks_all`, the first pull of each clock asks every server.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..errors import ClosedError, MpidistError, ProtocolError
from ..events import OPEN
from ..runtime import ulfm
from . import protocol
from .layout import routing
from .layout.placement import ServerLayout
from .layout.push_checks import checked_samples, not_finite
from .layout.row_selection import Selection
from .link import GroupCall
from .model_facts import Request
from .protocol import CLOCK, HEADER_BYTES, PIECES, PULL, PUSH, Header, largest, selection_words
from .wire.bound_push_pull import BoundPushPull, bind
from .wire.client_stream import ClientStream, is_here, whole_push
from .wire.trial_update import has_the_same_bits
from .wire.wire_pieces import WirePiece, cut_shard

#: A worker asks each server at least once in `SILENT` clocks, and asks all servers when it has
#: waited for `LATE` seconds. Tests change these numbers.
SILENT, LATE = 16, 0.25

_NOTHING = np.empty(0, np.int64)
_BINDS = 8  # how often a client remembers the arrays of a push_pull that then do not come again


class Client:
    """One worker's access to one model on the servers. `ServerGroup.add` makes it.

    Attributes
    ----------
    versions : list of int
        The updates in each server's shard at this worker's newest pull from the server.
    finished : int
        The number of clocks (steps) that this worker has finished, or passed over because it was
        late (`BackupWorkers`).
    dropped : int
        How many pushes of this worker the servers have not applied, according to the answer to its
        newest pull.
    gaps : Counter
        For each number n, how many clocks (steps) this worker began when it was n clocks ahead of
        the slowest worker.
    group : ServerGroup
        The group that the model belongs to.
    note : tuple of two int
        Two integers that the next request carries to the first server, and sets to zero.
    """

    def __init__(self, group, asked: Request, layout: ServerLayout, model: int, piece_bytes: int):
        self.name, self.layout, self.group = (name := asked.name), layout, group
        self._link, self._servers, self._model = group.link, group.server_ranks, model
        calls = (f"{call} {name!r}" for call in ("pull", "push", "clock of", "push_pull"))
        self._pulling, self._pushing, self._ticking, self._fused = (
            GroupCall(group.link, call) for call in calls
        )
        self.versions = [0] * len(self._servers)
        self.finished, self.note = 0, (0, 0)
        self.gaps: Counter[int] = Counter()
        self.closed = self.started = self.removed = False
        self._batch, self._drops = asked.global_batch, asked.nonfinite == "drop"
        self._nonfinite = self.dropped = self.skipped = 0
        self._names = Selection(name, layout)
        self._whole = [routing.WholeShard(layout, server) for server in range(len(self._servers))]
        self._bound: BoundPushPull | None = None
        self._binds = _BINDS
        self._pieces: list[list[WirePiece]] = [[] for _ in self._servers]
        # A death may break a push off in an elastic run, and then no server may have applied it.
        safe = asked.consistency.streams and not group.votes and ulfm.current is None
        if safe and has_the_same_bits(asked.optimizer):
            cuts = (cut_shard(layout, k, piece_bytes) for k in range(len(self._servers)))
            self._pieces = [pieces if len(pieces) > 1 else [] for pieces in cuts]
        self._in_pieces = any(self._pieces)
        self._asks_all = asked.consistency.asks_all or group.votes
        self._silent: Counter[int] = Counter()  # clocks since each server was asked
        self._entered = self._pushed = -1
        self._staleness: Counter[int] = Counter()
        self._queue: Counter[int] = Counter()
        self._waits = {"server": 0.0, "worker": 0.0}

    # -- the four calls of the step loop ---------------------------------------------------

    def pull(self, what=None, *, out: Mapping | None = None) -> dict:
        """Fetch parameters with all updates that the consistency mode guarantees in this step.

        The call waits for slower workers if the model's consistency mode (such as BSP or SSP)
        requires that. A server never answers a pull while it is in the middle of an update. After
        the call, `versions` has the number of updates that the values of each server include.

        Parameters
        ----------
        what : None, str, iterable of str, or mapping of str to rows, optional
            The names of the wanted tensors, or a mapping of each name to the wanted rows (indices
            of the first axis; None for all). By default `pull` fetches the names in `out`, or all
            names if there is no `out`.
        out : mapping of str to array, optional
            Arrays that receive the values in place. New arrays are made for names that are not in
            `out`.

        Returns
        -------
        dict
            A mapping of name to array. An array has the shape of its tensor, or the shape
            ``(len(rows), *shape[1:])`` if only some rows are wanted.
        """
        self._open()
        with self._pulling:
            wanted, results = self._names.wanted(what, out)
            self._ask(PULL, wanted, results)
        return results

    def push(self, gradients: Mapping, *, samples: int | None = None) -> None:
        """Send the mean gradient over `samples` samples to the servers. Once per clock.

        When the call returns, the caller may overwrite the gradients, although the servers may not
        have received them yet.

        Parameters
        ----------
        gradients : mapping
            Name to array, or to ``(rows, values)`` for some rows of a tensor (a row given twice
            is added twice). Tensors that are not named have gradient zero.
        samples : int, optional
            The number of samples, which is the weight of this push. 0 is allowed. By default all
            workers have the same weight. `samples` is required if the model has a `global_batch`.
        """
        self._open()
        with self._pushing:
            pushes, samples = self._checked(gradients, samples)
            self._enter()
            for server in range(len(self._servers)):
                self._post(server, PUSH, pushes=pushes, samples=samples)
            self._pushed = self.finished
            self._link.background()

    def clock(self) -> None:
        """Finish this worker's step, without waiting; the next pull waits for slower workers."""
        self._open()
        with self._ticking:
            self._enter()
            for server in range(len(self._servers)):
                self._post(server, CLOCK)
            self.finished += 1
            self._link.background()

    def push_pull(
        self,
        gradients: Mapping,
        *,
        what=None,
        out: Mapping | None = None,
        samples: int | None = None,
    ) -> dict:
        """Do ``push``, ``clock`` and ``pull`` with one request to each server and one answer.

        `what` has the names or rows to pull, as for ``pull``, for example the rows of the next
        minibatch. Returns the parameters for the next step, in the form that ``pull`` returns.
        """
        self._open()
        with self._fused:
            if what is None and (bound := self._bound) is not None and bound.fits(gradients, out):
                count = self._check_push(samples)
                if bound.pack():  # else the usual way tells where the gradient is not finite
                    return self._push_pull_again(bound, count)
            wanted, results = self._names.wanted(what, out)
            pushes, samples = self._checked(gradients, samples)
            self._enter()
            self._ask(PUSH | CLOCK | PULL, wanted, results, pushes, samples)
            if self._binds and not self._in_pieces:
                self._binds -= 1
                self._bound = bind(self._link, self._servers, self._whole, gradients, out)
        return results

    def _push_pull_again(self, bound: BoundPushPull, samples: int | None) -> dict:
        """Do a push_pull of the arrays of `bound`, whose gradients are packed."""
        self._enter()
        self._pushed, self.started, self._binds = self.finished, True, _BINDS
        note, self.note = self.note, (0, 0)
        entered, clock = int(not self._asks_all and self._entered == self.finished), self.finished
        waited, headers = bound.exchange(self.name, self._model, clock, samples, entered, note)
        self._silent.clear()
        self.versions[:] = [header.version for header in headers]
        self._queue.update(header.queue for header in headers)
        self._end_call(headers, waited, True, True)
        return bound.results()

    def begin_at(self, clock: int) -> None:
        """Let this worker begin at `clock` instead of 0, before its first call."""
        self.finished = clock

    def repeat_push_pull(
        self, gradients: Mapping, *, out: Mapping, samples: int | None, known: Collection[int]
    ) -> None:
        """Do `push_pull`, but push only to the servers that are not in `known` (their numbers)."""
        self._open()
        with self._fused:
            wanted, results = self._names.wanted(None, out)
            pushes, samples = self._checked(gradients, samples)
            self._enter()
            self._ask(PUSH | CLOCK | PULL, wanted, results, pushes, samples, known)

    def close(self) -> None:
        """Leave the model, if not yet done: other workers no longer wait for this worker."""
        if not self.closed:
            with GroupCall(self._link, f"close of {self.name!r}"):
                self.leave()
                self._link.background()

    def leave(self) -> None:
        """Leave the model, as `close` does, but from inside another call of the server group."""
        if not self.closed:
            for server in range(len(self._servers)):
                self._post(server, protocol.LEAVE)
            self.closed = True

    @property
    def stats(self) -> dict:
        """The counts of messages, steps and waits of this worker so far.

        ``waits`` has the seconds spent waiting for servers to serve ("server") and for slower
        workers to catch up ("worker"). ``gaps`` (steps ahead of the slowest worker), ``staleness``
        (updates by other workers between this worker's pull and push) and ``queue`` (how many
        workers waited for a server at the same time) are histograms. ``nonfinite`` counts the
        pushes that were left out because of a NaN or an infinity. ``dropped`` counts the pushes
        that servers did not apply, and ``skipped`` the clocks that this worker passed over. Both
        are as new as the answer to the worker's newest pull. The counts of messages and bytes are
        sums over all clients of this rank.
        """
        return {
            "clocks": self.finished,
            "versions": list(self.versions),
            "gaps": dict(self.gaps),
            "staleness": dict(self._staleness),
            "queue": dict(self._queue),
            "waits": dict(self._waits),
            "imbalance": self.layout.imbalance,
            "nonfinite": self._nonfinite,
            "dropped": self.dropped,
            "skipped": self.skipped,
            **self._link.counters.snapshot(),
        }

    # -- messages ------------------------------------------------------------------------

    def _open(self) -> None:
        if self.removed:
            raise ClosedError(f"client {self.name!r}: the model was removed from its group")
        if self.closed:
            raise ClosedError(f"client {self.name!r} is closed; it was used after close()")

    def _enter(self) -> None:
        """Begin this step by an empty pull, unless this worker has already pulled in this step."""
        if self._entered < self.finished and self.finished > 0:
            self._ask(PULL, {}, {})

    def _checked(self, gradients: Mapping, samples) -> tuple[dict, int | None]:
        """Return what a push sends and its samples, after all checks; nothing is sent before."""
        samples = self._check_push(samples)
        pushes = self._names.split(gradients)
        if (wrong := not_finite(self.name, pushes)) is None:
            return pushes, samples
        if not self._drops:
            raise MpidistError(wrong)
        self._nonfinite += 1
        return {}, 0

    def _check_push(self, samples) -> int | None:
        if (clock := self.finished) == self._pushed:
            text = f"client {self.name!r}: second push in clock {clock}; call clock() first"
            raise ProtocolError(text)
        return checked_samples(self.name, samples, self._batch)

    def _route(
        self, server: int, wanted: Mapping
    ) -> tuple[list[routing.ShardPart], np.ndarray | None]:
        """Return the wanted parts on a server, and the array that lists them, or None for all."""
        if routing.has_all(self.layout, wanted):
            return self._whole[server].parts, None
        number = self._names.number
        parts = routing.route(self.layout, server, {number[n]: rows for n, rows in wanted.items()})
        return parts, routing.encode_parts(parts)

    def _post(
        self, server: int, flags: int, *, pushes=None, samples=None, pull: Any = _NOTHING, ahead=0
    ) -> list:
        """Send one message with flags, the data to push, and a list of the parts to pull.

        `pull` is None for all that the server holds. `pushes` or `pull` are PIECES if the data
        travel in pieces of their own. The message belongs to the clock `ahead` of this one.

        Returns the record of this message in `Link.trail` (the requests sent and served); the
        record is marked as open (unfinished) if the message asks for an answer.
        """
        rank = self._servers[server]
        operation = self._link.trail.begin(
            protocol.NAMES[flags], rank, self.name, self.finished, open=bool(flags & PULL)
        )
        parts: list[routing.ShardPart] = []
        push: Any = _NOTHING
        if pushes is PIECES:
            push = PIECES
        elif pushes is not None:
            parts, push = self._route(server, {name: rows for name, (rows, _) in pushes.items()})
        words = [w for w in (push, pull) if isinstance(w, np.ndarray) and w.size]
        data_at = HEADER_BYTES + 8 * sum(w.size for w in words)
        total = data_at + routing.data_bytes(self.layout, parts)
        buffer = self._link.pool.take(total)
        note = (0, 0)
        if server == 0:
            note, self.note = self.note, note
        Header(
            flags,
            model=self._model,
            clock=self.finished + ahead,
            total=total,
            push_words=selection_words(push),
            pull_words=selection_words(pull),
            samples=-1 if samples is None else samples,
            gap=int(not self._asks_all and self._entered == self.finished),
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
        self._link.send(buffer, total, rank, protocol.TO_SERVER)
        self._link.reap()
        return operation

    def _ask(
        self, flags: int, wanted: dict, results: dict, pushes=None, samples=None, known=()
    ) -> None:
        """Send a request to each server that must answer, and receive the answers.

        Servers in `known` have the push already.
        """
        flat, finish = self._names.targets(wanted, results)
        self._pushed = self.finished if flags & PUSH else self._pushed
        entering = flags & CLOCK or self._entered < self.finished
        expected: dict[int, tuple] = {}
        quiet: list[int] = []  # servers that are not asked
        routes = [self._route(server, wanted) for server in range(len(self._servers))]
        may_skip = entering and not self._asks_all and any(parts for parts, _ in routes)
        in_pieces = self._in_pieces and routing.has_all(self.layout, wanted)
        gradients = whole_push(self.layout, pushes, flat) if in_pieces and flags & PUSH else None
        for server, rank in enumerate(self._servers):
            if in_pieces and (pieces := self._pieces[server]):
                incoming = self._link.receive(rank, protocol.TO_WORKER, HEADER_BYTES)
                push = pushes if gradients is None else PIECES
                operation = self._post(server, flags, pushes=push, samples=samples, pull=PIECES)
                stream = ClientStream(self._link, rank, self.layout, pieces, flat, gradients)
                expected[server] = [], incoming, operation, stream
                continue
            parts, words = routes[server]
            if not (parts or entering):
                continue
            self._silent[server] += 1
            if may_skip and not parts and self._silent[server] < SILENT:
                quiet.append(server)
                if flags & CLOCK:
                    self._post(server, flags & ~PULL, pushes=pushes, samples=samples)
                continue
            self._silent[server] = 0
            total = HEADER_BYTES + routing.data_bytes(self.layout, parts)
            # The receive of the answer is posted before the request is sent, so that MPI need not
            # buffer the answer.
            incoming = self._link.receive(rank, protocol.TO_WORKER, total)
            if server in known:
                operation = self._post(server, flags & ~PUSH, pull=words)
            else:
                operation = self._post(server, flags, pushes=pushes, samples=samples, pull=words)
            expected[server] = parts, incoming, operation, None
        headers: list[Header] = []
        late = time.monotonic() + LATE

        def all_here() -> bool:
            if quiet and time.monotonic() > late:
                for server in quiet:
                    rank = self._servers[server]
                    incoming = self._link.receive(rank, protocol.TO_WORKER, HEADER_BYTES)
                    operation = self._post(server, PULL, ahead=bool(flags & CLOCK))
                    expected[server] = [], incoming, operation, None
                quiet.clear()
            for server in [s for s, one in expected.items() if is_here(*one)]:
                parts, incoming, operation, _ = expected.pop(server)
                operation[OPEN] = False
                headers.append(header := incoming.header)
                for part, view in routing.views(self.layout, parts, incoming.buffer, HEADER_BYTES):
                    name = self.layout.tensors[part.piece.tensor].name
                    values, here = routing.part_of(self.layout, part, wanted[name], flat[name])
                    values[here] = view.reshape(-1, *values.shape[1:])
                self._link.received(header.total)
                self._link.pool.give(incoming.buffer)
                self.versions[server] = header.version
                self._queue[header.queue] += 1
            return not expected

        waited = self._link.wait(all_here, lambda: [self._servers[s] for s in expected])
        self._end_call(headers, waited, bool(flags & CLOCK), bool(entering))
        finish()

    def _end_call(self, headers: list[Header], waited: float, ticks: bool, entering: bool) -> None:
        """Count what the answers of one call tell."""
        held, gap, dropped, oldest = largest(headers)
        blocked = min(waited, held / 1e9)
        self._waits["worker"] += blocked
        self._waits["server"] += waited - blocked
        self._link.touched = False  # from here on, no server waits for this rank
        self.finished += ticks
        if entering:
            self.gaps[gap] += 1
            before, self.dropped = self.dropped, dropped
            if oldest >= 0 and self._pushed == self.finished - 1 and dropped == before:
                self._staleness[oldest] += 1
            # With backup workers, a late worker goes on at the clock of the others.
            self.skipped += headers[0].clock - self.finished
            self.finished = self._entered = headers[0].clock
