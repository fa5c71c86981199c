"""Steps whose gradients are summed over the microbatches; the parameters do not change meanwhile.

The sum is that of `PieceSum` over the replicas of a stage, so it has the bits of one rank.
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
        # The last chunk has its last backward pass first.
        chunks = reversed(sorted(stage.chunks))
        self._queue = SumQueue([part for c in chunks for part in stage.chunks[c].parts])
        self._last = {one.chunk: one.microbatch for one in self._actions if one.kind in (B, W)}

    def check_update(self, update: Callable | None) -> None:
        """Raise ConfigError unless `update` is None."""
        if update is not None:
            raise ConfigError(
                f"update is {type(update).__name__}, and the schedule "
                f"{self._stage.grid.schedule!r} takes none: only 'pipedream' updates in a step"
            )

    def step(self, inputs: dict, labels: dict, sizes, total: int, update) -> tuple[list, float]:
        """Do a step; return its spans, and this rank's share of the mean loss. Collective."""
        stage = self._stage
        one_pass = StagePass(stage, sizes, inputs, labels, total)
        one_pass.last, one_pass.queue = self._last, self._queue
        for action in self._actions:
            one_pass.do(action)
        # The sums come first, for the receiver of a send may be at its last backward passes.
        self._queue.finish()
        stage.wait(stage.messages.progress, "the end of the sends")
        # All replicas of the last stage know the whole loss.
        loss = 0.0
        if stage.reads_labels and stage.replica == 0:
            loss = stage.chunks[stage.last_chunk].loss
        return one_pass.spans, loss

    def drain(self) -> list:
        """Return no spans: nothing is on its way between two steps."""
        return []

    def close(self) -> None:
        """Free the sums. Collective over the replicas of the stage, but without a message."""
        for chunk in self._stage.chunks.values():
            chunk.close()
