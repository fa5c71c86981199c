"""Advise on how many hosts a model's workers should be, for a measured network. Without MPI.

`cut` chooses the stages and the number of workers of each stage. For each number of hosts, the
workers are placed so that few bytes are sent between hosts (`stage_placement`). Messages are sent
while the workers compute, so the time from one microbatch to the next is the largest of these three
times, over all stages and hosts:

    workers     seconds of a forward and a backward pass of a stage / replicas of the stage
    memory      bytes to workers on the same host / bandwidth within a host
    network     bytes from a host to others / bandwidth of the host's link, each way
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import MpidistError
from ...registry import checked_whole
from ...simulator.network_model import NetworkModel
from ..layer_profile import LayerProfile
from ..stage_partition import PipelinePlan, cut
from ..stage_plan import plan_stages
from .stage_placement import place_ranks, slot_links

#: Layouts whose times differ by less than this fraction count as equal, as times are estimates.
_EQUAL = 0.02


class HostLayout(NamedTuple):
    """How the workers of a pipeline are placed on a given number of hosts, and how fast it then is.

    `seconds` is the time from one microbatch to the next, and `limit` says what determines it:
    "workers" (computing), "memory" (messages within a host) or "network". `bytes_between` is the
    number of bytes that are sent between hosts for a microbatch, in both directions together.
    `workers_each` is the number of workers on each host, and `replicas` has the number of workers
    of each stage.
    """

    hosts: int
    workers_each: int
    replicas: tuple[int, ...]
    seconds: float
    limit: str
    bytes_between: float


def advise_hosts(
    profile: LayerProfile,
    *,
    workers: int,
    network: NetworkModel,
    settings: Mapping[str, Any] | None = None,
) -> list[HostLayout]:
    """Return the best placement of the workers for each number of hosts that divides `workers`.

    The placement on the fewest hosts comes first.

    Parameters
    ----------
    profile : LayerProfile
    workers : int
    network : NetworkModel
        `gap` and `node_gap` are used: the seconds per byte between and within hosts.
    settings : mapping, optional
        Arguments of `cut`, which cuts the model into stages; all but `workers` and `bandwidth`.
    """
    checked_whole("workers", workers, 1)
    plans: list[PipelinePlan] = []
    for gap in {network.gap, network.node_gap}:
        try:
            plans.append(cut(profile, workers=workers, bandwidth=1 / gap, **(settings or {})))
        except MpidistError:
            if not plans and gap == network.node_gap:
                raise
    found = []
    for hosts in (n for n in range(1, workers + 1) if workers % n == 0):
        layouts = [_on_hosts(plan, hosts, workers // hosts, network) for plan in plans]
        found.append(min(layouts, key=lambda one: (one.seconds, one.bytes_between)))
    return found


def best_layout(layouts: list[HostLayout]) -> HostLayout:
    """Return the fastest of the results of `advise_hosts`.

    Of several that are nearly equally fast, it is the one with the fewest hosts.
    """
    least = min(one.seconds for one in layouts)
    return next(one for one in layouts if one.seconds <= (1 + _EQUAL) * least)


def _on_hosts(plan: PipelinePlan, hosts: int, each: int, network: NetworkModel) -> HostLayout:
    replicas = tuple(stage.replicas for stage in plan.stages)
    slots, microbatches = sum(replicas), 4 * sum(replicas)
    nodes = [slot // each for slot in range(slots)]
    grid = plan_stages(
        len(replicas), cuts=range(1, len(replicas)), ranks=slots, replicas=replicas,
        microbatches=microbatches, schedule="pipedream",
    )  # fmt: skip
    links = slot_links(
        grid,
        [2 * stage.output_bytes for stage in plan.stages[:-1]],
        [stage.parameter_bytes for stage in plan.stages],
    )
    ranks = place_ranks(nodes, replicas, links)
    place = [nodes[rank] for rank in ranks]
    inside: dict[int, float] = defaultdict(float)  # bytes that a replica sends within its host
    outside: dict[int, float] = defaultdict(float)  # bytes that a host sends to others
    for (a, b), size in links.items():
        if place[a] == place[b]:
            inside[a] += size / 2
            inside[b] += size / 2
        else:
            outside[place[a]] += size / 2
            outside[place[b]] += size / 2
    limits = {
        "workers": max(stage.compute_seconds / stage.replicas for stage in plan.stages),
        "memory": max(inside.values(), default=0.0) / microbatches * network.node_gap,
        "network": max(outside.values(), default=0.0) / microbatches * network.gap,
    }
    limit = max(limits, key=lambda name: limits[name])
    return HostLayout(
        hosts, each, replicas, limits[limit], limit, sum(outside.values()) / microbatches
    )
