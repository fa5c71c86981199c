"""Choose the engine (the object that reduces a vector) by the name of the algorithm."""

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
from .node_short import NodeShort
from .reductions import Reduction
from .staging import ALLGATHER, REDUCE_SCATTER, STAGED, StagedProgram


def settle(context: Context, name: str) -> str:
    """Return the algorithm that really runs if the user asks for `name` on these ranks. Collective.

    If the ranks cannot share memory, an algorithm that needs it is replaced by "butterfly". Raises
    ConfigError for an algorithm that works inside one node only, if the ranks are on several nodes.
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


def make_engine(
    context: Context, signature: Signature, reduction: Reduction, shape, name: str, slots=None
):
    """Return a pair with the engine, the object that runs the algorithm `name`. Collective.

    The pair is (engine, None) if the engine takes the user's array, (None, engine) if it takes a
    1-D vector, and (None, None) if there is only one rank. If the vector is in memory that the
    ranks of a node share, `slots` is the list of the vectors of all ranks of this node.
    """
    n = prod(shape)
    if context.size == 1:
        return None, None
    if slots is not None:
        return None, _on_slots(reduction, memory_of(context), slots)
    if name == algorithms.NATIVE:
        if can_stage(reduction, n, context.size):
            return Staged(context, signature, reduction, shape), None
        return None, blocking_allreduce(context, reduction, n)
    if name in algorithms.NODE:
        memory = memory_of(context)
        single = name == algorithms.SINGLE_COPY
        if memory.topology.nodes == 1 and not single and node_short.can_run(memory, reduction, n):
            return NodeShort(signature, reduction, shape, memory), None
        return None, _on_nodes(reduction, n, memory, name)
    build = algorithms.ALLREDUCE[name]
    algorithms.check_scratch(name, context.size, n, reduction.work.itemsize)
    steps = build(context.size, context.rank, n, reduction.work.itemsize)
    return None, Program(context, steps, n, reduction.work, reduction.ufunc)


def _on_nodes(reduction: Reduction, n: int, memory: NodeMemory, name: str) -> Engine:
    """Return the object that reduces vectors of `n` elements in private memory."""
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
            piece = cross_copy.PIECE_BYTES // dtype.itemsize
            steps = node.in_place_allreduce(size, rank, n, piece, n)
            program = CrossProgram(steps, n, reduction, memory.cross, program)
        return program
    lanes = lanes_of(topology)
    first = staged(REDUCE_SCATTER, lanes)
    second: NodeProgram = staged(ALLGATHER, lanes)
    # Nodes may use different engines for the second half, because only the first half decides the
    # order of additions.
    if reach is not None:
        steps = node.in_place_allgather(size, rank, n, n, lanes, n)
        second = CrossProgram(steps, n, reduction, reach, second)
    return Hierarchical(reduction, n, first, second)


def _on_slots(reduction: Reduction, memory: NodeMemory, slots: list) -> Engine:
    """Return the object that reduces vectors in shared memory; local rank r has ``slots[r]``."""
    n, ufunc, topology = slots[0].size, reduction.ufunc, memory.topology
    if topology.nodes > 1:
        halves = halves_on_slots(topology, slots, ufunc, memory.gate)
        return Hierarchical(reduction, n, *halves)
    piece = node.in_place_length(reduction.work.itemsize)
    steps = node.in_place_allreduce(topology.local_size, topology.local_rank, n, piece, n)
    return SharedProgram(memory.gate, steps, SlotSpace(slots), ufunc)


def halves_on_slots(topology: Topology, slots: list, ufunc, gate: NodeBarrier | None = None):
    """Return two objects that run an allreduce in one node: its reduce-scatter and its allgather.

    `slots` is the list of the vectors of all ranks of the node, in shared memory. `gate` is the
    barrier at which the ranks of the node wait for each other; without `gate`, the caller makes
    them wait between the steps.
    """
    n = slots[0].size
    place = topology.local_size, topology.local_rank, n
    more = node.in_place_length(slots[0].itemsize), lanes_of(topology), n
    first = node.in_place_reduce_scatter(*place, *more)
    second = node.in_place_allgather(*place, *more)
    space = SlotSpace(slots)
    return SharedProgram(gate, first, space, ufunc), SharedProgram(gate, second, space, ufunc)


class SlotSpace:
    """The vectors of a node's ranks, indexed as if they were one vector, in the order of the ranks.

    A slice must lie inside the vector of one rank.
    """

    def __init__(self, slots: list):
        self.slots, self.stride, self.dtype = slots, max(slots[0].size, 1), slots[0].dtype

    def __getitem__(self, span: slice):
        slot, start = divmod(span.start, self.stride)
        return self.slots[slot][start : start + span.stop - span.start]
