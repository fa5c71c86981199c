"""Allreduce of an arena (tensors in shared memory); messages are sent only between nodes."""

from __future__ import annotations

from ...errors import ConfigError
from ...runtime.agreement.mismatch import Signature
from ...runtime.context import Context
from ...runtime.node_memory.arena import Arena
from ..plan import AllreducePlan, make_plan
from ..schedules import algorithms
from . import programs
from .node_barrier import memory_of
from .reductions import resolve

#: Vectors of fewer bytes are copied into small shared buffers of the node, because this needs one
#: barrier instead of two.
SMALL_BYTES = 8 << 10


def plans_of(context: Context, arena: Arena, op, algorithm: str) -> list[AllreducePlan]:
    """Return a prepared allreduce for each of the flat arrays in which `arena` stores tensors.

    The first call for an arena is collective.
    """
    if (op, algorithm) in arena.plans:
        return arena.plans[op, algorithm]
    arena.check_open()
    algorithms.check_name(algorithm, algorithms.ALLREDUCE)
    if arena.comm != context.comm:
        raise ConfigError("this arena was made for another communicator; pass arena.comm")
    reductions = [resolve(op, vector.dtype) for vector in arena.vectors]
    dtypes = ",".join(reduction.dtype.name for reduction in reductions)
    sizes = f"({','.join(str(vector.size) for vector in arena.vectors)})"
    name = reductions[0].name
    agreed = Signature("allreduce", dtypes, sizes, name, algorithm, arena.label)
    context.begin_agreed(agreed, "first call")
    name = _settle(context, arena, algorithm)
    plans = []
    for k, (vector, reduction) in enumerate(zip(arena.vectors, reductions, strict=True)):
        small = name == "node" and vector.nbytes < SMALL_BYTES
        lies = name in algorithms.NODE and reduction.work == vector.dtype and not small
        slots = arena.slots[k] if lies else None
        label = f"{arena.label} vector {k}"
        plans.append(make_plan(context, vector, op, name, label, slots).owned())
    arena.plans[op, algorithm] = plans
    return plans


def _settle(context: Context, arena: Arena, algorithm: str) -> str:
    """Return the algorithm that sums `arena` (tensors in shared memory). Collective."""
    topology = arena.topology
    alone = topology.nodes == topology.size  # every rank alone on its node
    if algorithm not in (algorithms.MEASURED, *algorithms.NODE) or alone or not arena.shared:
        return algorithm
    memory = memory_of(context, topology.ranks_per_node)
    if memory.topology.node_of != topology.node_of:
        raise ConfigError(
            f"the arena has {topology.nodes} nodes, its communicator {memory.topology.nodes}; "
            "pass the same ranks_per_node"
        )
    if algorithm == algorithms.MEASURED:
        algorithm = "node" if topology.nodes == 1 else "hierarchical"
    elif algorithm == algorithms.SINGLE_COPY and topology.nodes == 1:
        algorithm = "node"  # the vectors lie in shared memory: nothing to copy
    return programs.settle(context, algorithm)
