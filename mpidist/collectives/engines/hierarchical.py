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
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import Context
from ...runtime.topology import Topology
from ..schedules import algorithms
from ..schedules.protocol_limits import RING_BYTES
from ..schedules.schedule import Step
from .executor import Program, execute
from .node_barrier import NodeBarrier, NodeProgram
from .reductions import Reduction


def lanes_of(topology: Topology) -> int:
    """How many ranks of each node exchange with other nodes: the size of the smallest. Local."""
    return int(np.bincount(topology.node_of).min())


def peers_of(topology: Topology, lane: int) -> list[int]:
    """Return the rank that takes part in `lane`, of each node. Local; one pass over the ranks."""
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
    """Return what the programs send together; None counts for nothing. Local."""
    total = Counters()
    for program in programs:
        if program is not None:
            total.add(program.counters)
    return total


class Hierarchical:
    """One allreduce in three phases; `first` and `second` are the node's halves of it."""

    divides = tagged = True

    def __init__(
        self,
        context: Context,
        signature: Signature,
        reduction: Reduction,
        n: int,
        topology: Topology,
        gate: NodeBarrier,
        halves: tuple[NodeProgram, NodeProgram],
    ):
        self.context, self.signature, self.reduction = context, signature, reduction
        self.gate, self.first, self.second = gate, *halves
        self.key = signature.key
        lanes, lane = lanes_of(topology), topology.local_rank
        self.part = BlockPartition(n, lanes).range(lane) if lane < lanes else (0, 0)
        self.program: Program | None = None
        if lane < lanes and topology.nodes > 1:
            count, dtype = self.part[1] - self.part[0], reduction.work
            steps = lane_steps(topology, lane, count, dtype.itemsize)
            self.program = Program(steps, count, dtype, reduction.ufunc)
        self.counters = total_of(self.first, self.second, self.program)

    def __call__(self, work: np.ndarray, sequence: int, total) -> None:
        """Reduce the flat vector `work` in place. Collective."""
        try:
            self._reduce(work, sequence, total)
        except BaseException as error:
            self.gate.leave(error)
            raise

    def _reduce(self, work: np.ndarray, sequence: int, total) -> None:
        context, gate = self.context, self.gate
        divisor = work.dtype.type(total) if self.reduction.mean else None
        self.second.prepare(gate, work)
        self.first.run(gate, self.key, work, None)
        if self.program is not None:
            execute(context, self.program, work[slice(*self.part)], self.key, sequence)
        self.second.run(gate, None, work, divisor)

    def close(self) -> None:
        """Nothing to free."""
