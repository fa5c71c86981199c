"""The serving half of a rank: takes messages in turn, updates the clocks, does what they allow.

    poll:  who has a message?   -> receive one from each, beginning after the last one served
           whose message is here? -> events on its model's ConsistencyGate -> updates, answers
           is there room?       -> send waiting answers

Everything happens in one thread, so a pull never sees half an update, and each sweep takes at
most one message per worker, so nobody can starve another. `poll` never blocks.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..errors import ProtocolError
from ..events import OPEN
from . import protocol
from .consistency import Answer, Apply, Consistency, ConsistencyGate
from .layout.capacity import ROOM_BYTES
from .layout.routing import ShardPart, data_bytes, decode_parts, views, whole_parts
from .link import Link
from .protocol import HEADER_BYTES, Header, Incoming
from .shards import ServerShard


class Push(NamedTuple):
    """A push that waits for its clock: the message, and what is in it."""

    buffer: np.ndarray
    parts: list
    samples: int | None
    seen: int  # version of the shard that the worker pulled last


class Pull(NamedTuple):
    """A pull that waits for its clock."""

    parts: Sequence[ShardPart]
    since: int  # nanoseconds
    queue: int
    operation: list


class Hosted:
    """One model on this server: its shard, its clocks, and what was seen of both."""

    def __init__(
        self, name: str, shard: ServerShard, consistency: Consistency, workers: int, batch
    ):
        self.name, self.shard = name, shard
        self.gate = ConsistencyGate(consistency, workers)
        self.global_batch = batch
        self.pulled = [0] * workers  # version in each worker's newest pull
        self.newest = [-1] * workers  # staleness of each worker's newest applied push
        self.staleness: Counter[int] = Counter()

    def weight(self, push: Push) -> float:
        """Weight of a push that is an update of its own."""
        if self.global_batch is None:
            return 0.0 if push.samples == 0 else 1.0 / len(self.pulled)
        return push.samples / self.global_batch

    def apply(self, action: Apply) -> None:
        """Update the shard, and book how old the gradients were."""
        version = self.shard.version
        if self.gate.consistency.merges:
            counted = [(1 if p.samples is None else p.samples, p.parts) for _, p in action.pushes]
            total = sum(samples for samples, _ in counted) or 1
            self.shard.apply([(samples / total, parts) for samples, parts in counted])
        else:
            ((_, push),) = action.pushes
            self.shard.apply([(1.0, push.parts)], self.weight(push))
        for worker, push in action.pushes:
            self.newest[worker] = version - push.seen
            self.staleness[version - push.seen] += 1

    def facts(self) -> dict:
        """Counts for the report, as JSON."""
        return {
            "updates": self.shard.version,
            "clocks": self.gate.clocks,
            "staleness": dict(self.staleness),
            "gaps": dict(self.gate.gaps),
        }


class Server:
    """All models on one server rank. The owner calls `poll` until `done`.

    Parameters
    ----------
    link : Link
    index : int
        Which of the servers this is.
    workers : sequence of int
        Ranks of the workers on the link's communicator.
    """

    def __init__(self, link: Link, index: int, workers: Sequence[int]):
        self.link, self.index = link, index
        self.workers = list(workers)
        self.models: list[Hosted] = []
        self.on_pause: Callable[[Any], None] | None = None
        self.pauses_here = True  # false where a worker half of the same rank takes part itself
        self.queue: Counter[int] = Counter()
        self.busy_seconds = 0.0
        self._present = set(range(len(workers)))  # those that have not said goodbye
        self._paused: dict[int, Any] = {}
        self._arriving: dict[int, Incoming] = {}
        self._answers: deque[tuple[Hosted, int, Pull, int, int]] = deque()
        self._turn = 0
        link.trail.about = self._clocks

    def present(self) -> list[int]:
        """Return the ranks of the workers that have not left."""
        return [self.workers[worker] for worker in sorted(self._present)]

    @property
    def done(self) -> bool:
        """Whether every worker has left and has its last answer."""
        return not self._present and not self._answers

    def poll(self) -> bool:
        """Do what can be done now; true if there was something."""
        start = time.perf_counter()
        acted = self._begin_receives()
        acted = self._finish_receives() or acted
        self.link.reap()
        while self._answers and self.link.bytes_in_flight < ROOM_BYTES:
            self.link.send(*self._next_answer(), protocol.TO_WORKER)
            acted = True
        if acted:
            self.busy_seconds += time.perf_counter() - start
        return acted

    # -- receiving ---------------------------------------------------------------------

    def _begin_receives(self) -> bool:
        comm, tag = self.link.comm, self.link.tag + protocol.TO_SERVER
        if not comm.Iprobe(MPI.ANY_SOURCE, tag):
            return False
        n = len(self.workers)
        waiting = []
        status = MPI.Status()
        for worker in ((self._turn + i) % n for i in range(n)):
            rank = self.workers[worker]
            # A worker whose message is still coming in has nothing else to say: what a probe
            # would find are the later pieces of that message.
            if worker not in self._arriving and comm.Iprobe(rank, tag, status):
                waiting.append((worker, status.Get_count(MPI.BYTE)))
        room = ROOM_BYTES - sum(incoming.buffer.size for incoming in self._arriving.values())
        begun = 0
        for worker, nbytes in waiting:
            if self._arriving and nbytes > room:
                self._turn = worker  # the first to be served when there is room again
                break
            self._arriving[worker] = self.link.receive(
                self.workers[worker], protocol.TO_SERVER, nbytes
            )
            room -= nbytes
            begun += 1
        else:
            self._turn = (self._turn + 1) % n
        if begun:
            self.queue[len(waiting)] += 1
        return begun > 0

    def _finish_receives(self) -> bool:
        queue = len(self._arriving)
        here = [worker for worker, incoming in self._arriving.items() if incoming.test()]
        if here:
            self.link.touched = True  # what fails now is lost to a worker
        for worker in here:
            incoming = self._arriving.pop(worker)
            self.link.received(incoming.header.total)
            if not self._handle(worker, incoming.header, incoming.buffer, queue):
                self.link.pool.give(incoming.buffer)
        return bool(here)

    def _handle(self, worker: int, header: Header, buffer: np.ndarray, queue: int) -> bool:
        """Carry out one message; true if its buffer is still needed."""
        if header.flags & protocol.ADD:
            raise ProtocolError(
                f"parameter server {self.index}: worker {worker} adds a model while this server "
                "serves; all ranks call add, in the same order, before a server serves"
            )
        kind, rank = protocol.SERVED[header.flags], self.workers[worker]
        if header.flags & (protocol.BYE | protocol.PAUSE):
            self.link.trail.begin(kind, rank, open=False)
        if header.flags & protocol.BYE:
            self._present.discard(worker)
            self._check_pause()
            return False
        if header.flags & protocol.PAUSE:
            self._paused[worker] = json.loads(buffer[HEADER_BYTES : header.total].tobytes())
            self._check_pause()
            return False
        if not 0 <= header.model < len(self.models):
            raise ProtocolError(f"parameter server {self.index}: no model {header.model} here")
        model = self.models[header.model]
        asks = bool(header.flags & protocol.PULL)
        operation = self.link.trail.begin(kind, rank, model.name, header.clock, open=asks)
        clock = model.gate.clocks[worker]
        if header.clock != clock:
            raise ProtocolError(
                f"parameter server {self.index}: worker {worker} is at clock {header.clock} of "
                f"{model.name!r}, expected {clock}"
            )
        if header.note1 and self.link.on_note is not None:
            self.link.on_note(rank, (header.note0, header.note1))
        message = buffer[: header.total]
        words_at = HEADER_BYTES
        push_parts, words_at = self._selection(model, message, words_at, header.push_words)
        pull_parts, data_at = self._selection(model, message, words_at, header.pull_words)
        if header.flags & protocol.PUSH:
            parts = list(views(model.shard.layout, push_parts, message, data_at))
            samples = None if header.samples < 0 else header.samples
            push = Push(buffer, parts, samples, model.pulled[worker])
            self._run(model, model.gate.push(worker, push))
        if header.flags & protocol.CLOCK:
            self._run(model, model.gate.tick(worker))
        if header.flags & protocol.PULL:
            pull = Pull(pull_parts, time.monotonic_ns(), queue, operation)
            self._run(model, model.gate.pull(worker, pull))
        if header.flags & protocol.LEAVE:
            self._run(model, model.gate.leave(worker))
        return bool(header.flags & protocol.PUSH)

    def _selection(
        self, model: Hosted, message, at: int, words: int
    ) -> tuple[list[ShardPart], int]:
        layout = model.shard.layout
        if words == protocol.ALL:
            return whole_parts(layout, self.index), at
        stop = at + 8 * words
        return decode_parts(message[at:stop].view(np.int64), layout, self.index), stop

    # -- what the clocks set free ----------------------------------------------------------

    def _run(self, model: Hosted, actions: Sequence[Apply | Answer]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                if model.gate.consistency.holds:  # else it is part of serving the push
                    self.link.trail.begin("apply", None, model.name, action.clock, False)
                model.apply(action)
                for _, push in action.pushes:
                    self.link.pool.give(push.buffer)
            else:
                held = time.monotonic_ns() - action.item.since
                self._answers.append((model, action.worker, action.item, action.gap, held))

    def _next_answer(self) -> tuple[np.ndarray, int, int]:
        """Write the next answer; returns its buffer, its bytes, and the rank it goes to.

        An answer that waited may have grown fresher, never too fresh: in the modes that hide
        updates until a clock is over, the clock of a worker without its answer is not over.
        """
        model, worker, pull, gap, held = self._answers.popleft()
        shard = model.shard
        total = HEADER_BYTES + data_bytes(shard.layout, pull.parts)
        buffer = self.link.pool.take(total)
        header = Header(
            protocol.PULL,
            clock=model.gate.clocks[worker],
            total=total,
            version=shard.version,
            gap=gap,
            held_ns=held,
            staleness=model.newest[worker],
            queue=pull.queue,
        )
        header.write(buffer)
        shard.read(pull.parts, buffer, HEADER_BYTES)
        model.pulled[worker] = shard.version
        pull.operation[OPEN] = False
        return buffer, total, self.workers[worker]

    # -- pauses ------------------------------------------------------------------------

    def _check_pause(self) -> None:
        """Once all workers have asked: tell them, and take part in what they do together."""
        if not self._paused:
            return
        gone = sorted(set(range(len(self.workers))) - self._present)
        tags = list(self._paused.values())
        held = [model.name for model in self.models if model.gate.held]
        if gone or tags.count(tags[0]) != len(tags):
            why = f"workers {gone} have left the group" if gone else f"different tags {tags}"
            raise ProtocolError(f"parameter server {self.index}: pause: {why}")
        if len(self._paused) < len(self.workers):
            return
        if held:
            raise ProtocolError(
                f"parameter server {self.index}: pause: workers stand at different clocks of "
                f"{held}; let all call clock() equally often before a pause"
            )
        on_pause = self.on_pause
        if self.pauses_here and on_pause is None:
            raise ProtocolError(
                f"parameter server {self.index}: the workers pause ({tags[0]!r}) but this server "
                "has no on_pause; call group.serve(on_pause=...) on server ranks"
            )
        self._paused = {}
        for rank in self.workers:
            self.link.tell(protocol.PAUSE, rank, protocol.TO_WORKER)
        if self.pauses_here and on_pause is not None:
            operation = self.link.trail.begin("serve pause")
            on_pause(tags[0])
            operation[OPEN] = False

    def _clocks(self) -> dict:
        """Who is how far: clocks finished by each worker, by its rank."""
        clocks = {m.name: dict(zip(self.workers, m.gate.clocks, strict=True)) for m in self.models}
        return {"clocks": clocks}

    def facts(self) -> dict:
        """Counts for the report, as JSON."""
        return {
            "rank": self.link.comm.rank,
            "server": self.index,
            "models": {model.name: model.facts() for model in self.models},
            "queue": dict(self.queue),
            "busy_seconds": self.busy_seconds,
            **self.link.counters.snapshot(),
        }


def with_histograms(facts):
    """Return facts that came as JSON, the keys of their histograms numbers again."""
    if not isinstance(facts, dict):
        return facts
    return {
        key: {int(k): n for k, n in value.items()}
        if key in ("gaps", "staleness", "queue")
        else with_histograms(value)
        for key, value in facts.items()
    }
