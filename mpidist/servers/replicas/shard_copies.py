"""Each server keeps a copy of the previous server's shard, and makes the same updates in it.

    server 0      holds shard 0 and a copy of shard 2        for each update, a server sends the
    server 1      holds shard 1 and a copy of shard 0        merged gradient of all workers to the
    server 2      holds shard 2 and a copy of shard 1        next server

    BSP, SSP(0)   pushes of all workers | forward ->  the next server has it | vote -> ... apply
    ASP, SSP(s)   push | forward, apply ->            apply the same | acknowledge -> answer

A shard is a server's part of a model. A copy gets the updates of its shard in the same order, so it
has the same bits, also in the optimizer state (if both servers have the same kind of processor).
Under BSP and SSP(0) the gradients of a step are applied to all shards and copies or to none. In the
other modes a server applies gradients at once, and answers their worker when the next server has
them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..consistency import Action, Apply
from ..layout.routing import ShardPart, data_bytes, decode_parts, encode_parts, views
from ..link import Link
from ..protocol import ACKNOWLEDGE, COPY, HEADER_BYTES, NO_MORE, PUSH, Header, Incoming
from ..shards import ServerShard
from .shard_ranges import all_ranges, pack, range_bytes, unpack


class Forwarded(NamedTuple):
    """An update of the step `clock`, received from the server whose part is copied here.

    This server makes the same update in its copy.
    """

    clock: int
    header: Header
    buffer: np.ndarray


class ShardCopies:
    """One server's copies of the parts of all models that the previous server holds.

    Each server sends the gradients of its updates to the next server, which makes the same updates
    in its copy. The server after the last one is server 0.
    """

    def __init__(self, link: Link, before: int, after: int, models: list):
        self._link, self._before, self._after, self._models = link, before, after, models
        # The updates sent to the next server, and received from the previous server.
        self.sent = self.received = 0
        # Updates that the next server must acknowledge, and that it has acknowledged.
        self._asked = self._acknowledged = 0
        self._told_end = self._heard_end = False
        self._arriving: dict[int, Incoming] = {}
        self._waiting: dict[int, deque[Forwarded]] = defaultdict(deque)  # by number of the model
        self._here: set[tuple[int, int]] = set()  # (model, clock) whose updates are all here
        self._unanswered: deque[tuple[int, Any]] = deque()  # (value of `_asked`, answer)

    @property
    def pending(self) -> bool:
        """Whether updates may still come, for the copy on this server or the copy of its part."""
        return self.behind or not self._heard_end

    @property
    def behind(self) -> bool:
        """Whether the server with the copy has still to confirm that it has received updates."""
        # Updates for which servers vote are not counted, because the votes confirm them.
        return self._asked > self._acknowledged

    # -- this server's shard ---------------------------------------------------------------

    def forward(self, number: int, actions: Sequence[Action]) -> None:
        """Send the merged gradients of each update in `actions` to the server that has the copy.

        `number` is the number of the model. Elements of `actions` that are no updates are ignored.
        """
        model = self._models[number]
        mode, layout = model.gate.consistency, model.shard.layout
        updates = [each for each in actions if isinstance(each, Apply)]
        for k, update in enumerate(updates):
            merged = model.merge(update)
            follows = any(each.clock == update.clock for each in updates[k + 1 :])
            parts = _parts(model.shard, merged[0]) if merged is not None else []
            words = encode_parts(parts)
            weight_at = HEADER_BYTES + 8 * words.size
            total = weight_at + 8 + data_bytes(layout, parts)
            buffer = self._link.pool.take(total)
            worker = -1 if mode.merges else update.pushes[0][0]
            Header(
                PUSH, number, update.clock, total, words.size, queue=follows, samples=worker,
                gap=merged is not None,
            ).write(buffer)  # fmt: skip
            buffer[HEADER_BYTES:weight_at].view(np.int64)[...] = words
            weight = buffer[weight_at : weight_at + 8].view(np.float64)
            if merged is not None:
                gradients, weight[0] = merged
                for part, view in views(layout, parts, buffer, weight_at + 8):
                    gradient = gradients[layout.key(part.piece)]
                    whole = part.rows is None
                    view[...] = gradient if whole else gradient[1].reshape(-1)
                # A copy, because the next merge may use the same memory.
                if mode.holds and not mode.merges:
                    merged = {k: _copied(g) for k, g in gradients.items()}, merged[1]
            self._link.send(buffer, total, self._after, COPY)
            self.sent += 1
            self._asked += not mode.holds
            # Used by a later `Hosted.apply`, in the same order.
            model.merged.append(merged)

    def answered_later(self, model, answer) -> bool:
        """Whether `answer` must wait until the server with the copy has this model's updates."""
        # With votes no answer waits: a server votes only when it has the updates for its copy.
        waits = not model.gate.consistency.holds and self._asked > self._acknowledged
        if waits:
            # `listen` returns it later.
            self._unanswered.append((self._asked, answer))
        return waits

    def end(self) -> None:
        """Tell the next server, once, that no more updates come, because no worker is left."""
        if not self._told_end:
            self._told_end = True
            self._link.tell(NO_MORE, self._after, COPY)

    # -- the copy --------------------------------------------------------------------------

    def listen(self) -> list:
        """Receive updates, and confirmations of sent updates; return the answers to send now."""
        comm, tag, status = self._link.comm, self._link.tag + COPY, MPI.Status()
        for rank in {self._before, self._after}:
            while True:
                if rank not in self._arriving:
                    if not comm.Iprobe(rank, tag, status):
                        break
                    nbytes = status.Get_count(MPI.BYTE)
                    self._arriving[rank] = self._link.receive(rank, COPY, nbytes)
                if not self._arriving[rank].test():
                    break
                self._take(self._arriving.pop(rank))
        free = []
        while self._unanswered and self._unanswered[0][0] <= self._acknowledged:
            free.append(self._unanswered.popleft()[1])
        return free

    def _take(self, message: Incoming) -> None:
        header, buffer = message.header, message.buffer
        self._link.received(header.total)
        if header.flags in (ACKNOWLEDGE, NO_MORE):
            self._acknowledged += header.flags == ACKNOWLEDGE
            self._heard_end |= header.flags == NO_MORE
            self._link.pool.give(buffer)
            return
        self.received += 1
        model = self._models[header.model]
        if model.gate.consistency.holds:
            self._waiting[header.model].append(Forwarded(header.clock, header, buffer))
            if not header.queue:
                self._here.add((header.model, header.clock))
            return
        self._update(header, buffer)
        model.copied[header.samples] = header.clock + 1
        self._link.tell(ACKNOWLEDGE, message.source, COPY)

    def has(self, number: int, clock: int) -> bool:
        """Whether this server has the updates of the step `clock` for its copy of a model."""
        return (number, clock) in self._here

    def apply(self, number: int, clocks: int) -> None:
        """Apply the received updates of the first `clocks` steps to the copy of model `number`."""
        waiting = self._waiting[number]
        while waiting and waiting[0].clock < clocks:
            update = waiting.popleft()
            self._here.discard((number, update.clock))
            self._update(update.header, update.buffer)

    def forget(self, number: int) -> None:
        """After a death, drop updates of model `number` that arrived but are not applied yet."""
        # The workers repeat their step.
        self._waiting.pop(number, None)

    def _update(self, header: Header, buffer: np.ndarray) -> None:
        copy: ServerShard = self._models[header.model].copy
        if header.gap:  # not all weights were 0
            at = HEADER_BYTES + 8 * header.push_words
            words = buffer[HEADER_BYTES:at].view(np.int64)
            parts = decode_parts(words, copy.layout, copy.server)
            weight = float(buffer[at : at + 8].view(np.float64)[0])
            gradients = {
                copy.key(part): _gradient(copy, part, view)
                for part, view in views(copy.layout, parts, buffer, at + 8)
            }
            copy.update(gradients, weight)
        self._link.pool.give(buffer)

    # -- the beginning ---------------------------------------------------------------------

    def fill(self, number: int) -> None:
        """Send this server's part of model `number` to the next server, which keeps it as a copy.

        This server receives the part of the previous server in the same way.

        All servers call this method before they serve.
        """
        link, model = self._link, self._models[number]
        mine, copied = all_ranges(model.shard), all_ranges(model.copy)
        message = link.receive(self._before, COPY, HEADER_BYTES + range_bytes(copied))
        total = HEADER_BYTES + range_bytes(mine)
        buffer = link.pool.take(total)
        Header(PUSH, number, total=total, version=model.shard.version).write(buffer)
        pack(mine, buffer[HEADER_BYTES:total])
        link.send(buffer, total, self._after, COPY)
        link.wait_for([message], "all")
        link.wait(link.reap, peers="all")
        unpack(copied, message.buffer[HEADER_BYTES : message.header.total])
        model.copy.version = message.header.version
        link.pool.give(message.buffer)


def _parts(shard: ServerShard, gradients: dict[str, Any]) -> list[ShardPart]:
    """Return the parts of a shard that merged gradients have: whole pieces, or rows."""
    found = []
    for piece in shard.layout.pieces[shard.server]:
        gradient = gradients.get(shard.layout.key(piece))
        if isinstance(gradient, tuple):
            found.append(ShardPart(piece).with_local_rows(shard.layout, gradient[0]))
        elif gradient is not None:
            found.append(ShardPart(piece))
    return found


def _gradient(shard: ServerShard, part: ShardPart, view: np.ndarray):
    """Return the gradient in a forwarded update, in the form that `ServerShard.merge` returns."""
    if part.rows is None:
        return view
    rows = part.local_rows(shard.layout)
    return rows, view.reshape(len(rows), -1)


def _copied(gradient):
    return tuple(map(np.copy, gradient)) if isinstance(gradient, tuple) else gradient.copy()
