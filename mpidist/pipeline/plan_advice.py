"""Compare a step of a pipeline with a step of allreduce on N workers.

A step has M microbatches. C is the time of the whole model for one microbatch, W is the number of
bytes of the model's parameters, and B is the bandwidth. Estimated times of a step:

    allreduce   ceil(M / N) C + 2 (N - 1) / N W / B
    pipeline    the simulated schedule, then the sums over the replicas of the slowest stage

In both estimates the gradients are summed after all computations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..registry import checked_whole
from ..simulator.network_model import NetworkModel
from .layer_profile import LayerProfile
from .pipeline_schedules import B
from .simulate_actions import ChunkCost, simulate_placed
from .stage_partition import NoPartition, PipelinePlan, cut
from .stage_plan import UNEVEN, plan_stages

#: Steps whose times differ by less than this fraction count as equal, because times are estimates.
_EQUAL = 0.02


@dataclasses.dataclass(frozen=True)
class StepAdvice:
    """The estimated times of a step of a pipeline and of allreduce, for the same microbatches.

    Attributes
    ----------
    winner : "pipeline", "allreduce" or "equal"
        Which of the two has the shorter step.
    reason : str
        Why the winner is faster, in words.
    microbatches : int
        The number of microbatches of a step.
    pipeline_seconds, allreduce_seconds : float
        The time of a step. The time of allreduce is infinity if the whole model does not fit into
        the memory of a worker.
    replicas : tuple of int
        The number of workers of each stage of the pipeline.
    idle : float
        The fraction of a pipeline step, without its sums of gradients, for which a worker is idle
        on average.
    sums_seconds : float
        The time by which the sums of gradients make the pipeline's step longer.
    """

    winner: str
    reason: str
    microbatches: int
    pipeline_seconds: float
    allreduce_seconds: float
    replicas: tuple[int, ...]
    idle: float
    sums_seconds: float

    def as_dict(self) -> dict:
        """Return a dict for JSON, with None instead of infinity."""
        fits = self.allreduce_seconds < math.inf
        found = dataclasses.asdict(self)
        return {**found, "allreduce_seconds": self.allreduce_seconds if fits else None}


def advise_step(
    profile: LayerProfile,
    plan: PipelinePlan,
    *,
    workers: int,
    microbatches: int,
    settings: Mapping[str, Any],
) -> StepAdvice | None:
    """Estimate whether a step is faster with the pipeline `plan`, or with allreduce on all workers.

    If the plan (from `cut`) has one stage, the best plan with two stages is used instead. Returns
    None if the model has no such plan.
    """
    checked_whole("microbatches", microbatches, 1)
    if len(plan.stages) == 1:
        try:
            plan = cut(profile, workers=workers, **{**settings, "stages": 2})
        except (NoPartition, ConfigError):  # one layer, one worker, or the profile names the stages
            return None
    bandwidth, memory = settings["bandwidth"], settings.get("memory")
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    kept = parameters + sum(layer.output_bytes for layer in profile.layers)
    sums = 2 * (workers - 1) / workers * parameters / bandwidth
    computing = -(-microbatches // workers) * profile.seconds
    alone = computing + sums
    if memory is not None and kept > memory:
        alone = math.inf
    seconds, idle, own_sums = _pipeline_step(profile, plan, microbatches, bandwidth)
    replicas = tuple(stage.replicas for stage in plan.stages)
    pipe_bytes = sum(stage.output_bytes for stage in plan.stages)
    if alone == math.inf:
        winner = "pipeline"
        reason = f"the whole model needs {kept / 1e6:.2f} MB, and a worker has less memory"
    elif abs(seconds - alone) <= _EQUAL * min(seconds, alone):
        winner, reason = "equal", "prefer allreduce, which needs no cuts"
    elif seconds < alone:
        winner = "pipeline"
        reason = (
            f"allreduce sums {parameters / 1e6:.2f} MB of gradients on each worker in "
            f"{sums * 1e3:.3f} ms; the pipeline's sums take {own_sums * 1e3:.3f} ms, and "
            f"{2 * microbatches * pipe_bytes / 1e6:.2f} MB cross its cuts"
        )
    else:
        winner = "allreduce"
        reason = (
            f"the pipeline's workers are idle {idle:.1%} of the time, while the pipeline fills and "
            f"empties and because stages differ; allreduce's sum takes only {sums * 1e3:.3f} ms"
        )
    return StepAdvice(winner, reason, microbatches, seconds, alone, replicas, idle, own_sums)


def _pipeline_step(
    profile: LayerProfile, plan: PipelinePlan, microbatches: int, bandwidth: float
) -> tuple[float, float, float]:
    """Return the time of a step, the idle fraction of the schedule, and the time of the sums."""
    layers = {layer.name: layer for layer in profile.layers}
    costs = []
    for stage in plan.stages:
        inside = [layers[name] for name in stage.nodes]
        forward = sum(layer.forward for layer in inside)
        backward = sum(layer.backward for layer in inside)
        costs.append(ChunkCost(forward, backward, stage.output_bytes))
    replicas = [stage.replicas for stage in plan.stages]
    grid = plan_stages(
        len(costs), cuts=range(1, len(costs)), ranks=sum(replicas), replicas=replicas,
        microbatches=microbatches, schedule=UNEVEN[1],
    )  # fmt: skip
    lists = [grid.actions(rank) for rank in range(grid.ranks)]
    network = NetworkModel(latency=0.0, gap=1 / bandwidth)
    run = simulate_placed(lists, costs, network, grid.holder)
    ends = [0.0] * len(costs)
    for span in run.spans:
        if span.action.kind == B:
            number, _ = grid.place(span.rank)
            ends[number] = max(ends[number], span.end)
    whole = max(
        end + 2 * (r - 1) / r * stage.parameter_bytes / bandwidth
        for end, r, stage in zip(ends, replicas, plan.stages, strict=True)
    )
    return max(whole, run.seconds), run.bubble, max(0.0, whole - run.seconds)
