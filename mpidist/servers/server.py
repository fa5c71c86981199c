"""The server on one rank: it receives requests, applies pushes and answers pulls.

    Server.poll   1. begin to receive one message of each worker that has sent one
                  2. report each message that has arrived to its model's `ConsistencyGate`,
                     and apply the updates that the gate allows
                  3. send the answers that the gate allows, as far as memory permits

One thread does all three, so a pull never reads an incomplete update. Each call of `poll` receives
at most one message per worker, so that no worker can starve another. `poll` never blocks.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import ProtocolError
from ..events import OPEN
from . import protocol
from .balance.server_load import ServerLoad
from .consistency import Action, Apply, Do, Drop
from .deadlock import who_waits
from .decisions import Decisions
from .layout.capacity import ROOM_BYTES
from .layout.routing import data_bytes, views
from .link import Link
from .modes.global_norm import GlobalNorms
from .modes.hosted_model import Hosted, Pull, Push
from .pieces.collected_push import Arrivals
from .protocol import HEADER_BYTES, TO_SERVER, TO_WORKER, Header
from .replicas.shard_copies import ShardCopies
from .rows.unused_rows import drop_rows
from .votes import Votes
from .wire.node_doors import ServerDoors

_LOOK_SECONDS = 0.25


class Server:
    """Serves all models of a group on one rank.

    The owner of the object calls `poll` again and again until `done` is true. `index` is the number
    of this server among the servers of the group.
    """

    def __init__(self, link: Link, index: int, workers: Sequence[int], servers: Sequence[int]):
        self.link, self.index, self.workers = link, index, list(workers)
        self.decisions = Decisions(link, servers)
        self.models: list[Hosted] = []
        self.on_pause: Callable[[Any], None] | None = None
        # Called in a pause in which the workers make a call together with the servers, such as
        # `repartition`; the argument names the call.
        self.on_call: Callable[[Any], None] = lambda call: None
        self.in_pause = False  # whether `on_pause` runs
        self.in_own_pause = False  # whether the worker on this rank is in `pause`
        self.announced: list[int] = []  # workers' ranks that are already in `add` or `remove`
        self.queue: Counter[int] = Counter()
        self.load = ServerLoad()
        self.doors = ServerDoors(self)
        self.votes: Votes | None = None
        self.copies: ShardCopies | None = None
        self.norms = GlobalNorms(self)
        self._present = set(range(len(workers)))  # the workers that have not left
        self._paused: dict[int, Any] = {}
        self._barriers: Counter[int] = Counter()  # how many barriers each worker has entered
        self._look_at = 0.0  # when to look again for workers that wait for each other
        self._arriving = Arrivals()
        self._answers: deque[tuple[Hosted, int, Pull, int, int]] = deque()
        self._turn = 0
        link.trail.about, link.models = self._clocks, self.models

    def present(self) -> list[int]:
        """Return the ranks of the workers that have not left."""
        return [self.workers[worker] for worker in sorted(self._present)]

    @property
    def done(self) -> bool:
        """Whether every worker has left and every answer has been sent."""
        if self._present or self._answers or (self.votes is not None and self.votes.pending):
            return False
        if self.norms.pending:
            return False
        if self.copies is not None and self.copies.pending:
            return False
        return all(model.gate.settled and not model.due.pending for model in self.models)

    def poll(self) -> bool:
        """Receive requests, make updates and send answers; return whether anything was done."""
        start = time.perf_counter()
        acted = self.doors.listen() | self._begin_receives() | self._finish_receives()
        if self.copies is not None:
            self._answers += self.copies.listen()
            if not self._present:
                self.copies.end()
        if self.votes is not None:
            for number, actions in self.votes.listen():
                self._carry_out(self.models[number], actions)
        for number, actions in self.norms.listen():
            self._carry_out(self.models[number], actions)
            self._check_pause()
        if self.index:
            for number, decision in self.decisions.heard():
                self.run(self.models[number], self.models[number].gate.follow(decision))
                self._check_pause()
        for model in self.models:
            if model.due.in_pieces:
                if model.due:
                    acted |= self._carry_out(model, ())
                    self._check_pause()
                model.due.pulls.send_more()
        self.link.reap()
        while self._answers and self._bytes_to_send() < ROOM_BYTES:
            self.link.send(*self._next_answer(), TO_WORKER)
            acted = True
        if acted or self.link.moved:  # `moved`: a piece of an update has been made
            self.load.busy_seconds += time.perf_counter() - start
        if start >= self._look_at:
            self._look_at = start + _LOOK_SECONDS
            self._check_stalled()
        return acted

    # -- receiving ---------------------------------------------------------------------

    def _begin_receives(self) -> bool:
        comm, tag = self.link.comm, self.link.tag + TO_SERVER
        if not comm.Iprobe(MPI.ANY_SOURCE, tag):
            return False
        n, status = len(self.workers), MPI.Status()
        waiting = []
        for worker in (*range(self._turn, n), *range(self._turn)):
            # While a request is arriving, its worker sends no other request. A probe would find the
            # other pieces of this request.
            if worker not in self._arriving and comm.Iprobe(self.workers[worker], tag, status):
                waiting.append((worker, status.Get_count(MPI.BYTE)))
        room = ROOM_BYTES - self._arriving.nbytes
        before = len(self._arriving)
        for worker, nbytes in waiting:
            if self._arriving and nbytes > room:
                self._turn = worker  # receive from this worker first when there is room again
                break
            self._arriving[worker] = self.link.receive(self.workers[worker], TO_SERVER, nbytes)
            room -= nbytes
        else:
            self._turn = (self._turn + 1) % n
        if len(self._arriving) > before:
            self.queue[len(waiting)] += 1
        return len(self._arriving) > before

    def _finish_receives(self) -> bool:
        queue = len(self._arriving)
        if not queue:
            return False
        here = [worker for worker, incoming in self._arriving.items() if incoming.test()]
        for worker in here:
            self.link.touched = True  # an error after this point loses a worker's request
            incoming = self._arriving.pop(worker)
            self.link.received(incoming.header.total)
            header, number = incoming.header, incoming.header.model
            if header.push_words == protocol.PIECES and 0 <= number < len(self.models):
                self._arriving.collect(self.link, worker, incoming, self.models[number])
            elif not self._handle(worker, incoming.header, incoming.buffer, queue):
                self.link.pool.give(incoming.buffer)
        return bool(here)

    def _handle(self, worker: int, header: Header, buffer: np.ndarray, queue: int) -> bool:
        """Carry out the requests in a message; return whether its buffer is needed longer."""
        if header.flags & protocol.ADD and self.in_own_pause:
            # That worker has left the pause, before the worker on this rank.
            self.announced.append(self.workers[worker])
            return False
        if header.flags & protocol.ADD:
            raise ProtocolError(
                f"parameter server {self.index}: worker {worker} adds a model while this server "
                "serves; all ranks call add, in the same order, before a server serves"
            )
        kind, rank = protocol.SERVED[header.flags], self.workers[worker]
        if header.flags & (protocol.BYE | protocol.PAUSE | protocol.BARRIER):
            self.link.trail.begin(kind, rank, open=False)
            if header.flags & protocol.BARRIER:
                self._barriers[worker] += 1
                return False
            if header.flags & protocol.BYE:
                self._present.discard(worker)
            else:
                self._paused[worker] = json.loads(buffer[HEADER_BYTES : header.total].tobytes())
            self._check_pause()
            return False
        if not 0 <= header.model < len(self.models):
            raise ProtocolError(f"parameter server {self.index}: no model {header.model} here")
        model = self.models[header.model]
        operation = self.begin(header.flags, worker, header, model)
        if header.flags & protocol.DROP:
            drop_rows(self.link, model, rank, header)
            return False
        actions: list[Action] = []
        message = buffer[: header.total]
        if header.flags & protocol.CHANGE:
            model.changes.hear(worker, message[HEADER_BYTES:].tobytes(), self.workers)
            self.run(model, model.changes.due())
            return False
        push_parts, words_at = model.parts_of(message, HEADER_BYTES, header.push_words)
        pull_parts, data_at = model.parts_of(message, words_at, header.pull_words)
        self.load.count(header, model.whole, push_parts, pull_parts)
        streamed = header.push_words == protocol.STREAM
        if header.flags & protocol.PUSH:
            parts: Any
            if streamed or header.push_words == protocol.MEMORY:
                parts = model.push_elsewhere(self.link, worker, rank, header, message)
            elif push_parts is model.whole.parts:
                parts = model.whole.kept_views(message, data_at)
            else:
                parts = list(views(model.shard.layout, push_parts, message, data_at))
            # An empty push has no age, and its worker need not have pulled from this server.
            seen = model.pulled[worker] if streamed or push_parts else model.shard.version
            push = Push(buffer, parts, header.samples, seen)
            actions += model.gate.push(worker, push, bool(header.gap))
        if header.flags & protocol.CLOCK:
            if model.changes:
                model.changes.check_tick(worker, header.clock, self.workers)
            actions += model.gate.tick(worker)
        if header.flags & protocol.PULL:
            # A streamed push is answered by a header, and by each piece when it is updated.
            pieces = header.pull_words * (header.pull_words < protocol.ALL and not streamed)
            pull = Pull(pull_parts, time.monotonic_ns(), queue, operation, pieces)
            actions += model.gate.pull(worker, pull)
        if header.flags & protocol.LEAVE:
            left = model.gate.leave(worker)
            actions += [*model.changes.due(), *left]
        self.run(model, actions)
        return bool(header.flags & protocol.PUSH)

    def begin(self, flags: int, worker: int, header: Header, model: Hosted) -> list:
        """Check a message's model and step; return its record in `trail`, the log of operations."""
        if model.removed is not None:
            raise ProtocolError(
                f"parameter server {self.index}: worker {worker} uses model {model.name!r}; do not "
                "use a model's client after group.remove"
            )
        rank, kind, asks = self.workers[worker], protocol.SERVED[flags], bool(flags & protocol.PULL)
        operation = self.link.trail.begin(kind, rank, model.name, header.clock, open=asks)
        clock = model.gate.clocks[worker]
        if header.clock != clock:
            raise ProtocolError(
                f"parameter server {self.index}: worker {worker} is at clock {header.clock} of "
                f"{model.name!r}, expected {clock}"
            )
        if header.note1 and self.link.on_note is not None:
            self.link.on_note(rank, (header.note0, header.note1))
        return operation

    # -- updates and answers ---------------------------------------------------------------

    def run(self, model: Hosted, actions: Sequence[Action]) -> None:
        """Carry out `actions`, which the consistency mode of the model allows.

        If actions must also wait for messages of other servers, later polls carry them out.
        """
        # Only on the first server, in modes in which it decides for all servers which pushes count.
        if model.gate.decisions:
            self.decisions.tell(self.models.index(model), model.gate)
        if self.copies is not None:
            self.copies.forward(self.models.index(model), actions)
        if self.votes is not None and model.gate.consistency.holds:
            actions = self.votes.released(self.models.index(model), actions)
        if model.clip_norm is not None:
            actions = self.norms.released(self.models.index(model), actions)
        self._carry_out(model, actions)

    def settle(self, name: str, clocks: int) -> None:
        """After a death, apply the waiting updates of the first `clocks` steps; drop the rest."""
        number = [model.name for model in self.models].index(name)
        if self.votes is not None:
            self._carry_out(self.models[number], self.votes.settle(number, clocks))
        if self.copies is not None:
            self.copies.apply(number, clocks)
            self.copies.forget(number)

    def _carry_out(self, model: Hosted, actions: Sequence[Action]) -> bool:
        """Carry out the actions that need not wait any more; return whether there were any."""
        done = 0
        due = model.due.ready(actions, model.weighed) if model.due.in_pieces else actions
        for done, action in enumerate(due, 1):  # noqa: B007
            if isinstance(action, Drop):
                model.drop(action, self.workers)
                for _, push in action.pushes:
                    self.link.pool.give(push.buffer)
            elif isinstance(action, Apply):
                # In other modes, the update is part of the operation "serve push" in the log.
                if model.gate.mode_at(action.clock).holds:
                    self.link.trail.begin("apply", None, model.name, action.clock, False)
                model.apply(action, self.workers)
                if self.copies is not None:
                    self.copies.apply(self.models.index(model), action.clock + 1)
                for _, push in action.pushes:
                    self.link.pool.give(push.buffer)
            elif isinstance(action, Do):
                action.work()
            else:
                held = time.monotonic_ns() - action.item.since
                answer = (model, action.worker, action.item, action.gap, held)
                if action.item.box is not None:  # in shared memory, where the worker polls for it
                    self._write(*answer)
                elif self.copies is not None and self.copies.answered_later(model, answer):
                    pass
                elif action.item.pieces == protocol.STREAM:
                    # The worker copies this version of the parameters from now on, so the header
                    # of the answer is written for this version, too.
                    self._answers.appendleft(answer)
                    self.link.send(*self._next_answer(), TO_WORKER)
                else:
                    self._answers.append(answer)
        return bool(done)

    def _bytes_to_send(self) -> int:
        return self.link.bytes_in_flight + sum(model.due.pulls.left for model in self.models)

    def _write(self, model: Hosted, worker: int, pull: Pull, gap: int, held: int) -> None:
        """Write an answer into memory that the worker shares."""
        total = HEADER_BYTES + model.whole.nbytes
        self.load.bytes_out += total
        pull.box.write(*model.answer_fields(worker, pull, gap, held, total))
        pull.operation[OPEN] = False
        model.keep(worker, pull.parts)

    def _next_answer(self) -> tuple[np.ndarray, int, int]:
        """Write the next answer into a buffer; return the buffer, its size, and the receiver."""
        # The answer also contains updates made after the gate has allowed it. None of them is of
        # the receiver's current step in modes that hold pushes, because the receiver has not
        # finished it.
        model, worker, pull, gap, held = self._answers.popleft()
        shard = model.shard
        whole = pull.parts is model.whole.parts
        nbytes = model.whole.nbytes if whole else data_bytes(shard.layout, pull.parts)
        total = HEADER_BYTES + nbytes * (not pull.pieces)
        self.load.bytes_out += HEADER_BYTES + nbytes
        buffer = self.link.pool.take(total)
        protocol.write_header(buffer, *model.answer_fields(worker, pull, gap, held, total))
        if pull.pieces:
            model.due.send(self.link, self.workers[worker], pull.pieces)
        elif whole:
            for part, view in model.whole.kept_views(buffer, HEADER_BYTES):
                view[...] = shard.values(part)
        else:
            shard.read(pull.parts, buffer, HEADER_BYTES)
        model.keep(worker, model.whole.parts if pull.pieces else pull.parts)
        pull.operation[OPEN] = False
        return buffer, total, self.workers[worker]

    # -- workers that wait for each other --------------------------------------------------

    def _check_stalled(self) -> None:
        """Raise ProtocolError on all ranks if workers wait for each other in calls of the group."""
        # A waiting worker sends nothing. So what is known of it here holds until this server
        # answers, or until all workers have come to the barrier.
        models = [(model.name, model.gate) for model in self.models]
        text = who_waits(self.workers, self._present, self._paused, self._barriers, models)
        if text:
            raise ProtocolError(f"parameter server {self.index}: {text}")

    # -- pauses ------------------------------------------------------------------------

    def _check_pause(self) -> None:
        """Once all workers ask to pause (as for a checkpoint), answer them and call `on_pause`."""
        if not self._paused:
            return
        gone = sorted(set(range(len(self.workers))) - self._present)
        tags = list(self._paused.values())
        if gone or tags.count(tags[0]) != len(tags):
            why = f"workers {gone} have left the group" if gone else f"different tags {tags}"
            raise ProtocolError(f"parameter server {self.index}: pause: {why}")
        if len(tags) < len(self.workers) or any(model.due for model in self.models):
            return
        if self.norms.pending:
            return
        if self.index and any(model.gate.held and not model.gate.settled for model in self.models):
            return  # the first server's decision about these pushes is on its way
        if held := [model.name for model in self.models if model.gate.held]:
            raise ProtocolError(
                f"parameter server {self.index}: pause: workers are at different clocks of "
                f"{held}, or have pushed without clock(); let all call clock() before a pause"
            )
        call = self.on_call if isinstance(tags[0], dict) else self.on_pause
        if call is None:
            raise ProtocolError(
                f"parameter server {self.index}: the workers pause ({tags[0]!r}) but this server "
                "has no on_pause; call group.serve(on_pause=...) on server ranks"
            )
        self._paused = {}
        for rank in self.workers:
            self.link.tell(protocol.PAUSE, rank, TO_WORKER)
        self.in_pause, began = True, time.perf_counter()
        with self.link.doing("serve pause"):
            call(tags[0])
        self.in_pause = False
        # `poll` will add the time of the pause, which is no work of the server.
        self.load.busy_seconds -= time.perf_counter() - began

    def forget(self, name: str) -> None:
        """Free the memory of a removed model. No later model gets its number."""
        number = [model.name for model in self.models].index(name)
        # Messages name models by number, so a late message for this model raises an error.
        self.models[number].remove()
        self.doors.close(number)

    def _clocks(self) -> dict:
        """Return, for each model and worker rank, how many steps the worker has finished."""
        clocks = {m.name: dict(zip(self.workers, m.gate.clocks, strict=True)) for m in self.models}
        return {"clocks": clocks}

    def facts(self) -> dict:
        """Return the counts of updates, messages and waits of this server, for a report."""
        return {
            "rank": self.link.comm.rank,
            "server": self.index,
            "models": {model.name: model.facts() for model in self.models},
            "queue": dict(self.queue),
            "load": self.load.facts(),
            **self.link.counters.snapshot(),
        }
