"""One model on one server: the server's part of the model, the workers' steps, the updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import ProtocolError
from ..consistency import Apply, Consistency, Drop
from ..layout.placement import ServerLayout
from ..layout.routing import ShardPart, WholeShard, decode_parts
from ..model_facts import Request
from ..protocol import ALL, CLOCK, HEADER_BYTES, MEMORY, PIECES, PULL, PUSH, STREAM, Header
from ..rows.table_updates import TableUpdate, newest_values
from ..rows.unused_rows import table_facts
from ..shards import ServerShard
from ..wire.due_actions import DueActions
from ..wire.server_stream import PushStream
from ..wire.wire_pieces import PIECE_BYTES
from .agreed_changes import AgreedChanges
from .changing_gate import ChangingGate
from .push_record import PulledCopies, PushRecord
from .stale_gradients import beta_of, update_corrected


class Push(NamedTuple):
    """The gradients that one worker has sent for one step, and that are not applied yet."""

    # The memory of the message; None if the gradients are in memory shared with the worker.
    buffer: np.ndarray | None
    # The tensors or rows with their gradients, or the `PushStream` that receives them in pieces.
    parts: Any
    samples: int  # -1 if the worker gave no number
    seen: int  # the shard's version at the worker's newest pull


class Pull(NamedTuple):
    """A request of a worker for parameters that the server has not answered yet."""

    parts: Sequence[ShardPart]
    since: int  # when the pull arrived, in monotonic nanoseconds
    queue: int  # how many workers' messages waited when the server received the pull
    operation: list  # the record of the pull in `Link.trail`
    # PIECES: all parameters follow the header; STREAM: the worker copies them from shared memory
    pieces: int = 0
    box: Any = None  # the `MailBox` of the worker, if the answer is written there


class Hosted:
    """One model on one server: the server's part of the model, and the state of its workers.

    The state says which steps the workers have finished, and what happened to their gradients.
    """

    def __init__(
        self,
        asked: Request,
        shard: ServerShard,
        workers: int,
        copy: ServerShard | None = None,
        piece_bytes: int = PIECE_BYTES,
    ):
        self.name, self.shard = asked.name, shard
        self.copy = copy  # a copy of the shard of another server, see `replicas`, or None
        self.copied = [0] * workers  # for each worker, the clocks whose pushes the copy has
        self.merged: deque = deque()  # gradients of the next updates, which are already merged
        self.gate = asked.consistency.gate(workers, shard.server)
        self.use_layout(piece_bytes)
        self.global_batch: Any = asked.global_batch
        self.pulled = [shard.version] * workers  # the shard's version at each worker's newest pull
        self.applied = 0  # in modes that hold pushes: all clocks below this one are applied
        self.clip_norm = asked.clip_norm
        self.table = asked.optimizer if isinstance(asked.optimizer, TableUpdate) else None
        self.stale, self.record = asked.stale, PushRecord(asked.name, workers, shard.server)
        self._copies = PulledCopies(shard, workers) if asked.stale.compensates else None
        self.changes = AgreedChanges(self)
        self.removed: dict | None = None  # the counts of a model that was removed

    def use_layout(self, piece_bytes: int) -> None:
        """Compute again the attributes that depend on which tensors this server holds."""
        self.whole = WholeShard(self.shard.layout, self.shard.server)
        self.due = DueActions(self.shard, piece_bytes)

    def parts_of(self, message: np.ndarray, at: int, words: int) -> tuple[list[ShardPart], int]:
        """Return the tensors or rows that a message lists, and the byte at which the list ends."""
        # `words` is the number of int64 numbers of the list; if it is negative, all tensors of the
        # server.
        if words in (ALL, PIECES):
            return self.whole.parts, at
        if words == MEMORY:
            return self.whole.parts, at + 8 * len(self.whole.parts)
        if words == STREAM:
            return [], at
        stop = at + 8 * words
        shard = self.shard
        return decode_parts(message[at:stop].view(np.int64), shard.layout, shard.server), stop

    def push_elsewhere(
        self, link: Any, worker: int, rank: int, header: Header, message: np.ndarray
    ) -> PushStream:
        """Return the gradients of a push that does not carry them in its message.

        Either they follow the message in pieces, or the server reads them in the worker's memory.
        Raises ProtocolError if the consistency mode does not allow such a push.
        """
        mode, shared = self.gate.mode_at(header.clock), header.push_words == MEMORY
        if header.flags != PUSH | CLOCK | PULL or not (shared or mode.streams):
            raise ProtocolError(
                f"parameter server {self.shard.server}: worker {worker} sends {self.name!r} in "
                f"pieces, which {mode} does not allow here"
            )
        if not shared:
            return self.due.receive(link, rank)
        words = message[HEADER_BYTES : HEADER_BYTES + 8 * len(self.whole.parts)]
        return self.due.read(link, worker, rank, self.whole, words.view(np.int64).tolist())

    def use_shards(self, shard: ServerShard, copy: ServerShard | None, piece_bytes: int) -> None:
        """Replace this server's part of the model, when an elastic run divides its models anew."""
        # The age of a worker's newest pull stays. The copies of pulled values become the present
        # values.
        ages = [self.shard.version - seen for seen in self.pulled]
        self.shard, self.copy = shard, copy
        self.pulled = [shard.version - age for age in ages]
        self.use_layout(piece_bytes)
        if self._copies is not None:
            before, self._copies = self._copies.kept, PulledCopies(shard, len(self.pulled))
            for worker in (worker for worker, values in enumerate(before) if values):
                self._copies.keep(worker, self.whole.parts)

    def kept(self) -> list[dict[str, np.ndarray]]:
        """Return copies of the parameters that each worker has got last, for `DelayCompensated`."""
        return [] if self._copies is None else self._copies.kept

    def weight(self, push: Push) -> float:
        """Return by what an update from `push` alone multiplies the learning rate.

        The factor is not used in modes in which the gradients of all workers make one update.
        """
        if self.table is not None:
            return float(push.samples != 0)
        if self.global_batch is None:
            return 0.0 if push.samples == 0 else 1.0 / len(self.pulled)
        return push.samples / self.global_batch

    def apply(self, action: Apply, ranks: Sequence[int]) -> None:
        """Update the parameters with the gradients in `action`, and count how stale they were.

        A gradient is as stale as the number of updates since the worker pulled parameters for it.
        """
        version, self.shard.clock = self.shard.version, action.clock
        if (made := self.due.ended()) is not None:  # the update is made already, piece by piece
            version -= made.updates
        else:
            merged = self.merged.popleft() if self.merged else self.merge(action)
            if merged is not None and self.stale.corrects:
                ((_, push),) = action.pushes  # in these modes each push is an update
                beta = beta_of(self.shard.optimizer) or 0.0
                factors = self.stale.corrected(version - push.seen, beta)
                gradients, weight = merged
                update_corrected(self.shard, gradients, weight, factors)
            elif merged is not None:
                self.shard.update(*merged)
        self.applied = action.clock + 1
        for worker, push in action.pushes:
            age = version - push.seen
            factor = self.stale.factor(age, push.samples, self.global_batch)
            if factor:
                self.record.note(worker, age, factor)
            else:
                self.record.drop(worker, ranks[worker], f"{self.stale}, {age} updates old")

    def drop(self, action: Drop, ranks: Sequence[int]) -> None:
        """Count gradients that came too late for their step and are not applied."""
        for worker, _ in action.pushes:
            self.record.drop(worker, ranks[worker], f"late, {self.gate.consistency}")

    def answer_fields(self, worker: int, pull: Pull, gap: int, held: int, total: int) -> tuple:
        """Return the fields of the header of an answer to a request of `worker`."""
        # `gap` is in steps, `held` in nanoseconds, and `total` in bytes.
        record = self.record
        return (
            PULL, 0, self.gate.clocks[worker], total, 0, 0, -1, self.shard.version, gap, held,
            record.newest[worker], pull.queue, record.dropped[worker], 0,
        )  # fmt: skip

    def keep(self, worker: int, parts: Sequence[ShardPart]) -> None:
        """Record which version (number of updates) of the model `worker` gets now."""
        self.pulled[worker] = self.shard.version
        if self._copies is not None:
            self._copies.keep(worker, parts)

    def load(self, saved: Mapping) -> None:
        """Set this server's part of the model and its number of updates; see `ServerShard.load`."""
        self.shard.load(saved)
        # The ages of pushes start at 0 again.
        self.pulled = [self.shard.version] * len(self.pulled)

    def _check_samples(self, action: Apply) -> None:
        """Raise ProtocolError if some pushes of a clock have a number of samples, others not."""
        named = {worker: push.samples for worker, push in action.pushes if push.samples}
        if len({samples < 0 for samples in named.values()}) == 2:
            without = [worker for worker, samples in named.items() if samples < 0]
            raise ProtocolError(
                f"push to {self.name!r} in clock {action.clock}: workers {without} gave no "
                f"samples=, the others did; give samples= on all workers or on none"
            )

    def shares(self, action: Apply) -> list[tuple[float, Any]]:
        """Return pairs (weight, gradients) of all workers whose gradients are in `action`.

        An `action` is one update. The weight is the factor of the gradients in the mean.
        """
        if self.table is not None:
            return [(float(push.samples != 0), push.parts) for _, push in action.pushes]
        if len(action.pushes) == 1:  # faster than the code below, which takes 2 us
            ((_, push),) = action.pushes
            return [(1.0 if push.samples else 0.0, push.parts)]
        self._check_samples(action)
        counted = [(1 if p.samples < 0 else p.samples, p.parts) for _, p in action.pushes]
        total = sum(samples for samples, _ in counted) or 1
        return [(samples / total, parts) for samples, parts in counted]

    def weighed(self, action: Apply) -> tuple[list[tuple[float, Any]], float]:
        """Return the gradients of the update `action`, and its factor of the learning rate.

        The gradients are a list of pairs (weight in the mean, gradients of one worker).
        """
        if self.gate.mode_at(action.clock).merges:
            return self.shares(action), 1.0
        ((_, push),) = action.pushes
        factor = self.stale.factor(self.shard.version - push.seen, push.samples, self.global_batch)
        return [(1.0, push.parts)], self.weight(push) * factor

    def merge(self, action: Apply) -> tuple[dict, float] | None:
        """Return the mean gradients of the update `action`, and a factor for its learning rate.

        The result is None if there is nothing to update.
        """
        if self.table is not None and self.table.assigns:
            return newest_values(self.shard, self.shares(action))
        if self.gate.mode_at(action.clock).merges:
            return self.shard.merge(self.shares(action))
        ((worker, push),) = action.pushes
        age = self.shard.version - push.seen
        factor = self.stale.factor(age, push.samples, self.global_batch)
        if factor and self._copies is not None:
            self._copies.correct(worker, push.parts, self.stale)
        return self.shard.merge([(1.0, push.parts)], self.weight(push) * factor)

    def change_mode(self, mode: Consistency, clock: int) -> None:
        """Use the consistency mode `mode` from the step `clock` on."""
        if not isinstance(self.gate, ChangingGate):
            self.gate = ChangingGate(self.gate, self.shard.server)
        self.gate.change(mode, clock)

    def remove(self) -> None:
        """Free the model's memory on this server, but keep its counts for the report."""
        self.removed = self.facts()
        # A new model may have the same name.
        self.name = f"{self.name} (removed)"
        layout = ServerLayout((), ((),) * len(self.shard.layout.pieces), self.shard.layout.shares)
        self.shard = ServerShard(layout, self.shard.server, self.shard.optimizer, {}, 0)
        self.due = DueActions(self.shard, PIECE_BYTES)
        self._copies = None
        self.merged.clear()

    def facts(self) -> dict:
        """Return this model's counts for the report, such as updates and steps of each worker."""
        if self.removed is not None:
            return self.removed
        return {
            "updates": self.shard.version,
            "clocks": self.gate.clocks,
            "gaps": dict(self.gate.gaps),
            **self.record.facts(),
            **({"tables": tables} if (tables := table_facts(self.shard)) else {}),
        }
