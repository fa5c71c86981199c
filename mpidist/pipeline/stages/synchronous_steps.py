"""The steps of all schedules but "pipedream": the parameters do not change during a step."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ConfigError
from ..pipeline_schedules import B, W
from .stage_chunk import Chunk
from .stage_pass import StagePass
from .sum_parts import SumQueue


class SynchronousSteps:
    """The steps of a `Stage` with any schedule but "pipedream". Collective over all ranks."""

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
        """Do a step; return the times of its computations, and this rank's part of the mean loss.

        Collective. The sum of all ranks' parts is the mean loss.
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
        """Return an empty list, because each step finishes its microbatches."""
        return []

    def close(self) -> None:
        """Free the memory in which gradients are summed. Collective over the replicas."""
        for chunk in self._stage.chunks.values():
            chunk.close()
