"""Allreduce over nodes of several ranks: a node adds its ranks' vectors and sends only the sum.

A lane is a group with one rank of each node. The ranks of a lane sum one part of the vector over
the nodes. The number of lanes is the number of ranks of the smallest node.

    2 nodes with the ranks 0 1 | 2 3; a0 and a1 are the vectors of ranks 0 and 1:
      node reduce-scatter    rank 0: a0+a1 of part 0    rank 1: a0+a1 of part 1      (memory)
      lane exchange          0 <-> 2 with part 0        1 <-> 3 with part 1          (wire, at once)
      node allgather         all ranks of a node copy the finished parts             (memory)

All lanes use the network at the same time. With P nodes and vectors of N bytes, each node sends
2(P-1)/P N bytes over the network.

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
    """Return the number of lanes (groups with one rank per node): the size of the smallest node."""
    return int(np.bincount(topology.node_of).min())


def peers_of(topology: Topology, lane: int) -> list[int]:
    """Return the ranks of group number `lane`, which has one rank of each node."""
    nodes = np.asarray(topology.node_of)
    by_node = np.argsort(nodes, kind="stable")  # ranks sorted by node, ascending in each node
    starts = np.cumsum(np.bincount(nodes)) - np.bincount(nodes)
    return by_node[starts + lane].tolist()


def lane_steps(
    topology: Topology, lane: int, n: int, itemsize: int, name: str | None = None
) -> list[Step]:
    """Return the steps of an allreduce of `n` elements in a lane, a group of one rank per node.

    `name` is the algorithm; None means a ring for long vectors and a butterfly for short ones.
    """
    name = name or ("ring" if n * itemsize > RING_BYTES else "butterfly")
    peers = [*peers_of(topology, lane), -1]  # peers[-1] is for steps that have no peer
    steps = algorithms.ALLREDUCE[name](topology.nodes, topology.node, n, itemsize)
    return [Step(round, kind, peers[peer], *spans) for round, kind, peer, *spans in steps]


def total_of(*programs) -> Counters:
    """Return the message and byte counts of all `programs`, added up.

    A program is an object that reduces vectors. A program that is None counts as nothing.
    """
    total = Counters()
    for program in filter(None, programs):
        total.add(program.counters)
    return total


def lane_program(
    context: Context, topology: Topology, n: int, reduction: Reduction, name: str | None = None
) -> tuple[slice, Program | None]:
    """Return the slice of a vector that this rank sums between nodes, and the object that sums it.

    The object is None if the slice is empty, and on all ranks if there is only one node. `name` is
    the algorithm of the sum; None means a ring or a butterfly.
    """
    lanes, lane, dtype = lanes_of(topology), topology.local_rank, reduction.work
    if lane >= lanes:
        return slice(0), None
    start, stop = BlockPartition(n, lanes).range(lane)
    if topology.nodes == 1:
        return slice(start, stop), None
    steps = lane_steps(topology, lane, stop - start, dtype.itemsize, name)
    return slice(start, stop), Program(context, steps, stop - start, dtype, reduction.ufunc)


class Hierarchical(Engine):
    """An object that reduces inside nodes, then sums between nodes, then gathers inside nodes."""

    divides = True

    def __init__(self, reduction: Reduction, n: int, first: NodeProgram, second: NodeProgram):
        self.first, self.second, self.gate = first, second, first.gate
        self.part, self.program = lane_program(self.gate.context, self.gate.topology, n, reduction)
        self.counters = total_of(first, second, self.program)

    def run(self, work: np.ndarray, key, number: int = 0, divisor=None) -> None:
        """Reduce the 1-D vector `work` in place. Collective."""
        self.second.prepare(work)
        self.first.run(work, key)
        if self.program is not None:
            self.program.run(work[self.part], key, number)
        self.second.run(work, None, number, divisor)
