"""Decide whether a resumed run cuts its model into other stages than the last run. Without MPI.

The last run has measured the time of each stage. If these times do not suit the plan, the model is
cut anew:

    layers     ms 4 4 4 | 4 4 4     the plan: stages of 12 and 12 ms
    measured   ms 12    | 24        ratios 1.0 and 2.0: one is 100 % above the other
    corrected  ms 4 4 4 | 8 8 8     the times of the layers, multiplied by the ratio of their stage
    new cuts      4 4 4 8 | 8 8     20 and 16 ms

A run measures whole stages, not single layers, so the times of all layers of a stage are multiplied
by the same ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from ..layer_profile import Layer, LayerProfile, chain
from ..stage_partition import cut

#: The cuts are kept if no stage's ratio of measured to planned time is more than this fraction
#: above another stage's ratio.
MOST_OFF = 0.2


class CutChoice(NamedTuple):
    """Where a model is cut into the stages of a pipeline, and why there.

    Attributes
    ----------
    cuts : list of int
        For each cut, the number of layers before it.
    origin : str
        "given" (by the user), "measured" (by rank 0 before the run), "kept" (from the last run), or
        "changed" (computed anew at the resume).
    before : list of int or None
        The cuts of the last run, if this run has computed new cuts; otherwise None.
    off : float or None
        For each stage there is a ratio of its measured time to its planned time. `off` says by
        which fraction the largest ratio is above the smallest; 0.2 is 20 %.
    layers : list of (forward, backward, output bytes, parameter bytes)
        The profile from which the cuts were chosen: a row for each layer. It is empty if the user
        gave the cuts.
    samples : int
        The number of samples of the microbatch with which the profile was measured.
    """

    cuts: list[int]
    origin: str = "given"
    before: list[int] | None = None
    off: float | None = None
    layers: Sequence[Sequence[float]] = ()
    samples: int = 0


def profile_rows(profile: LayerProfile) -> list[list[float]]:
    """Return a list (forward, backward, output bytes, parameter bytes) for each layer of a profile.

    Times are in seconds.
    """
    return [
        [one.forward, one.backward, one.output_bytes, one.parameter_bytes]
        for one in profile.layers
    ]  # fmt: skip


def best_cuts(rows: Sequence[Sequence[float]], parts: int) -> list[int]:
    """Return those cuts into `parts` parts with which the slowest part takes the least time."""
    profile = chain([
        Layer(f"layer{k}", "layer", forward, backward, output, parameters)
        for k, (forward, backward, output, parameters) in enumerate(rows)
    ])  # fmt: skip
    plan = cut(profile, workers=parts, stages=parts, replication=False)
    return list(accumulate(len(stage.nodes) for stage in plan.stages))[:-1]


def stage_ratios(
    rows: Sequence[Sequence[float]], cuts: Sequence[int], seconds: Sequence[float | None]
) -> list[float | None]:
    """Return, for each part of a cut model, its measured time divided by its planned time.

    `rows` has the times of the single layers. The planned time of a part is the sum of the times of
    its layers.

    A ratio is None if one of its two times is not known.
    """
    found = []
    for (start, stop), measured in zip(pairwise([0, *cuts, len(rows)]), seconds, strict=True):
        planned = sum(row[0] + row[1] for row in rows[start:stop])
        found.append(measured / planned if planned > 0 and measured else None)
    return found


def choose_again(last: Mapping[str, Any], layers: int, parts: int, samples: int):
    """Return the `CutChoice` for a resumed run, from the measured times of the last run.

    Returns None if the last run has no profile for this model and this size of microbatches.

    Parameters
    ----------
    last : mapping
        The entry of the checkpoint: `cuts`, `layers` and `samples` of the last run's `CutChoice`,
        and `seconds`, the measured time of a microbatch in each part.
    layers, parts, samples : int
        For this run: the number of layers of the model, of parts into which the model is cut, and
        of samples of a microbatch.
    """
    rows, cuts = last.get("layers") or [], list(last.get("cuts", ()))
    if len(rows) != layers or last.get("samples") != samples:
        return None
    found = stage_ratios(rows, cuts, last["seconds"])
    known = [ratio for ratio in found if ratio is not None]
    off = max(known) / min(known) - 1 if known else 0.0
    same = len(cuts) == parts - 1
    if same and off <= MOST_OFF:
        return CutChoice(cuts, "kept", None, off, rows, samples)
    if off > MOST_OFF:
        # Only the ratios to each other count, so all are divided by the median ratio.
        usual = sorted(known)[len(known) // 2]
        bounds = [0, *cuts, layers]
        rows = [
            [row[0] * by, row[1] * by, *row[2:]]
            for (start, stop), ratio in zip(pairwise(bounds), found, strict=True)
            for row in rows[start:stop]
            for by in [1.0 if ratio is None else ratio / usual]
        ]
    new = best_cuts(rows, parts)
    return CutChoice(new, "kept" if new == cuts else "changed", cuts, off, rows, samples)


def explain_cuts(choice: CutChoice) -> str:
    """Return the line that a resumed run prints about where it cuts the model, and why."""
    off = f"the stages' measured times are {choice.off:.0%} off the plan"
    if choice.origin == "kept" and choice.before is None:
        return f"pipeline: cuts {choice.cuts} stay: {off}, and up to {MOST_OFF:.0%} is tolerated"
    if choice.origin == "kept":
        return f"pipeline: cuts {choice.cuts} stay: {off}, and no other cuts are better"
    why = "another number of parts" if len(choice.before or ()) != len(choice.cuts) else off
    return f"pipeline: cuts {choice.cuts} instead of {choice.before}: {why}"
