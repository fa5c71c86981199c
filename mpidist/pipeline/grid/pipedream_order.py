"""The order of "pipedream" on a grid: which microbatches a rank has, and when it updates.

A stage has r replicas. Microbatch i belongs to replica i mod r, so a round of r microbatches gives
each replica one. A rank does F of its newest microbatch, then B of one that is so many rounds
older, then U, the update with the gradients of this round. U is the same update on all replicas of
the stage, which add their gradients in it:

    2 replicas, then 1     rank 0   F0 F2 B0 U0 F4 B2 U2 ...        stage 0, depth 1
    of the next stage      rank 1   F1 F3 B1 U1 F5 B3 U3 ...
                           rank 2   F0 B0 U0 F1 B1 U1 F2 B2 U2 ...  stage 1, depth 0

So the forward pass of microbatch i uses version max(0, i // r - depth) of the stage, counted from
the last time that the pipeline was empty; the backward pass uses the same version. The depth is
that of PipeDream: the stage has as many microbatches under way as the ranks from it to the end can
work at. With one rank for each stage, it is S - 1 - s.

Reference: Narayanan et al., "PipeDream", SOSP 2019, section 3 (1F1B-RR).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm

from ..pipeline_schedules import AHEAD, B, F, StageAction, U, with_messages


def rounds_behind(replicas: Sequence[int], stage: int) -> int:
    """Return how many rounds the backward passes of a stage are behind its forward passes."""
    return -(-sum(replicas[stage:]) // replicas[stage]) - 1


def whole_rounds(microbatches: int, replicas: Sequence[int]) -> int:
    """Return `microbatches`, rounded up so that the rounds of all stages end with it.

    The microbatches that are added have no samples.
    """
    each = lcm(*replicas)
    return -(-microbatches // each) * each


def passes(
    replicas: Sequence[int], stage: int, replica: int, empty_at: int, start: int, stop: int,
    drain: bool,
) -> list[StageAction]:  # fmt: skip
    """Return what a rank does when the microbatches from `start` up to `stop` enter.

    Parameters
    ----------
    empty_at : int
        The microbatch before which the pipeline was empty. This number, `start` and `stop` are
        multiples of all replicas, see `whole_rounds`.
    drain : bool
        Whether the rank also finishes all microbatches, so that the pipeline is empty again.
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
    # An update stands between the computations, so a receive begins an action earlier.
    return with_messages(order, len(replicas), AHEAD + 1)
