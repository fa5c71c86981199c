"""A plan: one allreduce problem (operation, dtype, shape, algorithm) made ready to run many times.

Making a plan is collective: the ranks prove to each other that they begin the same operation, then
choose, build and allocate. Running it looks nothing up. Plans live in the communicator's context,
at most `context.MAX_PLANS` of them; one that has not run lately goes first.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..arrays import copy_into, host_empty, is_device, mpi_direct, synchronize
from ..events import Counters
from ..runtime.agreement.mismatch import Signature
from ..runtime.context import MAX_PLANS, Context
from . import selection
from .engines import programs
from .engines.reductions import Reduction, device_safe, finish_mean, resolve
from .schedules import algorithms


class AllreducePlan:
    """One allreduce, ready to run on any array of its shape and dtype."""

    bound = 0  # how many have it from `md.plan`, or for an arena: they call it at any time

    def __init__(self, context: Context, signature: Signature, reduction: Reduction, shape, name):
        self.context, self.signature, self.reduction = context, signature, reduction
        self.shape, self.n, self.algorithm = shape, prod(shape), name
        self.key: tuple = ()  # in the context's plans
        self.seen = 1  # runs when `remember` last looked; the one it is made for does not count
        native = name == algorithms.NATIVE
        self._device_safe = name not in algorithms.NODE and device_safe(reduction, native)
        self.short: Any = None
        self.engine: Any = None
        if context.size > 1:
            self.short, self.engine = programs.make(context, signature, reduction, shape, name)
        # Kept here, for a plan may be dropped while a `Handle` of it is under way.
        self.divides = self.engine is not None and self.engine.divides
        if self.short is not None:
            self.runs = self.short.runs
        else:
            engine = self.engine
            self.runs = programs.runs_of(context, engine) if engine else context.count(Counters())

    def __call__(self, x, weight=None, total=None) -> None:
        """Reduce `x` in place as the next operation of the communicator. Collective."""
        try:
            total = self.context.size if total is None else total
            if self.short is not None:
                self._run_short(x, weight, total)
            elif self.engine is None:  # one rank
                self.context.begin(self.signature, self.runs)
            else:
                with self.context.call(self.signature.kind):
                    self._run(x, weight, total)
        except BaseException as error:
            self.context.escaped(error)
            raise

    def _run_short(self, x, weight, total) -> None:
        if weight is None and type(x) is np.ndarray:
            self.short.run(x, total)
            return
        # Device arrays and weights go through a host vector; the mean is divided in there.
        shaped = self.load(x, weight, in_place=False, pooled=False).reshape(self.shape)
        self.short.run(shaped, total)
        copy_into(x, shaped)

    def _run(self, x, weight, total) -> None:
        number = self.context.begin(self.signature, self.runs)
        in_place = self.in_place(x)
        work = self.load(x, weight, in_place=in_place)
        self.engine(work, number, total)
        self.store(x, work, total, in_place=in_place)
        if not in_place:
            self.context.pool.give(work, x)

    def load(self, x, weight=None, *, in_place: bool, pooled: bool = True):
        """Return `x` as a flat vector of the work dtype for MPI: itself if `in_place`. Local.

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
        """Whether `x` can be reduced where it lies: C order, the work dtype, MPI takes it. Local.

        Ranks need not answer alike: the messages are the same from host and device memory.
        """
        flags = x.flags
        if not (flags.c_contiguous and x.dtype == self.reduction.work):
            return False
        if isinstance(x, np.ndarray):
            return flags.aligned  # MPI's datatypes begin at multiples of their alignment
        return not is_device(x) or (self._device_safe and mpi_direct(x))

    def store(self, x, work, total, *, in_place: bool) -> None:
        """Divide a mean and put the result into `x`, rounding once. Local."""
        if not self.divides:
            finish_mean(self.reduction, work, total)
        if in_place:
            synchronize(x)
        else:
            copy_into(x, work.reshape(self.shape))

    def close(self) -> None:
        """Free what the plan made. Local."""
        for part in (self.short, self.engine):
            if part is not None:
                part.close()
        self.context.uncount(self.runs)
        self.short = self.engine = None


def find(context: Context, x, op, algorithm: str, *, agreed: bool = True) -> AllreducePlan:
    """Return the plan for `x`, making it when it is not there yet. Collective when made.

    Not `agreed`: made without a word to the others, which a schedule allows, for its messages say
    what they belong to. Local then.
    """
    dtype = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    key = ("allreduce", op, algorithm, dtype, x.shape)
    plan = context.plans.get(key)
    if plan is None:
        plan = make(context, dtype, x.shape, op, algorithm, agreed=agreed)
        plan.key = key
        remember(context, key, plan)
        context.quick[key[1:]] = plan if plan.short is None else plan.short.run
    return plan


def remember(context: Context, key, plan) -> None:
    """Keep a plan; where there are too many, drop one that has not run lately. Local.

    The plans stand in a line. One that ran since the last look goes to its end, the first that did
    not is dropped (the "clock" of page caches): runs are counted anyway, a time of each run is not.
    """
    if len(context.plans) >= MAX_PLANS:
        # Every rank has run the same operations, so every rank drops the same plan.
        loose = [k for k, kept in context.plans.items() if not kept.bound]
        for k in (*loose, *loose[:1]):  # when all ran, the first comes round again
            kept, runs = context.plans[k], context.plans[k].runs.number()
            if runs <= kept.seen:
                context.drop(k)
                break
            kept.seen = runs
            context.plans.move_to_end(k)
    context.plans[key] = plan


def release(plan: AllreducePlan) -> None:
    """Let go of a plan that was `bound`; the last one drops it. Local; all ranks must do it."""
    plan.bound -= 1
    # What a failed communicator has begun never ends and cannot be freed.
    if not plan.bound and not plan.context.stopped:
        plan.context.drop(plan.key)


def make(
    context: Context, dtype: np.dtype, shape, op, algorithm: str, *, agreed=True, extra: str = ""
) -> AllreducePlan:
    """Return a new plan that no cache knows; `extra` belongs to its signature. Collective."""
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
    return AllreducePlan(context, signature, reduction, shape, name)
