"""Plans: operations made ready to run many times, and the one cache that holds them.

Making a plan is collective: the ranks prove to each other that they begin the same operation, then
choose, build and allocate. Running it looks nothing up. Plans live in the communicator's context,
at most `context.MAX_PLANS` of them beside those that somebody owns; one that has not run lately
goes first.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..arrays import copy_into, host_empty, is_device, mpi_direct, synchronize
from ..runtime.agreement.mismatch import Signature
from ..runtime.context import MAX_PLANS, Context
from . import selection
from .engines import programs
from .engines.executor import Engine
from .engines.reductions import Reduction, device_safe, finish_mean, resolve
from .schedules import algorithms


class CachedPlan:
    """One operation on a flat vector, ready to run again: its engine, and how often that ran."""

    #: How many own it, for `md.plan`, an arena or gradients: they run it at any time.
    owners = 0
    #: Runs when `remember` last looked; the one that it is made for does not count.
    seen = 1

    def __init__(self, context: Context, signature: Signature, engine, runs=None):
        self.context, self.signature = context, signature
        self.engine: Any = engine  # an `executor.Engine`; None on one rank
        self.key = signature.key
        self.place: tuple = ()  # in the context's plans; those of an arena are in no cache
        kind = engine or Engine()
        self.runs = runs or context.count(kind.counters, numbers=not kind.tagged)

    def run(self, vector) -> None:
        """Run it on a flat vector, in place, and wait. Collective.

        For the operations in which not every rank waits for all: rooted ones, and blocks.
        """
        context = self.context
        number = context.begin(self.signature, self.runs)
        if context.size > 1:
            # A root that only sends waits for nobody, so it would not hear that others have failed.
            context.statuses.listen()
            context.statuses.check_raised()
        # Nor would anybody hear of two roots that sent at once. What every rank remembers of such
        # operations is compared by the next one that is waited for, and at the end.
        context.chain = (context.chain * 0x9E3779B1 + self.key) % (1 << 40)
        self.engine.run(vector, self.key, number)
        context.under_way = False

    def owned(self):
        """Return the plan, which stays now until `release`. All ranks must do it."""
        self.owners += 1
        return self

    def release(self) -> None:
        """Let go of a plan that is `owned`; the last one drops it. All ranks must do it."""
        self.owners -= 1
        # What a failed communicator has begun never ends and cannot be freed.
        if not (self.owners or self.context.failed or self.context.closed):
            self.context.drop(self.place) if self.place else self.close()

    def close(self) -> None:
        """Free what the plan made."""
        if self.engine is not None:
            self.engine.close()
        self.context.uncount(self.runs)


class AllreducePlan(CachedPlan):
    """One allreduce, ready to run on any array of its shape and dtype.

    With `slots` the array is this rank's vector in an arena, see `programs.make`.
    """

    def __init__(
        self, context: Context, signature: Signature, reduction: Reduction, shape, name, slots=None
    ):
        self.short, engine = programs.make(context, signature, reduction, shape, name, slots)
        super().__init__(context, signature, engine, self.short and self.short.runs)
        self.reduction = reduction
        self.shape, self.n, self.algorithm = shape, prod(shape), name
        native = name == algorithms.NATIVE
        self._device_safe = name not in algorithms.NODE and device_safe(reduction, native)
        # Kept here, for a plan may be dropped while a `Handle` of it is under way.
        self.divides = engine is not None and engine.divides and reduction.mean

    def __call__(self, x, weight=None, total=None) -> None:
        """Reduce `x` in place as the next operation of the communicator. Collective."""
        context, engine = self.context, self.engine
        try:
            if total is None:
                total = context.size
            if self.short is not None:
                if weight is None and type(x) is np.ndarray:
                    self.short.run(x, total)
                else:
                    self._run_staged(x, weight, total)
                return
            if engine is None:  # one rank
                context.begin(self.signature, self.runs)
                return
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
        except BaseException as error:
            context.escaped(error)
            raise

    def _run_staged(self, x, weight, total) -> None:
        """Run a short engine on a device array, or with a weight: through a host vector."""
        shaped = self.load(x, weight, in_place=False, pooled=False).reshape(self.shape)
        self.short.run(shaped, total)
        copy_into(x, shaped)

    def load(self, x, weight=None, *, in_place: bool, pooled: bool = True):
        """Return `x` as a flat vector of the work dtype for MPI: itself if `in_place`.

        Otherwise packed in C order into host memory, so ranks may hold the same array in different
        memory orders. `pooled`: that memory belongs to the context's pool.
        """
        if in_place:
            work = x.reshape(-1)
        else:
            if pooled:
                work = self.context.pool.take(self.n, self.reduction.work, like=x)
            else:
                work = host_empty(self.n, self.reduction.work, like=x)
            copy_into(work.reshape(self.shape), x)
        if weight is not None:
            np.multiply(work, work.dtype.type(weight), out=work)
        synchronize(work)
        return work

    def in_place(self, x) -> bool:
        """Whether `x` can be reduced where it lies: C order, the work dtype, MPI takes it.

        Ranks need not answer alike: the messages are the same from host and device memory.
        """
        flags = x.flags
        if not (flags.c_contiguous and x.dtype == self.reduction.work):
            return False
        if isinstance(x, np.ndarray):
            return flags.aligned  # MPI's datatypes begin at multiples of their alignment
        return not is_device(x) or (self._device_safe and mpi_direct(x))

    def store(self, x, work, total, *, in_place: bool) -> None:
        """Divide a mean and put the result into `x`, rounding once."""
        if not self.divides:
            finish_mean(self.reduction, work, total)
        if in_place:
            synchronize(x)
        else:
            copy_into(x, work.reshape(self.shape))

    def close(self) -> None:
        """Free what the plan made."""
        if self.short is not None:
            self.short.close()
        super().close()
        self.short = self.engine = None


def find(context: Context, x, op, algorithm: str, *, agreed: bool = True) -> AllreducePlan:
    """Return the plan for `x`, making it when it is not there yet. Collective when made.

    Not `agreed`: made without a word to the others, which a schedule allows, for its messages say
    what they belong to.
    """
    dtype = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    place = ("allreduce", op, algorithm, dtype, x.shape)
    plan = context.plans.get(place)
    if plan is None:
        plan = make(context, x, op, algorithm, agreed=agreed)
        remember(context, place, plan)
        context.quick[place[1:]] = plan if plan.short is None else plan.short.run
    return plan


def remember(context: Context, place: tuple, plan: CachedPlan) -> None:
    """Keep a plan; where there are too many, drop one that has not run lately.

    The plans stand in a line. One that ran since the last look goes to its end, the first that did
    not is dropped (the "clock" of page caches): runs are counted anyway, a time of each run is not.
    """
    loose = [key for key, kept in context.plans.items() if not kept.owners]
    if len(loose) >= MAX_PLANS:
        # Every rank has run the same operations, so every rank drops the same plan.
        for key in (*loose, *loose[:1]):  # when all ran, the first comes round again
            kept, runs = context.plans[key], context.plans[key].runs.number()
            if runs <= kept.seen:
                context.drop(key)
                break
            kept.seen = runs
            context.plans.move_to_end(key)
    context.plans[place], plan.place = plan, place


def make(
    context: Context, x, op, algorithm: str, extra: str = "", slots=None, *, agreed: bool = True
) -> AllreducePlan:
    """Return a new plan for `x`, in no cache; see `find`. Collective.

    That of an arena, or of gradients, has an `extra`, a part of its signature that nobody else has.
    It goes with its owner, also where that is forgotten and not closed. `slots`: see
    `AllreducePlan`.
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
