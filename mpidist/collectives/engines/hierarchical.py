"""Allreduce over nodes of several ranks: one copy of the vector per node crosses the wire.

    2 nodes of 2 ranks; each node's ranks first cut the sum of their node in lanes:
      node reduce-scatter    rank 0: a0+a1 of part 0    rank 1: a0+a1 of part 1      (memory)
      lane exchange          0 <-> 2 with part 0        1 <-> 3 with part 1          (wire, at once)
      node allgather         all ranks of a node take the finished parts             (memory)

There are as many lanes as the smallest node has ranks: every lane has a member on each node, and
all lanes use the wire at the same time. Cost for P nodes of q ranks: 2(P-1)/P N bytes per node over
the wire, 2(P-1) messages per rank where the lanes run a ring, log2 P times 2 where a butterfly.

Traeff, Hunold, "Decomposing Collectives for Exploiting Multi-lane Communication", CLUSTER 2020.
"""

from __future__ import annotations

import numpy as np

from ...events import Counters
from ...partition import BlockPartition
from ...runtime.context import Context
from ...runtime.topology import Topology
from ..schedules import algorithms
from ..schedules.protocol_limits import RING_BYTES
from ..schedules.schedule import Step
from .executor import Engine, Program
from .node_barrier import NodeProgram
from .reductions import Reduction


def lanes_of(topology: Topology) -> int:
    """How many ranks of each node exchange with other nodes: the size of the smallest."""
    return int(np.bincount(topology.node_of).min())


def peers_of(topology: Topology, lane: int) -> list[int]:
    """Return the rank that takes part in `lane`, of each node. One pass over the ranks."""
    nodes = np.asarray(topology.node_of)
    by_node = np.argsort(nodes, kind="stable")  # a node's ranks one after the other, ascending
    starts = np.cumsum(np.bincount(nodes)) - np.bincount(nodes)
    return by_node[starts + lane].tolist()


def lane_steps(
    topology: Topology, lane: int, n: int, itemsize: int, name: str | None = None
) -> list[Step]:
    """Steps of the exchange of lane `lane`'s `n` elements between the nodes, by real ranks."""
    if name is None:
        name = "ring" if n * itemsize > RING_BYTES else "butterfly"
    peers = [*peers_of(topology, lane), -1]  # the last one for steps that have no peer
    steps = algorithms.ALLREDUCE[name](topology.nodes, topology.node, n, itemsize)
    return [Step(round, kind, peers[peer], *spans) for round, kind, peer, *spans in steps]


def total_of(*programs) -> Counters:
    """Return what the programs send together; None counts for nothing."""
    total = Counters()
    for program in programs:
        if program is not None:
            total.add(program.counters)
    return total


class Hierarchical(Engine):
    """One allreduce in three phases; `halves` are the node's parts of it, before and after."""

    divides = True

    def __init__(
        self,
        context: Context,
        reduction: Reduction,
        n: int,
        topology: Topology,
        halves: tuple[NodeProgram, NodeProgram],
    ):
        self.first, self.second = halves
        self.gate = self.first.gate
        lanes, lane = lanes_of(topology), topology.local_rank
        self.part = slice(*BlockPartition(n, lanes).range(lane)) if lane < lanes else slice(0)
        self.program: Program | None = None
        if lane < lanes and topology.nodes > 1:
            count, dtype = self.part.stop - self.part.start, reduction.work
            steps = lane_steps(topology, lane, count, dtype.itemsize)
            self.program = Program(context, steps, count, dtype, reduction.ufunc)
        self.counters = total_of(self.first, self.second, self.program)

    def run(self, work: np.ndarray, key, number: int = 0, divisor=None) -> None:
        """Reduce the flat vector `work` in place. Collective."""
        self.second.prepare(work)
        self.first.run(work, key)
        if self.program is not None:
            self.program.run(work[self.part], key, number)
        self.second.run(work, None, number, divisor)
