"""What runs a plan: from the name of an algorithm to the object that reduces a vector.

A *short* engine (`native.Staged`, `node_short.Flat`) does everything itself: ``run(x, total)`` on
the user's array. The others take a flat vector of the work dtype: ``engine(work, sequence,
total)``; those that divide a mean while the piece is in the cache say ``divides``, those whose
messages need a tag ``tagged``. `counters` is what a call sends.
"""

from __future__ import annotations

from math import prod

from ...errors import ConfigError
from ...events import Runs, emit
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import Context
from ..schedules import algorithms, node
from . import cross_copy, node_short
from .cross_copy import CrossProgram
from .executor import Program, execute
from .hierarchical import Hierarchical, lanes_of
from .native import Blocking, Staged, can_stage
from .node_barrier import NodeMemory, NodeProgram, SharedProgram, memory_of
from .node_short import Flat
from .reductions import Reduction
from .staging import ALLGATHER, REDUCE_SCATTER, STAGED, StagedProgram


class Scheduled:
    """A schedule on MPI point-to-point."""

    divides, tagged = False, True

    def __init__(self, context: Context, signature: Signature, program: Program):
        self.context, self.signature, self.program = context, signature, program
        self.key, self.counters = signature.key, program.counters

    def __call__(self, work, sequence: int, total) -> None:
        """Reduce the flat vector `work` in place and wait. Collective."""
        execute(self.context, self.program, work, self.key, sequence)

    def close(self) -> None:
        """Nothing to free: scratch is memory of Python's."""


class Shared:
    """The node's own algorithm in one program: arenas, and private vectors that are staged."""

    divides, tagged = True, False

    def __init__(self, context, signature: Signature, reduction: Reduction, program, gate):
        self.context, self.signature, self.reduction = context, signature, reduction
        self.program, self.gate, self.counters = program, gate, program.counters

    def __call__(self, work, sequence: int, total) -> None:
        """Reduce the flat vector `work` in place. Collective."""
        divisor = work.dtype.type(total) if self.reduction.mean else None
        try:
            self.program.run(self.gate, self.signature.key, work, divisor)
        except BaseException as error:
            self.gate.leave(error)
            raise

    def close(self) -> None:
        """Nothing to free: the memory is the communicator's."""


def runs_of(context: Context, engine) -> Runs:
    """Return the runs of an engine; they number its operations where no tag does. Local."""
    return context.count(engine.counters, numbers=not engine.tagged)


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


def make(context: Context, signature: Signature, reduction: Reduction, shape, name: str):
    """Return (short engine or None, engine or None) for algorithm `name`. Collective."""
    n = prod(shape)
    if name == algorithms.NATIVE:
        if can_stage(reduction, n, context.size):
            return Staged(context, signature, reduction, shape), None
        return None, Blocking(context, signature, reduction, n)
    if name in algorithms.NODE:
        memory = memory_of(context)
        single = name == algorithms.SINGLE_COPY
        if memory.topology.nodes == 1 and not single and node_short.can_run(memory, reduction, n):
            return Flat(context, signature, reduction, shape, memory), None
        return None, _on_nodes(context, signature, reduction, n, memory, name)
    build = algorithms.ALLREDUCE[name]
    algorithms.check_scratch(name, context.size, n, reduction.work.itemsize)
    steps = build(context.size, context.rank, n, reduction.work.itemsize)
    program = Program(steps, n, reduction.work, reduction.ufunc)
    return None, Scheduled(context, signature, program)


def _on_nodes(context, signature, reduction: Reduction, n: int, memory: NodeMemory, name: str):
    dtype, ufunc, topology = reduction.work, reduction.ufunc, memory.topology
    size, rank, gate = topology.local_size, topology.local_rank, memory.gate
    nbytes = n * dtype.itemsize
    reach = memory.cross if nbytes > cross_copy.REACHED_BYTES else None
    single = name == algorithms.SINGLE_COPY or nbytes > cross_copy.WHOLE_BYTES

    def staged(form: str, lanes: int) -> StagedProgram:
        return StagedProgram(form, size, rank, n, lanes, memory.staging, dtype, ufunc)

    program: NodeProgram
    if topology.nodes == 1 and (reach is None or single):
        program = staged(STAGED, size)
        if single and memory.cross is not None and n:
            steps = node.in_place(size, rank, n, cross_copy.PIECE_BYTES // dtype.itemsize, n)
            program = CrossProgram(steps, n, rank, reduction, memory.cross, program)
        return Shared(context, signature, reduction, program, gate)
    lanes = lanes_of(topology)
    first = staged(REDUCE_SCATTER, lanes)
    second: NodeProgram = staged(ALLGATHER, lanes)
    # Nodes need not choose alike: the order of additions is that of the first half.
    if reach is not None:
        steps = node.in_place_allgather(size, rank, n, n, lanes, n)
        second = CrossProgram(steps, n, rank, reduction, reach, second)
    return Hierarchical(context, signature, reduction, n, topology, gate, (first, second))


def on_slots(context, signature, reduction: Reduction, slots: list, memory: NodeMemory):
    """Return the engine for vectors that lie in an arena, slot r that of local rank r. Local."""
    n, ufunc, topology = slots[0].size, reduction.ufunc, memory.topology
    size, rank = topology.local_size, topology.local_rank
    piece = node.in_place_length(reduction.work.itemsize)
    space = SlotSpace(slots)
    if topology.nodes == 1:
        program = SharedProgram(node.in_place(size, rank, n, piece, n), 0, space, ufunc)
        return Shared(context, signature, reduction, program, memory.gate)
    lanes = lanes_of(topology)
    first = node.in_place_reduce_scatter(size, rank, n, piece, lanes, n)
    second = node.in_place_allgather(size, rank, n, piece, lanes, n)
    halves = SharedProgram(first, 0, space, ufunc), SharedProgram(second, 0, space, ufunc)
    return Hierarchical(context, signature, reduction, n, topology, memory.gate, halves)


class SlotSpace:
    """The slots of an arena as one address space: slot r begins at r times their length."""

    def __init__(self, slots: list):
        self.slots, self.stride, self.dtype = slots, max(slots[0].size, 1), slots[0].dtype

    def __getitem__(self, span: slice):
        slot, start = divmod(span.start, self.stride)
        return self.slots[slot][start : start + span.stop - span.start]
