"""Allreduce of an arena: ranks add each other's tensors where they lie; only nodes send."""

from __future__ import annotations

from ...errors import ClosedError, ConfigError, ProtocolError
from ...runtime.agreement.mismatch import Signature
from ...runtime.arena import Arena
from ...runtime.context import Context
from .. import plan as plans
from ..schedules import algorithms
from . import programs
from .node_barrier import memory_of
from .reductions import resolve

#: Shorter vectors are copied into the node's small slots: one barrier instead of two.
SMALL_BYTES = 8 << 10


class ArenaPlan:
    """One allreduce of all vectors of an arena, ready to run. Collective when made.

    Its operations carry the arena's label, so an array or another arena never meets it.
    """

    def __init__(self, context: Context, arena: Arena, op, algorithm: str):
        self.context, self.arena, self.op = context, arena, op
        reductions = [resolve(op, vector.dtype) for vector in arena.vectors]
        agreed = Signature(
            "allreduce", ",".join(r.dtype.name for r in reductions),
            f"({','.join(str(vector.size) for vector in arena.vectors)})", reductions[0].name,
            algorithm, arena.label,
        )  # fmt: skip
        context.begin_agreed(agreed, "first call")
        self.algorithm = _settle(context, arena, algorithm)
        #: For each vector what adds it where it lies; None: a plan as for a private one.
        self.engines = [self._engine(k, r) for k, r in enumerate(reductions)]
        self.plans = {
            k: plan_of(context, arena, vector, op, self.algorithm, f"vector {k}")
            for k, vector in enumerate(arena.vectors)
            if self.engines[k] is None
        }
        self.runs = [e and programs.runs_of(context, e) for e in self.engines]

    def _engine(self, k: int, reduction):
        """Return what adds vector `k` where it lies, or None. Local, on all ranks alike."""
        vector, slots = self.arena.vectors[k], self.arena.slots[k]
        small = self.algorithm == "node" and vector.nbytes < SMALL_BYTES
        if self.algorithm not in algorithms.NODE or reduction.work != vector.dtype or small:
            return None
        signature = Signature(
            "allreduce", reduction.dtype.name, f"({vector.size})", reduction.name,
            self.algorithm, f"{self.arena.label} vector {k}",
        )  # fmt: skip
        return programs.on_slots(self.context, signature, reduction, slots, memory_of(self.context))

    def __call__(self, weight=None, total=None) -> None:
        """Reduce the arena in place; a list has a weight, or None, per vector. Collective."""
        if not self.engines:
            raise ClosedError("this arena was closed")
        context = self.context
        total = context.size if total is None else total
        weights = weight if isinstance(weight, list) else [weight] * len(self.engines)
        try:
            for k, (vector, weight) in enumerate(zip(self.arena.vectors, weights, strict=True)):
                engine = self.engines[k]
                if engine is None:
                    self.plans[k](vector, weight, total)
                    continue
                if weight is not None:
                    vector *= vector.dtype.type(weight)
                engine(vector, context.begin(engine.signature, self.runs[k]), total)
        except ProtocolError:  # refused, so nothing was begun
            raise
        except BaseException as error:
            context.break_off(error)
            raise

    def close(self) -> None:
        """Let go of what its vectors needed. Local; on all ranks between the same operations."""
        for runs in self.runs:
            if runs is not None:
                self.context.uncount(runs)
        for plan in self.plans.values():
            plan.close()
        self.engines, self.plans, self.runs = [], {}, []


def plan_of(
    context: Context, arena: Arena, vector, op, algorithm: str, part: str
) -> plans.AllreducePlan:
    """Return a plan for `part` of an arena that no other vector shares. Collective.

    The caller closes it: it is in no cache.
    """
    dtype = vector.dtype if vector.dtype.isnative else vector.dtype.newbyteorder("=")
    extra = f"{arena.label} {part}"
    return plans.make(context, dtype, vector.shape, op, algorithm, extra=extra)


def find(context: Context, arena: Arena, op, algorithm: str) -> ArenaPlan:
    """Return the plan for `arena`, kept in the arena; collective when made."""
    key = (op, algorithm)
    if key not in arena.plans:
        arena.check_open()
        algorithms.check_name(algorithm, algorithms.ALLREDUCE)
        if arena.comm != context.comm:
            raise ConfigError("this arena was made for another communicator; pass arena.comm")
        arena.plans[key] = ArenaPlan(context, arena, op, algorithm)
    return arena.plans[key]


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
