"""The layers of each rank, its microbatches, and the order in which it computes them.

    12 layers, cuts [4, 8], replicas [2, 1, 1]     ranks 0, 1 | 2 | 3
                                                   layers 1-4 | 5-8 | 9-12

The ranks are numbered stage by stage. The replicas of a stage are ranks with the same layers; each
has a contiguous block of the microbatches. (With the schedule "pipedream", the replicas take the
microbatches in turn instead.) If all stages have the same number r of replicas, the ranks form r
separate pipelines. Otherwise the stage with the most replicas sets the order: the first microbatch
of each of its replicas, then the second of each, and so on:

    8 microbatches, replicas [2, 1]     rank 0 has 0 1 2 3, and rank 1 has 4 5 6 7;
                                        they enter as 0 4 1 5 2 6 3 7;
                                        rank 2 has all of them, in this order

This module needs no MPI.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from .. import partition
from ..collectives.schedules import fixed_tree
from ..errors import ConfigError, shown
from ..registry import checked_whole, look_up
from .check_actions import play_actions
from .grid import pipedream_order
from .pipeline_schedules import (
    SCHEDULES,
    B,
    F,
    StageAction,
    action_lists,
    with_messages,
)
from .stage_contract import why_no_stages

#: The schedules in which the stages may have different numbers of replicas.
UNEVEN = ("gpipe", "1f1b", "pipedream")


@dataclass(frozen=True)
class PipelineGrid:
    """The stages of a pipeline and the replicas of each stage, made by `plan_stages`.

    Attributes
    ----------
    layers : int
        The number of layers of the model.
    cuts : tuple of int
        For each cut, the number of layers before it. The cuts divide the model into chunks (groups
        of consecutive layers). If there are S stages, chunk c is on stage c mod S.
    replicas : tuple of int
        For each stage, the number of its ranks.
    microbatches : int
        The number of microbatches of a step.
    schedule : str
        "gpipe", "1f1b", "interleaved", "zero_bubble" or "pipedream".
    chunks : int
        The number of chunks of each stage.
    flush : int or None
        With "pipedream", the number of microbatches that enter before the pipeline is emptied. With
        None it is emptied only by `Stage.drain`.
    """

    layers: int
    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1
    flush: int | None = None

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return len(self.replicas)

    @property
    def ranks(self) -> int:
        """The number of ranks of all stages together."""
        return sum(self.replicas)

    def place(self, rank: int) -> tuple[int, int]:
        """Return (a rank's stage, the rank's number among the replicas of this stage)."""
        stage = 0
        while rank >= self.replicas[stage]:
            rank -= self.replicas[stage]
            stage += 1
        return stage, rank

    def ranks_of(self, stage: int) -> range:
        """Return the ranks that have a replica of a stage."""
        first = sum(self.replicas[:stage])
        return range(first, first + self.replicas[stage])

    def chunks_of(self, stage: int) -> range:
        """Return the numbers of the chunks (groups of consecutive layers) of a stage."""
        return range(stage, self.stages * self.chunks, self.stages)

    def layers_of(self, chunk: int) -> range:
        """Return the numbers of the layers in a chunk (group of layers), counted from 0."""
        bounds = (0, *self.cuts, self.layers)
        return range(bounds[chunk], bounds[chunk + 1])

    @property
    def in_rounds(self) -> bool:
        """Whether each of the r replicas of a stage has every r-th microbatch ("pipedream")."""
        return self.schedule == "pipedream"

    @property
    def padded(self) -> int:
        """The number of microbatches of a step, with the empty ones that "pipedream" adds."""
        if not self.in_rounds:
            return self.microbatches
        return pipedream_order.whole_rounds(self.microbatches, self.replicas)

    def pieces(self, rank: int) -> range:
        """Return the numbers of the microbatches that a rank computes in a step."""
        stage, replica = self.place(rank)
        if self.in_rounds:
            return range(replica, self.microbatches, self.replicas[stage])
        start, stop = self._blocks[stage][replica : replica + 2]
        return range(start, stop)

    def holder(self, chunk: int, microbatch: int) -> int:
        """Return the rank that computes `microbatch` in `chunk` (a group of consecutive layers)."""
        stage = chunk % self.stages
        if self.in_rounds:
            return self.ranks_of(stage)[microbatch % self.replicas[stage]]
        ends = self._blocks[stage][1:]
        return self.ranks_of(stage)[next(k for k, end in enumerate(ends) if microbatch < end)]

    def actions(self, rank: int) -> list[StageAction]:
        """Return the computations and messages of a rank in a step, in order."""
        return self._lists[rank]

    def passes(
        self, rank: int, empty_at: int, start: int, stop: int, drain: bool
    ) -> list[StageAction]:
        """Return a part of a rank's actions with the schedule "pipedream".

        In this part, the microbatches `start` to `stop` - 1 enter the pipeline.
        """
        stage, replica = self.place(rank)
        return pipedream_order.passes(self.replicas, stage, replica, empty_at, start, stop, drain)

    @cached_property
    def _blocks(self) -> list[list[int]]:
        return [fixed_tree.cuts(self.microbatches, r) for r in self.replicas]

    @cached_property
    def _lists(self) -> list[list[StageAction]]:
        if self.in_rounds:
            blocks = [*partition.pieces(0, self.padded, self.flush or self.padded)]
            return [
                [one for a, b in blocks for one in self.passes(rank, a, a, b, True)]
                for rank in range(self.ranks)
            ]
        return _side_by_side(self) if len(set(self.replicas)) == 1 else _uneven(self)


def plan_stages(
    layers: int,
    *,
    cuts: Sequence[int],
    ranks: int,
    microbatches: int | None,
    replicas: Sequence[int] | None = None,
    schedule: str = "1f1b",
    chunks: int = 1,
    flush: int | None = None,
) -> PipelineGrid:
    """Return the `PipelineGrid` for these settings; raise ConfigError if they do not fit together.

    Parameters
    ----------
    layers : int
        The number of layers of the model.
    cuts : sequence of int
        For each cut, the number of layers before it. The numbers must rise.
    ranks : int
        The number of ranks of the pipeline.
    microbatches : int
        The number of microbatches of a step.
    replicas : sequence of int, optional
        The number of ranks of each stage. By default, all stages have the same number.
    schedule : str
        "gpipe", "1f1b", "interleaved", "zero_bubble" or "pipedream".
    chunks : int
        The number of chunks (groups of consecutive layers) of each stage, for "interleaved".
    flush : int, optional
        For "pipedream": after each `flush` microbatches, all stages finish these microbatches
        before the next one enters. `flush` must be a multiple of each number in `replicas`.
    """
    look_up(SCHEDULES, schedule, "schedule")
    checked_whole("chunks", chunks, 1)
    if chunks > 1 and schedule != "interleaved":
        raise ConfigError(f"chunks={chunks}: schedule {schedule!r} has one chunk for each rank")
    bounds = _checked_cuts(cuts, layers)
    parts = len(bounds) + 1
    if parts % chunks:
        raise ConfigError(
            f"cuts={list(bounds)}: {parts} parts are no multiple of chunks={chunks}; give stages "
            "times chunks - 1 cuts"
        )
    several = _checked_replicas(replicas, parts // chunks, ranks)
    if microbatches is None:
        raise ConfigError(
            "a pipeline needs microbatches, the number of parts into which a global batch is cut: "
            "give microbatches, for instance 4 times the stages"
        )
    checked_whole("microbatches", microbatches, 1)
    if flush is not None:
        checked_whole("flush", flush, 1)
        if schedule != "pipedream":
            raise ConfigError(f"flush={flush} is for the schedule 'pipedream', not {schedule!r}")
    grid = PipelineGrid(layers, bounds, several, microbatches, schedule, chunks, flush)
    if flush is not None and (more := pipedream_order.whole_rounds(flush, several)) != flush:
        raise ConfigError(
            f"flush={flush}: expected a multiple of all replicas={list(several)}, such as {more}"
        )
    if len(set(several)) > 1 and schedule not in UNEVEN:
        raise ConfigError(
            f"replicas={list(several)}: the schedule {schedule!r} needs the same number of "
            f"replicas in all stages; give equal numbers, or use {' or '.join(map(repr, UNEVEN))}"
        )
    if schedule == "interleaved":
        _check_interleaved(grid)
    return grid


def _checked_cuts(cuts, layers: int) -> tuple[int, ...]:
    listed = isinstance(cuts, Sequence) and not isinstance(cuts, str)
    if not listed or not all(type(one) is int for one in cuts):
        raise ConfigError(f"cuts={shown(cuts)}; expected whole numbers, such as [4, 8]")
    bounds = (0, *cuts)
    if any(b <= a for a, b in itertools.pairwise(bounds)):
        raise ConfigError(f"cuts={list(cuts)}; expected rising numbers from 1 on")
    if bounds[-1] >= layers:
        what = f"cuts={list(cuts)}: the model has {layers} layers"
        raise ConfigError(f"{what}, so the last cut is {layers - 1} at most")
    return tuple(cuts)


def _checked_replicas(replicas, stages: int, ranks: int) -> tuple[int, ...]:
    if replicas is None:
        if ranks % stages:
            raise ConfigError(
                f"{ranks} ranks are no multiple of the {stages} stages; start a multiple, or give "
                "replicas, the number of ranks of each stage"
            )
        return (ranks // stages,) * stages
    listed = isinstance(replicas, Sequence) and not isinstance(replicas, str)
    if not listed or not all(type(one) is int and one > 0 for one in replicas):
        raise ConfigError(f"replicas={shown(replicas)}; expected whole numbers, such as [3, 1]")
    if len(replicas) != stages:
        raise ConfigError(
            f"replicas={list(replicas)}: {len(replicas)} numbers for {stages} stages; give one for "
            "each stage"
        )
    if sum(replicas) != ranks:
        raise ConfigError(
            f"replicas={list(replicas)} are {sum(replicas)} ranks, and the job has {ranks}; start "
            f"{sum(replicas)} ranks, or give other replicas"
        )
    return tuple(replicas)


def _check_interleaved(grid: PipelineGrid) -> None:
    """Raise ConfigError unless each replica has a multiple of the stages as microbatches."""
    p, r, m = grid.stages, grid.replicas[0], grid.microbatches

    def fits(number: int) -> bool:
        return not any((b - a) % p for a, b in itertools.pairwise(fixed_tree.cuts(number, r)))

    if not fits(m):
        more = next(number for number in itertools.count(m) if fits(number))
        each = f" for each of the {r} replicas" if r > 1 else ""
        raise ConfigError(
            f"microbatches={m}: the schedule 'interleaved' needs a multiple of the {p} stages"
            f"{each}; the next one is {more}"
        )


def _side_by_side(grid: PipelineGrid) -> list[list[StageAction]]:
    """Return the actions of each rank, if the ranks form separate pipelines."""
    lists: list[list[StageAction]] = [[] for _ in range(grid.ranks)]
    # Most replicas have the same number of microbatches, and so the same actions.
    schedule = cache(lambda count: action_lists(grid.schedule, grid.stages, count, grid.chunks))
    for k, (start, stop) in enumerate(itertools.pairwise(fixed_tree.cuts(
        grid.microbatches, grid.replicas[0]
    ))):  # fmt: skip
        # If there are more replicas than microbatches, some pipelines have no microbatch.
        for stage, actions in enumerate(schedule(stop - start) if stop > start else ()):
            lists[grid.ranks_of(stage)[k]] += [
                one._replace(microbatch=start + one.microbatch) for one in actions
            ]
    return lists


def _uneven(grid: PipelineGrid) -> list[list[StageAction]]:
    """Return the actions of each rank, if stages have different numbers of replicas."""
    order, more = _order(grid), 0
    while True:
        lists = []
        for rank in range(grid.ranks):
            stage, _ = grid.place(rank)
            pieces = grid.pieces(rank)
            mine = [i for i in order if i in pieces]
            behind = -(-sum(grid.replicas[stage:]) // grid.replicas[stage])
            ahead = len(mine) if grid.schedule == "gpipe" else min(behind - 1 + more, len(mine))
            computations = [StageAction(F, stage, i) for i in mine[:ahead]]
            for k, i in enumerate(mine):
                if k + ahead < len(mine):
                    computations.append(StageAction(F, stage, mine[k + ahead]))
                computations.append(StageAction(B, stage, i))
            lists.append(with_messages(computations, grid.stages))
        try:
            play_actions(lists, grid.stages, grid.stages)
        except ConfigError:
            # This loop ends: when each rank does all its forward passes first, in the same order
            # as the other ranks, no rank waits for ever.
            more += 1
        else:
            return lists


def _order(grid: PipelineGrid) -> list[int]:
    """Return the order in which microbatches enter, for stages with unequal numbers of replicas."""
    widest = max(range(grid.stages), key=grid.replicas.__getitem__)
    blocks = [grid.pieces(rank) for rank in grid.ranks_of(widest)]
    return [i for row in itertools.zip_longest(*blocks) for i in row if i is not None]


def check_layers(model) -> list:
    """Return the layers of a model; raise ConfigError if the model cannot be cut into stages."""
    if reason := why_no_stages(model):
        raise ConfigError(
            f"{reason}, so it cannot be cut into stages; use a chain of layers such as "
            "md.models.Network, or md.AllReduce()"
        )
    return list(model.layers)
