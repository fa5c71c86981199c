"""Simulate `hierarchical` allreduce: messages between nodes, a fixed time inside each node.

Inside a node, the ranks of `hierarchical` work in shared memory. The time of this work is added to
`call`, the time of an allreduce call before its first message.
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
    """Return the function that builds the schedule (list of steps) of the algorithm `name`.

    For ``hierarchical``, the schedule has only the messages between nodes.
    """
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
    """Return the algorithm that ``hierarchical`` uses between nodes for `nbytes` per rank."""
    return "ring" if nbytes > RING_BYTES else "butterfly"


def with_node_phases(name: str, problem: Problem) -> Problem:
    """Return a copy of `problem`, an allreduce, with the time of the work inside the nodes.

    If `name` is "hierarchical", the time of the work in shared memory is added to the fixed time
    ``network.call``. For other algorithms, `problem` is returned unchanged.
    """
    if name != HIERARCHICAL:
        return problem
    network, ranks = problem.network, problem.ranks_per_node
    foreign = problem.nbytes * (ranks - 1) / ranks
    seconds = foreign * (2 * network.node_gap + network.reduction) + 3 * network.node_latency
    return problem._replace(network=network._replace(call=network.call + seconds))
