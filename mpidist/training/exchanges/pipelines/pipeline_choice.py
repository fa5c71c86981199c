"""Choose where `Pipeline` cuts the model before a run; compute the times of a run's stages.

With ``cuts="auto"``, a new run measures the time and the bytes of each layer (its profile). A
resumed run reads the cuts, the profile and the measured times of the last run from its checkpoint,
and decides whether to keep the cuts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .... import events
from ....checkpoint.load import saved_extras
from ....pipeline import ChunkCost, PipelineGrid, measure
from ....pipeline.grid.recut import CutChoice, best_cuts, choose_again, explain_cuts, profile_rows
from ....pipeline.measure_layers import random_batch
from ....pipeline.pipeline_schedules import B, F, I, U, W
from ....pipeline.simulate_actions import NO_TIME, simulate_placed
from ....pipeline.stage_contract import checked_arrays
from ....runtime.agreement.run_on_all import run_on_all
from ....runtime.polling import phase

#: At the end of a run, a schedule is simulated only if actions times ranks are at most this number.
_MOST_SIMULATED = 500_000
#: The entry of a checkpoint with the cuts and times of a run.
ENTRY = "pipeline"


#: The entries about `split` in the checkpoint of a run without `split`. Older checkpoints have no
#: such entries.
_WHOLE: dict[str, Any] = {"split": {}, "split_ranks": 1}


def shared_layers(split: Mapping[str, str], ways: int) -> dict[str, Any]:
    """Return what a checkpoint says about layers that several ranks share: a dict for JSON."""
    return {"split": dict(split), "split_ranks": ways if split else 1}


def last_run(
    comm, store, resume: bool | str, split: Mapping[str, str], ways: int
) -> dict | None:  # fmt: skip
    """Return what the last run's checkpoint says about its pipeline, or None. Collective.

    The result says where the model was cut into stages, and has the measured times of layers and
    stages. It is None if there is no such checkpoint, or if the last run had another `split`.
    """
    path = getattr(store, "path", None)
    reads = comm.rank == 0 and path is not None and resume not in (False, "fresh")

    def local() -> dict | None:
        found = saved_extras(path).get(ENTRY) if reads else None
        same = found and shared_layers(split, ways).items() <= {**_WHOLE, **found}.items()
        return found if same else None

    return run_on_all(comm, "md.train: last cuts", local, lambda everyone: everyone[0])


def choose_cuts(
    comm, model, parts: int, samples: int, last: Mapping[str, Any] | None, measuring: int = 1
) -> CutChoice:
    """Choose the layers at which a model is cut into `parts` parts. Collective.

    `last` is the result of `last_run`. If it has no suitable profile (times and bytes of each
    layer), the ranks 0 to `measuring` - 1 measure such a profile together.
    """
    known = choose_again(last, len(model.layers), parts, samples) if last and parts > 1 else None
    if known and comm.rank == 0 and events.VERBOSITY:
        print(f"mpidist: {explain_cuts(known)}", file=sys.stderr, flush=True)

    def local() -> CutChoice | None:
        if comm.rank >= measuring or known or parts == 1:
            return known or CutChoice([], "measured")
        if "parameters" in vars(model):
            checked_arrays(model, model.layers)
        rows = profile_rows(measure(model, random_batch(model, samples)))
        return CutChoice(best_cuts(rows, parts), "measured", layers=rows, samples=samples)

    with phase("plan"):
        choice = run_on_all(comm, "md.train: cuts", local, lambda everyone: everyone[0])
    events.emit("cuts", cuts=choice.cuts, origin=choice.origin, before=choice.before)
    return choice


def mean_time(grid: PipelineGrid, times: Sequence[Mapping], chunk: int, kinds: str) -> float | None:
    """Return the mean seconds of a microbatch's computations in a chunk; None if there were none.

    A chunk is a group of consecutive layers, and `kinds` has letters such as F for a forward pass.
    """
    stage = grid.ranks_of(chunk % grid.stages)
    known = [times[rank] for rank in stage if (chunk, kinds[0]) in times[rank]]
    if not known:
        return None
    return sum(one.get((chunk, kind), 0.0) for one in known for kind in kinds) / len(known)


def chunk_seconds(grid: PipelineGrid, times: Sequence[Mapping]) -> list[float | None]:
    """Return the mean seconds of a microbatch, forward and backward, in each group of layers."""
    return [mean_time(grid, times, c, F + B + I + W) for c in range(grid.stages * grid.chunks)]


def simulated_bubble(grid: PipelineGrid, times: Sequence[Mapping], steps: int) -> float | None:
    """Simulate a pipeline with the measured times; return in which fraction of time ranks are idle.

    Returns None if nothing was computed, or if the simulation would take seconds.
    """
    lists = [grid.actions(rank) for rank in range(grid.ranks)]
    if grid.in_rounds and grid.flush is None:
        stop = min(max(steps, 1), 4) * grid.padded
        lists = [grid.passes(rank, 0, 0, stop, True) for rank in range(grid.ranks)]
    if sum(map(len, lists)) * grid.ranks > _MOST_SIMULATED or not any(times):
        return None
    lists = [[one for one in each if one.kind != U] for each in lists]
    costs = []
    for chunk in range(grid.stages * grid.chunks):
        forward, *halves, whole = (mean_time(grid, times, chunk, kind) or 0.0 for kind in "FIWB")
        backward = sum(halves) or whole
        share = halves[0] / backward if sum(halves) else 0.5
        costs.append(ChunkCost(forward, backward, 0.0, share))
    return round(simulate_placed(lists, costs, NO_TIME, grid.holder).bubble, 4)
