"""Allreduce of an arena: ranks add each other's tensors where they lie; only nodes send."""

from __future__ import annotations

from ...errors import ConfigError
from ...runtime.agreement.mismatch import Signature
from ...runtime.arena import Arena
from ...runtime.context import Context
from ..plan import AllreducePlan, make
from ..schedules import algorithms
from . import programs
from .node_barrier import memory_of
from .reductions import resolve

#: Shorter vectors are copied into the node's small slots: one barrier instead of two.
SMALL_BYTES = 8 << 10


def plans_of(context: Context, arena: Arena, op, algorithm: str) -> list[AllreducePlan]:
    """Return a plan for each vector of `arena`, kept for it; collective when made.

    Their operations carry the arena's label, so an array or another arena never meets them. A
    vector is added where it lies; a short one, and half precision, like a private one.
    """
    if (op, algorithm) in arena.plans:
        return arena.plans[op, algorithm]
    arena.check_open()
    algorithms.check_name(algorithm, algorithms.ALLREDUCE)
    if arena.comm != context.comm:
        raise ConfigError("this arena was made for another communicator; pass arena.comm")
    reductions = [resolve(op, vector.dtype) for vector in arena.vectors]
    agreed = Signature(
        "allreduce", ",".join(r.dtype.name for r in reductions),
        f"({','.join(str(vector.size) for vector in arena.vectors)})", reductions[0].name,
        algorithm, arena.label,
    )  # fmt: skip
    context.begin_agreed(agreed, "first call")
    name = _settle(context, arena, algorithm)
    plans = []
    for k, (vector, reduction) in enumerate(zip(arena.vectors, reductions, strict=True)):
        small = name == "node" and vector.nbytes < SMALL_BYTES
        lies = name in algorithms.NODE and reduction.work == vector.dtype and not small
        slots = arena.slots[k] if lies else None
        label = f"{arena.label} vector {k}"
        plans.append(make(context, vector, op, name, label, slots).owned())
    arena.plans[op, algorithm] = plans
    return plans


def _settle(context: Context, arena: Arena, algorithm: str) -> str:
    """Return the algorithm for this arena: memory of the node wherever there is some."""
    topology = arena.topology
    alone = topology.nodes == topology.size  # also a single rank
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
        algorithm = "node"  # nothing to copy: the vectors lie where all see them
    return programs.settle(context, algorithm)
