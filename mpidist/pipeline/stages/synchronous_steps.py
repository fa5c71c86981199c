"""The steps of all schedules but "pipedream", with one sum over a step's microbatches.

The parameters do not change during a step. `PieceSum` adds the gradients over the replicas of a
stage, so the sum has the same bits as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ConfigError
from ..pipeline_schedules import B, W
from .stage_chunk import Chunk
from .stage_pass import StagePass
from .sum_parts import SumQueue


class SynchronousSteps:
    """The steps of a `Stage` with one of the synchronous schedules. Collective."""

    chunk = Chunk

    def __init__(self, stage, gradients: Callable | None):
        self._stage, grid = stage, stage.grid
        self._actions = grid.actions(stage.rank)
        order = [one.microbatch for one in self._actions if one.kind in (B, W)]
        for chunk in stage.chunks.values():
            chunk.open_sums(stage.replicas, grid.microbatches, in_order=order == sorted(order))
        # The last chunk is the first to finish its backward passes.
        chunks = reversed(sorted(stage.chunks))
        self._queue = SumQueue([part for c in chunks for part in stage.chunks[c].parts])
        self._last = {one.chunk: one.microbatch for one in self._actions if one.kind in (B, W)}

    def check_update(self, update: Callable | None) -> None:
        """Raise ConfigError unless `update` is None: no update is made during a step."""
        if update is not None:
            raise ConfigError(
                f"update is {type(update).__name__}, and the schedule "
                f"{self._stage.grid.schedule!r} takes none: only 'pipedream' updates during a step"
            )

    def step(self, inputs: dict, labels: dict, sizes, total: int, update) -> tuple[list, float]:
        """Do a step; return the times of its computations, and this rank's share of the mean loss.

        Collective. `inputs` and `labels` have the arrays of each of this rank's microbatches; the
        other arguments are those of `Stage.run`. The sum of all ranks' shares is the mean loss.
        """
        stage = self._stage
        one_pass = StagePass(stage, sizes, inputs, labels, total)
        one_pass.last, one_pass.queue = self._last, self._queue
        for action in self._actions:
            one_pass.do(action)
        # Finish the sums before the sends, because the receiver of a send may still be computing.
        self._queue.finish()
        stage.wait(stage.messages.progress, "the end of the sends")
        # All replicas of the last stage have the loss of the whole batch; one of them returns it.
        loss = 0.0
        if stage.reads_labels and stage.replica == 0:
            loss = stage.chunks[stage.last_chunk].loss
        return one_pass.spans, loss

    def drain(self) -> list:
        """Return an empty list: between two steps, no microbatch is under way."""
        return []

    def close(self) -> None:
        """Free the memory of the sums.

        Collective over the replicas of the stage; no messages are sent.
        """
        for chunk in self._stage.chunks.values():
            chunk.close()
