"""The schedule "pipedream": a rank's microbatches, and when it updates its parameters.

A stage has r replicas (ranks with the same layers), and microbatch i belongs to replica i mod r. A
rank repeats three actions: F, the forward pass of its newest microbatch; B, the backward pass of an
older microbatch; and U, the update, for which the replicas of the stage add their gradients. For
example:

    2 replicas, then 1     rank 0   F0 F2 B0 U0 F4 B2 U2 ...        stage 0, depth 1
    of the next stage      rank 1   F1 F3 B1 U1 F5 B3 U3 ...
                           rank 2   F0 B0 U0 F1 B1 U1 F2 B2 U2 ...  stage 1, depth 0

The *depth* of a stage is the largest number of updates between the forward and the backward pass of
a microbatch. It is ceil(R / r) - 1, where R is the number of ranks from this stage to the last.
Both passes of a microbatch use the same parameters.

Reference: Narayanan et al., "PipeDream", SOSP 2019, section 3 (1F1B-RR).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

from ..pipeline_schedules import AHEAD, B, F, StageAction, U, with_messages


def rounds_behind(replicas: Sequence[int], stage: int) -> int:
    """Return the depth of a stage.

    The depth is the number of later microbatches whose forward passes a rank of the stage does
    before the backward pass of a microbatch.
    """
    return -(-sum(replicas[stage:]) // replicas[stage]) - 1


def whole_rounds(microbatches: int, replicas: Sequence[int]) -> int:
    """Return `microbatches`, rounded up to a multiple of each number in `replicas`."""
    each = lcm(*replicas)
    return -(-microbatches // each) * each


def passes(
    replicas: Sequence[int], stage: int, replica: int, empty_at: int, start: int, stop: int,
    drain: bool,
) -> list[StageAction]:  # fmt: skip
    """Return a part of a rank's computations and messages.

    In this part, the microbatches `start` to `stop` - 1 enter the pipeline.

    Parameters
    ----------
    empty_at : int
        The first microbatch since the pipeline was last empty. `empty_at`, `start` and `stop` are
        multiples of each number in `replicas`, see `whole_rounds`.
    drain : bool
        Whether the rank also finishes all its microbatches, so that the pipeline is empty again.
    """
    r, behind = replicas[stage], rounds_behind(replicas, stage)
    mine = range(empty_at + replica, stop, r)
    first = (start - empty_at) // r

    def back(round_: int) -> Iterator[StageAction]:
        yield StageAction(B, stage, mine[round_])
        yield StageAction(U, stage, mine[round_])

    order = []
    for k in range(first, len(mine)):
        order.append(StageAction(F, stage, mine[k]))
        if k >= behind:
            order += back(k - behind)
    for k in range(max(len(mine) - behind, 0), len(mine)) if drain else ():
        order += back(k)
    # Updates stand between the computations in the list, so receives begin one action earlier.
    return with_messages(order, len(replicas), AHEAD + 1)
