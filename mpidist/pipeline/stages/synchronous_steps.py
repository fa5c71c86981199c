"""Steps whose gradients are summed over the microbatches; the parameters do not change meanwhile.

The sum is that of `PieceSum` over the replicas of a stage, so it has the bits of one rank.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ConfigError
from ..pipeline_schedules import B, W
from .stage_chunk import Chunk
from .stage_pass import StagePass


class SynchronousSteps:
    """The steps of a `Stage` with one of the synchronous schedules. Collective."""

    chunk = Chunk

    def __init__(self, stage, gradients: Callable | None):
        self._stage, grid = stage, stage.grid
        self._actions = grid.actions(stage.rank)
        order = [one.microbatch for one in self._actions if one.kind in (B, W)]
        for chunk in stage.chunks.values():
            chunk.open_sums(stage.replicas, grid.microbatches, in_order=order == sorted(order))

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
        for action in self._actions:
            one_pass.do(action)
        stage.wait(stage.messages.progress, "the end of the sends")
        losses = {number: chunk.finish() for number, chunk in stage.chunks.items()}
        # All replicas of the last stage know the whole loss.
        loss = losses.get(stage.last_chunk, 0.0) if stage.replica == 0 else 0.0
        return one_pass.spans, loss

    def drain(self) -> list:
        """Return no spans: nothing is on its way between two steps."""
        return []

    def close(self) -> None:
        """Free the sums. Collective over the replicas of the stage, but without a message."""
        for chunk in self._stage.chunks.values():
            chunk.close()
