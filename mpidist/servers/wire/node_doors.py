"""How a server handles small messages that workers of its host write into shared memory."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from ..layout.routing import WholeParts
from ..modes.hosted_model import Pull, Push
from ..protocol import HEADER_BYTES, read_header, write_header
from .bound_push_pull import FLAGS
from .node_mail import ANSWERED, MODEL, RUNG, SENT
from .node_share import NodePair, NodeShare


class MailBox(NamedTuple):
    """The shared memory for one worker's requests that concern one model, and for the answers."""

    model: Any
    push: np.ndarray
    answer: np.ndarray
    # The gradients of a request.
    parts: list
    # The arrays of an answer, with their keys in the server's `ServerShard`.
    values: list
    door: ServerDoor

    def write(self, *fields: int) -> None:
        """Write an answer with `fields` in its header and the parameters; notify the worker."""
        parameters = self.model.shard.parameters
        write_header(self.answer, *fields)
        for key, view in self.values:
            view[...] = parameters[key]
        self.door.answered[ANSWERED] = self.door.heard


class ServerDoor:
    """Two counters in shared memory that announce messages between a worker and this server.

    The worker increases `rung` when it has written a request; the server writes the number of
    answered requests to `answered`.
    """

    def __init__(self, worker: int, rank: int, pair: NodePair):
        self.worker, self.rank = worker, rank
        self.rung, self.answered = pair.rung, pair.answered
        self.heard = 0


class ServerDoors:
    """Receives the requests that workers of this host write into shared memory, for all models."""

    def __init__(self, server: Any):
        self._server = server
        self._doors: list[ServerDoor] = []
        self._boxes: dict[tuple[int, int], MailBox] = {}

    def open(self, number: int, share: NodeShare) -> None:
        """Let the workers of this host send requests for model `number` through shared memory."""
        server, link = self._server, self._server.link
        if not self._doors:
            for worker, rank in enumerate(server.workers):
                if (pair := link.doors.pair(rank, link.comm.rank)) is not None:
                    self._doors.append(ServerDoor(worker, rank, pair))
        model = server.models[number]
        for door in self._doors:
            pair = share.pair(door.rank, link.comm.rank)
            if pair is not None and pair.push is not None and pair.answer is not None:
                parts = WholeParts(model.whole.views(pair.push, HEADER_BYTES))
                values = model.whole.views(pair.answer, HEADER_BYTES)
                values = [(model.shard.key(part), view) for part, view in values]
                box = MailBox(model, pair.push, pair.answer, parts, values, door)
                self._boxes[number, door.worker] = box

    def close(self, number: int) -> None:
        """Free the memory of the requests for model `number` and of their answers."""
        self._boxes = {key: box for key, box in self._boxes.items() if key[0] != number}

    def listen(self) -> bool:
        """Handle the requests that have arrived; return whether there were any."""
        acted = False
        for door in self._doors:
            line = door.rung
            if line[RUNG] == door.heard:
                continue
            link = self._server.link
            if line[SENT] != link.taken[door.rank]:
                continue  # an earlier message by MPI has not arrived yet
            door.heard += 1
            acted = link.touched = True
            self._handle(door, self._boxes[line[MODEL], door.worker])
        return acted

    def _handle(self, door: ServerDoor, box: MailBox) -> None:
        """Carry out push, clock and pull, as `Server` does for messages that MPI has sent."""
        server, model, worker = self._server, box.model, door.worker
        header = read_header(box.push, box.push.size, door.rank)
        operation = server.begin(FLAGS, worker, header, model)
        server.load.count(header, model.whole, model.whole.parts, model.whole.parts)
        gate = model.gate
        push = Push(None, box.parts, header.samples, model.pulled[worker])
        actions = gate.push(worker, push, bool(header.gap))
        if model.changes:
            model.changes.check_tick(worker, header.clock, server.workers)
        actions += gate.tick(worker)
        pull = Pull(model.whole.parts, time.monotonic_ns(), 1, operation, False, box)
        server.run(model, actions + gate.pull(worker, pull))
