"""The steps of the schedule "pipedream", which makes several updates in each step.

Each update uses one microbatch of each replica of a stage. At the end of a step, the backward pass
of some microbatches is still to come (`pipedream_order`). `drain` finishes these microbatches. If
the plan has a number `flush`, a step also finishes them each time `flush` microbatches have
entered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ...errors import ConfigError
from ..pipeline_schedules import StageAction, U
from .stage_pass import StagePass
from .versioned_chunk import VersionedChunk


class PipeDreamSteps:
    """The steps of a `Stage` with the schedule "pipedream". Collective over all ranks."""

    chunk = VersionedChunk

    def __init__(self, stage, gradients: Callable | None):
        self._stage = stage
        [chunk] = stage.chunks.values()
        # How many microbatches have entered so far, and how many when the pipeline was last empty.
        self._entered = self._empty_at = 0
        exchange = None
        if gradients is not None and stage.replicas.size > 1 and chunk.parameters:
            order = [name for layer in reversed(chunk.layers) for name in layer.shapes()]
            exchange = gradients(
                stage.replicas, chunk.parameters, algorithm="ordered", order=order
            )  # fmt: skip
            chunk.use_gradients(exchange.views)
        self._exchange = exchange
        self._pass = PipeDreamPass(stage, chunk, exchange)

    @staticmethod
    def check(grid, gradients: Callable | None) -> None:
        """Raise ConfigError if stages have several ranks, but `gradients` is None."""
        if gradients is None and max(grid.replicas) > 1:
            raise ConfigError(
                f"replicas={list(grid.replicas)} with 'pipedream' add gradients in each update: "
                "give md.Stage(..., gradients=md.Gradients)"
            )

    def check_update(self, update: Callable | None) -> None:
        """Raise ConfigError if the function `update`, which updates the parameters, is None."""
        if update is None:
            raise ConfigError(
                "update is None, and the schedule 'pipedream' needs a function "
                "update(gradients, parameters, weight)"
            )

    def step(self, inputs: dict, labels: dict, sizes, total: int, update) -> tuple[list, float]:
        """Do a step; return the times of its computations, and this rank's part of the mean loss.

        Collective. The sum of all ranks' parts is the mean loss.
        """
        grid, first = self._stage.grid, self._entered
        self._pass.enter(first, inputs, labels, sizes, total, update)
        stop = first + grid.padded
        while self._entered < stop:
            end = stop if grid.flush is None else min(stop, self._empty_at + grid.flush)
            self._do(end, drain=end - self._empty_at == grid.flush)
        # The last stage finishes all microbatches of the step, so the loss of the step is known.
        return self._pass.taken()

    def drain(self) -> list:
        """Finish all microbatches; return the times of the computations. Collective."""
        if self._empty_at == self._entered:
            return []
        self._do(self._entered, drain=True)
        return self._pass.taken()[0]

    def _do(self, stop: int, drain: bool) -> None:
        stage = self._stage
        for action in stage.grid.passes(stage.rank, self._empty_at, self._entered, stop, drain):
            self._pass.do(action)
        self._entered = stop
        if drain:
            self._empty_at = stop
            # This rank waits for its sends only after a drain. Without a drain, a receiver may
            # begin to receive only in the next step.
            stage.wait(stage.messages.progress, "the end of the sends")

    def close(self) -> None:
        """Free the object that exchanges gradients. Collective over the stage's ranks."""
        if self._exchange is not None:
            self._exchange.close()


class PipeDreamPass(StagePass):
    """The computations and messages of a rank with "pipedream", for all steps."""

    def __init__(self, stage, chunk: VersionedChunk, exchange):
        super().__init__(stage, {}, {}, {}, 1)
        self._chunk, self._exchange = chunk, exchange
        self.labels: dict = {}
        self._update: Callable
        self._weights: dict[int, float] = {}  # share of the global batch, by microbatch
        self._loss = 0.0
        self._round = stage.grid.replicas[stage.stage]

    def enter(self, first: int, inputs: dict, labels: dict, sizes, total: int, update) -> None:
        """Accept the microbatches of a step, which `do` will compute, send and receive."""
        padded = [*sizes, *[0] * (self.stage.grid.padded - len(sizes))]
        self.sizes.update(enumerate(padded, first))
        self._weights.update({first + i: size / total for i, size in enumerate(padded)})
        self.inputs.update({first + i: x for i, x in inputs.items()})
        self.labels |= {first + i: y for i, y in labels.items()}
        self._update = update

    def taken(self) -> tuple[list, float]:
        """Return (time spans, loss) of this rank's computations since the last call."""
        found = self.spans, self._loss
        self.spans, self._loss = [], 0.0
        return found

    def do(self, action: StageAction) -> None:
        """Do one action. Updates are collective over the replicas of the stage."""
        if action.kind == U:
            self._update_round(action.microbatch)
        else:
            super().do(action)

    def _skip(self, kind: str, chunk: int, i: int) -> None:
        pass  # the update of the round uses the gradients of the other microbatches only

    def _gradient_of_loss(self, i: int, loss: float, dy):
        if not math.isfinite(loss):
            dy[...] = 0  # the run stops after this step, and its parameters stay finite
        self._loss += loss * self._weights[i]
        return dy

    def _weight_of_round(self, i: int) -> float:
        first = i - i % self._round
        return sum(self._weights[each] for each in range(first, first + self._round))

    def _whole_backward(self, c: int, i: int, dy):
        if self._exchange is None:
            return self._chunk.backward(i, dy)
        self._exchange.begin(self._weights[i] / self._weight_of_round(i))
        return self._chunk.backward(i, dy, self._exchange.ready)

    def _add(self, c: int, i: int) -> None:
        pass  # the action U, which comes after the send of the input's gradient, adds and updates

    def _update_round(self, i: int) -> None:
        """Update the parameters with the gradients of microbatch `i` and of the other replicas."""
        weight, chunk = self._weight_of_round(i), self._chunk
        if weight:
            if self._exchange is not None:
                if not self.sizes[i]:
                    self._exchange.begin(0.0)
                    for view in self._exchange.views.values():
                        view[...] = 0
                self._exchange.reduce()
            began = time.perf_counter()
            chunk.before_update(i)
            self._update(chunk.gradients, chunk.parameters, weight)
            self.stage.note_stash()
            ended = time.perf_counter()
            self.stage.computing += ended - began
            if self.sizes[i]:  # the update counts as a part of the backward pass before it
                kind, c, k, begin, end = self.spans[-1]
                self.spans[-1] = (kind, c, k, begin, end + ended - began)
        first = i - i % self._round
        for each in range(first, first + self._round):
            del self.sizes[each], self._weights[each]
