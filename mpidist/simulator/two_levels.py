"""`hierarchical` for the simulator: its lanes as a schedule, its phases in memory as a cost term.

The simulator knows messages. What the ranks of a node do in shared memory before and after the
exchange takes none, so it is time that each call costs beforehand, like Python's.
"""

from __future__ import annotations

from collections.abc import Callable

from ..collectives.schedules.algorithms import ALLREDUCE
from ..collectives.schedules.protocol_limits import RING_BYTES
from ..collectives.schedules.schedule import Range, Step
from ..partition import BlockPartition
from .network_model import Problem

HIERARCHICAL = "hierarchical"


def builder(name: str, ranks_per_node: int) -> Callable:
    """Return what builds the schedule of an algorithm: of the lanes, where it is hierarchical."""
    if name != HIERARCHICAL:
        return ALLREDUCE[name]

    def build(size: int, rank: int, n: int, itemsize: int) -> list[Step]:
        node, lane = divmod(rank, ranks_per_node)
        start, stop = BlockPartition(n, ranks_per_node).range(lane)
        count = stop - start

        def moved(span: Range) -> Range:
            offset = start if span[0] < count else n - count
            return span[0] + offset, span[1] + offset

        return [
            step._replace(
                peer=step.peer * ranks_per_node + lane,
                source=moved(step.source),
                target=moved(step.target),
            )
            for step in ALLREDUCE[lane_algorithm(count * itemsize)](
                size // ranks_per_node, node, count, itemsize
            )
        ]

    return build


def lane_algorithm(nbytes: int) -> str:
    """Name what a lane of so many bytes runs between the nodes."""
    return "ring" if nbytes > RING_BYTES else "butterfly"


def with_node_phases(name: str, problem: Problem) -> Problem:
    """Add to `call` what a rank does in memory: put in, add, and take out parts of the others.

    Both copies go at the speed of messages inside the node, which are copies too.
    """
    if name != HIERARCHICAL:
        return problem
    network, ranks = problem.network, problem.ranks_per_node
    foreign = problem.nbytes * (ranks - 1) / ranks
    seconds = foreign * (2 * network.node_gap + network.reduction) + 3 * network.node_latency
    return problem._replace(network=network._replace(call=network.call + seconds))
