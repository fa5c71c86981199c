"""A worker's handle on one model: pull, push, clock, and the fused push-pull.

    worker                          each server
    pull    -> what                 -> waits for the clocks -> values, version
    push    -> gradients, samples   -> applied by the rules of the model's consistency
    clock   -> tick                 -> the clocks move; held pushes and pulls are set free

The first pull in a clock asks every server, also those that hold nothing of what is wanted: its
answers are what lets this worker into the clock. A push or tick without a pull asks for nothing
first, so a worker is never more than one clock of messages ahead of a server.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ClosedError, ConfigError, ProtocolError, shown
from ..events import OPEN
from . import protocol
from .layout.placement import ServerLayout
from .layout.routing import ShardPart, data_bytes, encode_parts, owned, route, views, whole_parts
from .layout.row_selection import Selection
from .link import GroupCall
from .protocol import HEADER_BYTES, Header

_NOTHING = np.empty(0, np.int64)
_MANY = 1 << 62  # a header has 64 bits for a number of samples


class Client:
    """One worker's access to one model. Made by `ServerGroup.add`.

    Attributes
    ----------
    versions : list of int
        Updates applied by each server to its shard at this worker's newest pull there.
    finished : int
        Clocks that this worker has finished.
    gaps : Counter
        How many clocks were entered at which distance from the slowest worker.
    group : ServerGroup
        Where it came from.
    note : tuple of two int
        Told to the first server beside the next request, once; zeros say nothing.
    """

    def __init__(
        self, group, name: str, layout: ServerLayout, model: int, global_batch: int | None
    ):
        self.name, self.layout, self.group = name, layout, group
        self._link, self._servers, self._model = group.link, group.server_ranks, model
        calls = ("pull", "push", "clock of", "push_pull")
        self._pulling, self._pushing, self._ticking, self._fused = (
            GroupCall(group.link, f"{call} {name!r}") for call in calls
        )
        self.versions = [0] * len(self._servers)
        self.finished = 0
        self.note = (0, 0)
        self.gaps: Counter[int] = Counter()
        self.closed = self.started = False
        self._batch = global_batch
        self._names = Selection(name, layout)
        self._whole = [whole_parts(layout, server) for server in range(len(self._servers))]
        self._entered = self._pushed = -1
        self._staleness: Counter[int] = Counter()
        self._queue: Counter[int] = Counter()
        self._waits = {"server": 0.0, "worker": 0.0}

    # -- the four calls of the step loop ---------------------------------------------------

    def pull(self, what=None, *, out: Mapping | None = None) -> dict:
        """Fetch parameters as they are allowed to be seen in this clock.

        Waits as long as the model's consistency says. Each server's part is a whole number of
        updates old (`versions`).

        Parameters
        ----------
        what : None, str, iterable of str, or mapping of str to rows, optional
            Names, or for each name the rows wanted (indices of the first axis; None for all).
            By default the names in `out`, or everything.
        out : mapping of str to array, optional
            Written in place; arrays that are missing are made.

        Returns
        -------
        dict
            Name to array: the tensor's shape, or ``(len(rows), *shape[1:])``.
        """
        self._open()
        with self._pulling:
            wanted, results = self._names.wanted(what, out)
            self._ask(protocol.PULL, wanted, results)
        return results

    def push(self, gradients: Mapping, *, samples: int | None = None) -> None:
        """Send the mean gradient over `samples` samples to the servers. Once per clock.

        Returns when the gradients may be written again, usually before they have arrived.

        Parameters
        ----------
        gradients : mapping
            Name to array, or to ``(rows, values)`` for some rows of a tensor (a row given twice
            is added twice). What is not named has gradient zero.
        samples : int, optional
            Weight of this push; 0 is allowed and says that there is nothing in it. Without it
            workers weigh the same. Needed where the model has a `global_batch`.
        """
        self._open()
        with self._pushing:
            samples = self._check_push(samples)
            pushes = self._names.split(gradients)
            self._enter()
            for server in range(len(self._servers)):
                self._post(server, protocol.PUSH, pushes=pushes, samples=samples)
            self._pushed = self.finished
            self._link.background()

    def clock(self) -> None:
        """Finish this clock. Does not wait; the next pull does."""
        self._open()
        with self._ticking:
            self._enter()
            for server in range(len(self._servers)):
                self._post(server, protocol.CLOCK)
            self.finished += 1
            self._link.background()

    def push_pull(
        self, gradients: Mapping, *, out: Mapping | None = None, samples: int | None = None
    ) -> dict:
        """``push``, ``clock`` and ``pull`` in one message per server and way.

        The parameters come back as the next clock may see them.
        """
        self._open()
        with self._fused:
            samples = self._check_push(samples)
            wanted, results = self._names.wanted(None, out)
            pushes = self._names.split(gradients)
            self._enter()
            self._ask(
                protocol.PUSH | protocol.CLOCK | protocol.PULL, wanted, results, pushes, samples
            )
        return results

    def close(self) -> None:
        """Leave the clocks: no worker waits for this one any more. Calling it twice is fine."""
        if not self.closed:
            with GroupCall(self._link, f"close of {self.name!r}"):
                self.leave()
                self._link.background()

    def leave(self) -> None:
        """Do what `close` does, from inside another call of the group."""
        if not self.closed:
            for server in range(len(self._servers)):
                self._post(server, protocol.LEAVE)
            self.closed = True

    @property
    def stats(self) -> dict:
        """What this worker has seen so far.

        ``waits`` has the seconds spent waiting for servers to serve ("server") and for slower
        workers to catch up ("worker"); ``gaps``, ``staleness`` (updates by others between this
        worker's pull and its push) and ``queue`` (workers in line when it was served) are
        histograms; messages and bytes are those of all clients of this rank.
        """
        return {
            "clocks": self.finished,
            "versions": list(self.versions),
            "gaps": dict(self.gaps),
            "staleness": dict(self._staleness),
            "queue": dict(self._queue),
            "waits": dict(self._waits),
            "imbalance": self.layout.imbalance,
            **self._link.counters.snapshot(),
        }

    # -- messages ------------------------------------------------------------------------

    def _open(self) -> None:
        if self.closed:
            raise ClosedError(f"client {self.name!r} is closed; it was used after close()")

    def _enter(self) -> None:
        """Be let into the present clock, if no pull has done that yet."""
        if self._entered < self.finished and self.finished > 0:
            self._ask(protocol.PULL, {}, {})

    def _check_push(self, samples) -> int | None:
        if self._pushed == self.finished:
            raise ProtocolError(
                f"client {self.name!r}: second push in clock {self.finished}; call clock() first"
            )
        if samples is None:
            if self._batch is None:
                return None
            raise ConfigError(f"push to {self.name!r}: give samples=, the model has a global batch")
        try:
            number = operator.index(samples)
        except TypeError:
            number = -1
        if not 0 <= number < _MANY:
            said = shown(samples)
            raise ConfigError(f"push to {self.name!r}: samples is {said}; expected 0 or more")
        return number

    def _route(self, server: int, wanted: Mapping) -> tuple[list[ShardPart], np.ndarray | None]:
        """Parts on one server and their selection words; everything needs no words."""
        if len(wanted) == len(self.layout.tensors) and all(r is None for r in wanted.values()):
            return self._whole[server], None
        number = self._names.number
        parts = route(self.layout, server, {number[n]: rows for n, rows in wanted.items()})
        return parts, encode_parts(parts)

    def _post(self, server: int, flags: int, *, pushes=None, samples=None, pull=_NOTHING) -> list:
        """Send one message: flags, a selection and data to push, a selection to pull.

        Returns the operation, which is open where it asks for an answer.
        """
        rank = self._servers[server]
        asks = bool(flags & protocol.PULL)
        operation = self._link.trail.begin(
            protocol.NAMES[flags], rank, self.name, self.finished, open=asks
        )
        rows = {name: rows for name, (rows, _) in pushes.items()} if pushes is not None else None
        parts, push = self._route(server, rows) if rows is not None else ([], _NOTHING)
        words = [w for w in (push, pull) if w is not None and w.size]
        data_at = HEADER_BYTES + 8 * sum(w.size for w in words)
        total = data_at + data_bytes(self.layout, parts)
        buffer = self._link.pool.take(total)
        note = (0, 0)
        if server == 0:
            note, self.note = self.note, note
        Header(
            flags,
            model=self._model,
            clock=self.finished,
            total=total,
            push_words=protocol.ALL if push is None else push.size,
            pull_words=protocol.ALL if pull is None else pull.size,
            samples=-1 if samples is None else samples,
            note0=note[0],
            note1=note[1],
        ).write(buffer)
        if words:
            np.concatenate(words, out=buffer[HEADER_BYTES:data_at].view(np.int64))
        for part, view in views(self.layout, parts, buffer, data_at):
            rows, gradient = pushes[self.layout.tensors[part.piece.tensor].name]
            values, here = self._place(part, rows, gradient)
            view[...] = values[here].reshape(-1)
        self.started = True
        self._link.send(buffer, total, rank, protocol.TO_SERVER)
        self._link.reap()
        return operation

    def _place(self, part: ShardPart, rows, flat: np.ndarray) -> tuple[np.ndarray, Any]:
        """Where one part lies in a flat array of all that is pushed or pulled: array and index."""
        if rows is None:
            return flat, slice(part.piece.start, part.piece.stop)
        width = self.layout.tensors[part.piece.tensor].width
        return flat.reshape(len(rows), width), owned(self.layout, part.piece, rows)

    def _ask(self, flags: int, wanted: dict, results: dict, pushes=None, samples=None) -> None:
        """Send a request that has an answer to the servers concerned; take answers in `results`."""
        flat, finish = self._names.targets(wanted, results)
        if flags & protocol.PUSH:
            self._pushed = self.finished
        entering = flags & protocol.CLOCK or self._entered < self.finished
        expected = {}
        for server, rank in enumerate(self._servers):
            parts, words = self._route(server, wanted)
            if not (parts or entering):
                continue
            total = HEADER_BYTES + data_bytes(self.layout, parts)
            # Posted before it is asked for, so that it lands where it belongs.
            incoming = self._link.receive(rank, protocol.TO_WORKER, total)
            operation = self._post(server, flags, pushes=pushes, samples=samples, pull=words)
            expected[server] = parts, incoming, operation
        gap = held = 0
        oldest = -1

        def all_here() -> bool:
            nonlocal gap, held, oldest
            for server in [s for s, (_, incoming, _) in expected.items() if incoming.test()]:
                parts, incoming, operation = expected.pop(server)
                operation[OPEN] = False
                header = incoming.header
                self._unpack(parts, incoming.buffer, wanted, flat)
                self._link.received(header.total)
                self._link.pool.give(incoming.buffer)
                self.versions[server] = header.version
                self._queue[header.queue] += 1
                gap, held = max(gap, header.gap), max(held, header.held_ns)
                oldest = max(oldest, header.staleness)
            return not expected

        waited = self._link.wait(all_here, lambda: [self._servers[s] for s in expected])
        blocked = min(waited, held / 1e9)
        self._waits["worker"] += blocked
        self._waits["server"] += waited - blocked
        self._link.touched = False  # whatever fails from here on, nobody waits for an answer
        if flags & protocol.CLOCK:
            self.finished += 1
        if entering:
            self._entered = self.finished
            self.gaps[gap] += 1
            if oldest >= 0 and self._pushed == self.finished - 1:
                self._staleness[oldest] += 1
        finish()

    def _unpack(self, parts, buffer, wanted, flat) -> None:
        for part, view in views(self.layout, parts, buffer, HEADER_BYTES):
            name = self.layout.tensors[part.piece.tensor].name
            values, here = self._place(part, wanted[name], flat[name])
            values[here] = view.reshape(-1, *values.shape[1:])
