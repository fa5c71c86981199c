"""Allreduce of an arena: ranks add each other's tensors where they lie; only nodes send."""

from __future__ import annotations

from ..arena import Arena
from ..context import Context
from ..errors import ConfigError
from ..mismatch import Signature
from . import algorithms, engines, plans
from .reductions import resolve
from .shared import memory_of

#: Shorter vectors are copied into the node's small slots: one barrier instead of two.
SMALL_BYTES = 8 << 10


class ArenaPlan:
    """One allreduce of all vectors of an arena, ready to run."""

    def __init__(self, context: Context, arena: Arena, op, algorithm: str):
        self.context, self.arena, self.op = context, arena, op
        self.algorithm = _settle(context, arena, algorithm)
        self.engines = [self._engine(k, vector) for k, vector in enumerate(arena.vectors)]
        self.plans: dict = {}
        self.runs = [e and engines.runs_of(context, e) for e in self.engines]

    def _engine(self, k: int, vector):
        """Return what adds vector `k` where it lies, or None. Collective."""
        context, slots = self.context, self.arena.slots[k]
        reduction = resolve(self.op, vector.dtype)
        small = self.algorithm == "node" and vector.nbytes < SMALL_BYTES
        if self.algorithm not in algorithms.NODE or reduction.work != vector.dtype or small:
            return None
        signature = Signature(
            "allreduce", reduction.dtype.name, f"({slots[0].size})", reduction.name,
            self.algorithm, f"arena vector {k}",
        )  # fmt: skip
        context.begin_agreed(signature, "first call")
        return engines.on_slots(context, signature, reduction, slots, memory_of(context))

    def __call__(self, weight=None, total=None) -> None:
        """Reduce the arena in place. Collective."""
        total = self.context.size if total is None else total
        for k, vector in enumerate(self.arena.vectors):
            engine = self.engines[k]
            if engine is None:
                self._plan(k, vector)(vector, weight, total)
                continue
            if weight is not None:
                vector *= vector.dtype.type(weight)
            engine(vector, self.context.begin(engine.signature, self.runs[k]), total)

    def _plan(self, k: int, vector):
        """Return the plan of vector `k` as a private one; kept, so nothing is looked up."""
        if k not in self.plans:
            self.plans[k] = plans.find(self.context, vector, self.op, self.algorithm)
            self.plans[k].bound += 1
        return self.plans[k]

    def close(self) -> None:
        """Let go of the plans of its vectors. Collective, as closing an arena is."""
        for runs in self.runs:
            if runs is not None:
                self.context.uncount(runs)
        for plan in self.plans.values():
            plans.release(plan)


def find(context: Context, arena: Arena, op, algorithm: str) -> ArenaPlan:
    """Return the plan for `arena`, kept in the arena; collective when made."""
    key = (op, algorithm)
    if key not in arena.plans:
        arena.plans[key] = ArenaPlan(context, arena, op, algorithm)
    return arena.plans[key]


def _settle(context: Context, arena: Arena, algorithm: str) -> str:
    """Return the algorithm for this arena: memory of the node wherever there is some."""
    algorithms.check_name(algorithm, algorithms.ALLREDUCE)
    if arena.comm != context.comm:
        raise ConfigError("this arena was made for another communicator; pass arena.comm")
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
    return engines.settle(context, algorithm)
