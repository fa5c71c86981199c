"""Plans: operations that are prepared once and can run many times, and the cache of plans.

Making a plan is collective: the ranks check that they begin the same operation, choose an
algorithm, build its steps and allocate memory. Each communicator has a cache, which keeps all plans
that are in use, and at most 256 others (`context.MAX_PLANS`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..arrays import copy_into, device_of, host_empty, is_device, mpi_direct, synchronize
from ..runtime.agreement.mismatch import Signature
from ..runtime.context import MAX_PLANS, Context
from . import selection
from .engines import programs
from .engines.executor import Engine
from .engines.reductions import Reduction, device_safe, finish_mean, resolve
from .schedules import algorithms


class CachedPlan:
    """One prepared operation on a 1-D vector: the object that runs it, and a count of its runs."""

    #: The number of owners: objects (of `md.plan`, arenas, gradients) that may run the plan at any
    #: time.
    owners = 0
    #: The number of runs when `remember` last looked at the plan. The initial value is 1, because
    #: the first run of a new plan does not count.
    seen = 1

    def __init__(self, context: Context, signature: Signature, engine, runs=None):
        self.context, self.signature = context, signature
        self.engine: Any = engine  # an `executor.Engine`; None if there is only one rank
        self.key = signature.key
        self.place: tuple = ()  # the key in the context's plans; () for plans of an arena
        kind = engine or Engine()
        self.runs = runs or context.count(kind.counters, numbers=not kind.tagged)

    def run(self, vector) -> None:
        """Run the operation on a 1-D vector, in place. Collective."""
        context = self.context
        number = context.begin(self.signature, self.runs)
        if context.size > 1:
            # A root that only sends does not wait for other ranks. So the root checks here whether
            # other ranks have failed.
            context.statuses.listen()
            context.statuses.check_raised()
        # If two ranks both act as root and send, neither of the two waits, so neither notices the
        # mistake. Each rank therefore keeps a hash of all operations that have a root or blocks.
        # The ranks compare their hashes in the next operation in which they wait, and at the end of
        # the job.
        context.chain = (context.chain * 0x9E3779B1 + self.key) % (1 << 40)
        self.engine.run(vector, self.key, number)
        context.under_way = False

    def owned(self):
        """Return this plan; it stays cached until `release` is called. All ranks must call this."""
        self.owners += 1
        return self

    def release(self) -> None:
        """End a use of this plan that `owned` began; if it was the only use, close the plan.

        All ranks must call this method.
        """
        self.owners -= 1
        # Operations of a failed communicator never end, so their memory cannot be freed.
        if not (self.owners or self.context.failed or self.context.closed):
            self.context.drop(self.place) if self.place else self.close()

    def close(self) -> None:
        """Free the memory and the MPI requests of this prepared operation."""
        if self.engine is not None:
            self.engine.close()
        self.context.uncount(self.runs)


class AllreducePlan(CachedPlan):
    """One prepared allreduce, which can run on any array of its shape and dtype.

    If the array lies in memory that the ranks of a node share, `slots` lists the vectors of all
    ranks of this node.
    """

    def __init__(
        self, context: Context, signature: Signature, reduction: Reduction, shape, name, slots=None
    ):
        self.short, engine = programs.make_engine(context, signature, reduction, shape, name, slots)
        super().__init__(context, signature, engine, self.short and self.short.runs)
        self.reduction = reduction
        self.shape, self.n, self.algorithm = shape, prod(shape), name
        native = name == algorithms.NATIVE
        self._device_safe = name not in algorithms.NODE and device_safe(reduction, native)
        # `counters` is a copy of the engine's attribute, because a plan may be closed while a
        # `Handle` of the plan is still running.
        self.divides = engine is not None and engine.divides and reduction.mean

    def __call__(self, x, weight=None, total=None):
        """Run the allreduce on `x`, in place; return `x`. Collective.

        For a weighted mean, `weight` is this rank's weight, and `total` the sum of all weights.
        """
        context, engine = self.context, self.engine
        try:
            if total is None:
                total = context.size
            if self.short is not None:
                if weight is None and type(x) is np.ndarray:
                    return self.short.run(x, total)
                # A device array, or an array with a weight, is first copied to a vector in host
                # memory.
                shaped = self.load(x, weight, in_place=False, pooled=False).reshape(self.shape)
                copy_into(x, self.short.run(shaped, total))
                return x
            if engine is None:  # one rank
                context.begin(self.signature, self.runs)
                return x
            with context.call(self.signature.kind):
                number = context.begin(self.signature, self.runs)
                in_place = self.in_place(x)
                work = self.load(x, weight, in_place=in_place)
                try:
                    divisor = work.dtype.type(total) if self.divides else None
                    engine.run(work, self.key, number, divisor)
                except BaseException as error:
                    if engine.gate is not None:
                        engine.gate.leave(error)
                    raise
                self.store(x, work, total, in_place=in_place)
                if not in_place:
                    context.pool.give(work, x)
                return x
        except BaseException as error:
            context.escaped(error)
            raise

    def load(self, x, weight=None, *, in_place: bool, pooled: bool = True):
        """Return ``weight * x`` as a 1-D vector with the dtype in which sums are computed.

        If `in_place` is true, `x` itself is multiplied, and the result is a view of `x`. Otherwise
        the result is a copy in C order. Without `weight` nothing is multiplied.
        """
        if in_place:
            work = x.reshape(-1)
        else:
            take = self.context.pool.take if pooled else host_empty
            work = take(self.n, self.reduction.work, like=x)
            copy_into(work.reshape(self.shape), x)
        if weight is not None:
            with device_of(work):
                np.multiply(work, work.dtype.type(weight), out=work)
        synchronize(work)
        return work

    def in_place(self, x) -> bool:
        """Whether `x` can be reduced without a copy; the answer may differ between ranks."""
        flags = x.flags
        if not (flags.c_contiguous and x.dtype == self.reduction.work):
            return False
        if isinstance(x, np.ndarray):
            return flags.aligned  # MPI needs aligned elements
        return not is_device(x) or (self._device_safe and mpi_direct(x))

    def store(self, x, work, total, *, in_place: bool) -> None:
        """Write the result of the operation to `x`, rounded to the dtype of `x`.

        If the operation is a mean, the sum `work` is first divided by `total`, unless the engine
        has done so. If `in_place` is true, `work` is a view of `x`.
        """
        if not self.divides:
            finish_mean(self.reduction, work, total)
        if in_place:
            synchronize(x)
        else:
            copy_into(x, work.reshape(self.shape))

    def close(self) -> None:
        """Free the memory and the MPI requests of this prepared operation."""
        if self.short is not None:
            self.short.close()
        super().close()
        self.short = self.engine = None


def find(context: Context, x, op, algorithm: str, *, agreed: bool = True) -> AllreducePlan:
    """Return the cached plan (prepared allreduce) for `x`; collective if the plan must be made.

    With ``agreed=False`` the ranks do not check first that they make the same call. Only algorithms
    whose messages carry a description of the operation allow this.
    """
    dtype = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    place = ("allreduce", op, algorithm, dtype, x.shape)
    plan = context.plans.get(place)
    if plan is None:
        plan = make_plan(context, x, op, algorithm, agreed=agreed)
        remember(context, place, plan)
        context.quick[place[1:]] = plan if plan.short is None else plan.short.run
    return plan


def remember(context: Context, place: tuple, plan: CachedPlan) -> None:
    """Put a plan (prepared operation) into the cache under the key `place`.

    If the cache is full, drop a plan that has not run lately.
    """
    loose = [key for key, kept in context.plans.items() if not kept.owners]
    if len(loose) >= MAX_PLANS:
        # Every rank has run the same operations, so every rank drops the same plan.
        for key in (*loose, *loose[:1]):  # if all have run, the first is dropped
            kept, runs = context.plans[key], context.plans[key].runs.number()
            if runs <= kept.seen:
                context.drop(key)
                break
            kept.seen = runs
            context.plans.move_to_end(key)
    context.plans[place], plan.place = plan, place


def make_plan(
    context: Context, x, op, algorithm: str, extra: str = "", slots=None, *, agreed: bool = True
) -> AllreducePlan:
    """Return a new plan (prepared allreduce) for `x`, without storing it in the cache. Collective.

    `extra` is a text that is added to the description of the operation, which the ranks compare. If
    the array lies in memory that the ranks of a node share, `slots` lists the vectors of all ranks
    of this node.
    """
    shape, dtype = x.shape, x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    algorithms.check_name(algorithm, algorithms.ALLREDUCE)
    reduction = resolve(op, dtype)
    signature = Signature(
        "allreduce", dtype.name, f"({', '.join(map(str, shape))})", reduction.name, algorithm, extra
    )
    if agreed:
        context.begin_agreed(signature, "first call")
    name = algorithm
    if algorithm == algorithms.MEASURED:
        name = selection.choose(context, signature, reduction, shape, AllreducePlan)
    name = programs.settle(context, name)
    return AllreducePlan(context, signature, reduction, shape, name, slots)
