"""What runs a plan: from the name of an algorithm to the object that reduces a vector.

A *short* engine (`native.Staged`, `node_short.Flat`) does everything itself: ``run(x, total)`` on
the user's array. The others, an `executor.Engine` each, take a flat vector of the work dtype.
"""

from __future__ import annotations

from math import prod

from ...errors import ConfigError
from ...events import emit
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import Context
from ...runtime.topology import Topology
from ..schedules import algorithms, node
from . import cross_copy, node_short
from .cross_copy import CrossProgram
from .executor import Engine, Program
from .hierarchical import Hierarchical, lanes_of
from .native import Staged, blocking_allreduce, can_stage
from .node_barrier import NodeBarrier, NodeMemory, NodeProgram, SharedProgram, memory_of
from .node_short import Flat
from .reductions import Reduction
from .staging import ALLGATHER, REDUCE_SCATTER, STAGED, StagedProgram


def settle(context: Context, name: str) -> str:
    """Return the algorithm that can run here in place of `name`. Collective.

    Without memory to share (a /dev/shm that is too small) the node's algorithms become the
    butterfly, and that is said. ConfigError for those of one node on several nodes.
    """
    if name not in algorithms.NODE or context.size == 1:
        return name
    memory = memory_of(context)
    nodes = memory.topology.nodes
    if name != "hierarchical" and nodes > 1:
        raise ConfigError(
            f"algorithm={name!r}: the {context.size} ranks are on {nodes} nodes, expected one; "
            "use 'hierarchical'"
        )
    if memory.reason is None:
        return name
    emit("fallback", algorithm=name, instead="butterfly", reason=memory.reason)
    return "butterfly"


def make(
    context: Context, signature: Signature, reduction: Reduction, shape, name: str, slots=None
):
    """Return (short engine or None, engine or None) for algorithm `name`. Collective.

    With `slots` the vector is this rank's in an arena: slot r is that of local rank r.
    """
    n = prod(shape)
    if context.size == 1:
        return None, None
    if slots is not None:
        return None, _on_slots(context, reduction, slots)
    if name == algorithms.NATIVE:
        if can_stage(reduction, n, context.size):
            return Staged(context, signature, reduction, shape), None
        return None, blocking_allreduce(context, reduction, n)
    if name in algorithms.NODE:
        memory = memory_of(context)
        single = name == algorithms.SINGLE_COPY
        if memory.topology.nodes == 1 and not single and node_short.can_run(memory, reduction, n):
            return Flat(context, signature, reduction, shape, memory), None
        return None, _on_nodes(context, reduction, n, memory, name)
    build = algorithms.ALLREDUCE[name]
    algorithms.check_scratch(name, context.size, n, reduction.work.itemsize)
    steps = build(context.size, context.rank, n, reduction.work.itemsize)
    return None, Program(context, steps, n, reduction.work, reduction.ufunc)


def _on_nodes(context, reduction: Reduction, n: int, memory: NodeMemory, name: str) -> Engine:
    dtype, ufunc, topology = reduction.work, reduction.ufunc, memory.topology
    size, rank, gate = topology.local_size, topology.local_rank, memory.gate
    nbytes = n * dtype.itemsize
    reach = memory.cross if nbytes > cross_copy.REACHED_BYTES else None
    single = name == algorithms.SINGLE_COPY or nbytes > cross_copy.WHOLE_BYTES

    def staged(form: str, lanes: int) -> StagedProgram:
        return StagedProgram(gate, form, size, rank, n, lanes, memory.staging, dtype, ufunc)

    program: NodeProgram
    if topology.nodes == 1 and (reach is None or single):
        program = staged(STAGED, size)
        if single and memory.cross is not None and n:
            steps = node.in_place(size, rank, n, cross_copy.PIECE_BYTES // dtype.itemsize, n)
            program = CrossProgram(steps, n, rank, reduction, memory.cross, program)
        return program
    lanes = lanes_of(topology)
    first = staged(REDUCE_SCATTER, lanes)
    second: NodeProgram = staged(ALLGATHER, lanes)
    # Nodes need not choose alike: the order of additions is that of the first half.
    if reach is not None:
        steps = node.in_place_allgather(size, rank, n, n, lanes, n)
        second = CrossProgram(steps, n, rank, reduction, reach, second)
    return Hierarchical(context, reduction, n, topology, (first, second))


def _on_slots(context, reduction: Reduction, slots: list) -> Engine:
    memory = memory_of(context)
    n, ufunc, topology = slots[0].size, reduction.ufunc, memory.topology
    if topology.nodes > 1:
        halves = halves_on_slots(topology, slots, ufunc, memory.gate)
        return Hierarchical(context, reduction, n, topology, halves)
    piece = node.in_place_length(reduction.work.itemsize)
    steps = node.in_place(topology.local_size, topology.local_rank, n, piece, n)
    return SharedProgram(memory.gate, steps, 0, SlotSpace(slots), ufunc)


def halves_on_slots(topology: Topology, slots: list, ufunc, gate: NodeBarrier | None = None):
    """Return what a node does before and after its lanes, for vectors in an arena."""
    n = slots[0].size
    place = topology.local_size, topology.local_rank, n
    more = node.in_place_length(slots[0].itemsize), lanes_of(topology), n
    first = node.in_place_reduce_scatter(*place, *more)
    second = node.in_place_allgather(*place, *more)
    space = SlotSpace(slots)
    return SharedProgram(gate, first, 0, space, ufunc), SharedProgram(gate, second, 0, space, ufunc)


class SlotSpace:
    """The slots of an arena as one address space: slot r begins at r times their length."""

    def __init__(self, slots: list):
        self.slots, self.stride, self.dtype = slots, max(slots[0].size, 1), slots[0].dtype

    def __getitem__(self, span: slice):
        slot, start = divmod(span.start, self.stride)
        return self.slots[slot][start : start + span.stop - span.start]
