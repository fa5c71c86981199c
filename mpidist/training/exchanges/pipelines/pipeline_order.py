"""Choose the stage and replica of each rank, so that few bytes are sent between hosts.

How many bytes the layers send is measured with random inputs, if no profile is known. On one host,
or if this measurement is not possible, the stages get the ranks in order: the first stage gets the
first ranks, and so on.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

from .... import events
from ....collectives.engines.node_barrier import faked_nodes
from ....pipeline import PipelineGrid, measure
from ....pipeline.grid.recut import CutChoice, profile_rows
from ....pipeline.grid.stage_placement import bytes_between_hosts, place_ranks, slot_links
from ....pipeline.measure_layers import random_batch
from ....runtime.agreement.run_on_all import run_on_all
from ....runtime.topology import topology_of


def order_of_ranks(
    comm, model, grid: PipelineGrid, choice: CutChoice, samples: int
) -> list[int] | None:
    """Return the ranks of the replicas of stage 0, then of stage 1, and so on.

    Collective over `comm`. The result None means that the ranks are 0, 1, 2 and so on.
    """
    topology = topology_of(comm, faked_nodes(comm))
    if topology.nodes == 1:
        return None

    def local() -> list[int] | None:
        rows = [list(row) for row in choice.layers]
        # If the model cannot be measured with random inputs, the bytes stay unknown.
        with suppress(Exception):
            if not rows and comm.rank == 0:
                rows = profile_rows(measure(model, random_batch(model, samples), repeats=1))
        if not rows or comm.rank:
            return None
        nodes, links = list(topology.node_of), links_of(grid, rows)
        order = place_ranks(nodes, grid.replicas, links)
        placed = [nodes[rank] for rank in order]
        events.emit(
            "pipeline_order", order=order, bytes=bytes_between_hosts(placed, links),
            bytes_in_rank_order=bytes_between_hosts(nodes, links),
        )  # fmt: skip
        return order if order != sorted(order) else None

    return run_on_all(comm, "md.train: order of ranks", local, lambda everyone: everyone[0])


def links_of(grid: PipelineGrid, rows: list) -> dict:
    """Return how many bytes the stage replicas a < b exchange in a step, as {(a, b): bytes}."""
    # The gradient of an output has the same size as the output.
    cuts = [2 * rows[end - 1][2] for end in grid.cuts]
    sums = [0.0] * grid.stages
    for chunk, (start, stop) in enumerate(pairwise([0, *grid.cuts, grid.layers])):
        sums[chunk % grid.stages] += sum(row[3] for row in rows[start:stop])
    return slot_links(grid, cuts, sums)
