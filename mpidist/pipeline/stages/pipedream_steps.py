"""The steps of the schedule "pipedream", which makes an update for each round.

A round is one microbatch of each replica of a stage. At the end of a step, some microbatches are
still under way: some ranks have done their forward pass, but not all ranks their backward pass
(`pipedream_order`). `drain` finishes these microbatches, and so does a step after each `flush`
microbatches. The replicas of a stage add the gradients of a round with an object of the class
`Gradients`. The caller passes this class as an argument, because `pipeline/` must not depend on how
gradients are exchanged.
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
    """The steps of a `Stage` with the schedule "pipedream". Collective."""

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
        """Raise ConfigError if stages have several ranks, but nothing to add their gradients.

        `gradients` is a class such as `md.Gradients`, which adds them, or None.
        """
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
        """Do a step; return the times of its computations, and this rank's share of the mean loss.

        Collective. `inputs` and `labels` have the arrays of each of this rank's microbatches; the
        other arguments are those of `Stage.run`. The sum of all ranks' shares is the mean loss of
        the microbatches.
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
        """Finish all microbatches under way; return the times of the computations. Collective."""
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
        """Free the object that exchanges gradients.

        Collective over the stage's ranks; sends no message.
        """
        if self._exchange is not None:
            self._exchange.close()


class PipeDreamPass(StagePass):
    """The actions of a rank with "pipedream", on the microbatches of all steps."""

    def __init__(self, stage, chunk: VersionedChunk, exchange):
        super().__init__(stage, {}, {}, {}, 1)
        self._chunk, self._exchange = chunk, exchange
        self.labels: dict = {}
        self._update: Callable
        self._weights: dict[int, float] = {}  # share of the global batch, by microbatch
        self._loss = 0.0
        self._round = stage.grid.replicas[stage.stage]

    def enter(self, first: int, inputs: dict, labels: dict, sizes, total: int, update) -> None:
        """Accept the microbatches of a step, whose actions `do` will carry out.

        `first` is the number of the first of these microbatches, counted from the beginning of the
        run. The other arguments are those of `Stage.run`.
        """
        padded = [*sizes, *[0] * (self.stage.grid.padded - len(sizes))]
        self.sizes.update(enumerate(padded, first))
        self._weights.update({first + i: size / total for i, size in enumerate(padded)})
        self.inputs.update({first + i: x for i, x in inputs.items()})
        self.labels |= {first + i: y for i, y in labels.items()}
        self._update = update

    def taken(self) -> tuple[list, float]:
        """Return what this rank has computed since the last call: (spans, loss).

        `spans` has (kind, chunk, microbatch, begin, end) of each of its computations, with times in
        seconds; a chunk is a group of consecutive layers. The loss is this rank's share of the mean
        loss: the sum over all ranks is the mean loss.
        """
        found = self.spans, self._loss
        self.spans, self._loss = [], 0.0
        return found

    def do(self, action: StageAction) -> None:
        """Do one action. Updates are collective over the replicas of the stage.

        Nothing is computed for a microbatch without samples.
        """
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
        """Update the parameters with the gradients of the round in which microbatch `i` is."""
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
