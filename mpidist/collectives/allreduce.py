"""``md.allreduce``, ``md.iallreduce`` and ``md.plan``: combine an array over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType

import numpy as np

from ..arrays import as_array, is_writable
from ..errors import ClosedError, ConfigError, shown
from ..runtime.agreement.tell_others import contexts, tell, tells
from ..runtime.arena import Arena
from ..runtime.context import Context, of, running
from .engines import arena_sum
from .engines.executor import Program, Run, heading, hear_first
from .engines.reductions import known, total_weight, weight_sums
from .plan import AllreducePlan, find
from .schedules import algorithms

_ndarray = np.ndarray

#: Nonblocking: up to so many ranks everyone may write to everyone at once.
TWO_HOP_RANKS = 16


def allreduce(comm, x, op="sum", *, out=None, algorithm="auto", weight=None, reproducible=False):
    """Combine `x` over all ranks; every rank gets the same bits.

    Collective over `comm`. In place unless `out` is given; returns the array that holds the result.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    x : array
        NumPy, CuPy or DLPack array of the same shape and dtype on every rank; any layout, any
        length (also zero). float16 and bfloat16 are summed in float32 and rounded once.
        Or an `Arena`: all of it, with no copy inside a node.
    op : str or ufunc
        "sum", "mean" (or "average"), "min", "max", "prod", MPI's SUM, PROD, MIN, MAX, or a binary
        ufunc that keeps its dtype and is associative and commutative. NaN propagates.
    out : array, optional
        Where the result goes; same shape and dtype as `x`, which then stays as it is.
    algorithm : str
        "auto" (measured once per size class), "native" (MPI's own), "node" (memory
        that the ranks of one node share), "single_copy" (their private memory, by the kernel),
        "hierarchical" ("node", and lanes between nodes), "ring", "tree", "double_tree",
        "butterfly", "recursive_doubling", "halving_doubling", "direct", "two_hop", "ordered",
        "naive".
    weight : float, optional
        With op="mean": the weight of this rank's array, e.g. its number of samples.
    reproducible : bool
        The same bits for every `algorithm`, MPI library and layout of nodes: the sum in the one
        tree over the ranks that ``schedules/fixed_tree.py`` describes; `algorithm` is only checked.

    Raises
    ------
    ConfigError
        For an unknown op or algorithm, a read-only array, the mean of integers, a weight below 0
        or not finite (on all ranks), weights that add up to zero.
    MismatchError
        On all ranks, when they differ in shape, dtype, op, algorithm or order of calls.

    Notes
    -----
    The cost of each algorithm stands in its module; Thakur, Rabenseifner, Gropp, "Optimization of
    Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, compares them.
    """
    try:
        target = x if out is None else out
        if weight is None and type(target) is _ndarray and target.flags.writeable:
            # The short way, for a plan that is there already: nothing is looked up but the plan.
            name = algorithms.chosen(algorithm, True) if reproducible is True else algorithm
            try:
                run = contexts[comm.handle].quick.get((op, name, x.dtype, x.shape))
            except (KeyError, AttributeError, TypeError):  # a first call, or refused below
                run = None
            if run is not None and (reproducible is True or reproducible is False):
                if out is None:
                    run(x)
                    return x
                if type(x) is _ndarray and out.shape == x.shape and out.dtype == x.dtype:
                    out[...] = x
                    run(out)
                    return out
        elif type(x) is Arena and weight is None and out is None and reproducible is False:
            plain = type(op) is str and type(algorithm) is str and comm == x.comm
            plans = x.plans.get((op, algorithm)) if plain else None
            if plans is not None:
                for plan, vector in zip(plans, x.vectors, strict=True):
                    plan(vector)
                return x
        context = of(comm)  # first: with it comes the hook that ends the job where a check fails
        with context.call("allreduce"):
            op, algorithm = known(op), algorithms.chosen(algorithm, reproducible)
            plans, vectors, total = _prepare(context, x, op, out, algorithm, weight)
            for plan, vector in zip(plans, vectors, strict=True):
                plan(vector, weight, total)
            return x if out is None else out
    except BaseException as error:
        tell(comm, error)
        raise


def _prepare(
    context: Context, x, op, out, algorithm: str, weight
) -> tuple[list, list, float | None]:
    """Return plans, the vector of each, and the sum of all weights. Collective."""
    if not isinstance(x, Arena):
        target = _target(x, out)
        total = sum_of_weights(context, op, weight, algorithm)
        return [find(context, target, op, algorithm)], [target], total
    if out is not None:
        raise ConfigError("an arena is reduced in place; copy what is needed and leave out=")
    total = sum_of_weights(context, op, weight, algorithm)
    return arena_sum.plans_of(context, x, op, algorithm), x.vectors, total


class Handle:
    """An allreduce under way. `test` makes progress; `wait` returns the result.

    Used by the thread that began it; `test` of another thread makes progress too, but while one
    thread is in it the other is told that it is not done.
    """

    def __init__(
        self, context: Context, plan: AllreducePlan, target, result, weight=None, weights=None
    ):
        self.context, self.plan, self.target, self.result = context, plan, target, result
        self.weights: Handle | None = weights  # the sum of all ranks' weights, under way as well
        self.done = self._inside = False
        self.error: Exception | None = None
        number = context.begin(plan.signature, plan.runs)
        self.sequence = context.sequence
        if context.size == 1:
            self._finish()
            return
        assert isinstance(plan.engine, Program)
        self.in_place = plan.in_place(target)
        self.work = plan.load(target, weight, in_place=self.in_place, pooled=False)
        hear_first(context)
        self.run = Run(plan.engine, self.work, context.tag(number), heading(context, plan.key))
        self.run.sequence = self.sequence
        running.append(self)

    def test(self) -> bool:
        """Make progress; true when the operation is done, or failed (then `wait` raises)."""
        if self.done or self._inside:
            return self.done
        self._inside = True
        try:
            if self.run.test() and (self.weights is None or self.weights.test()):
                self._finish()
                running.remove(self)
        except BaseException as error:
            self.context.break_off(error, self.sequence)
            raise
        finally:
            self._inside = False
        return self.done

    def _finish(self) -> None:
        try:
            total = self.context.size if self.weights is None else total_weight(self.weights.result)
            if self.context.size > 1:
                self.plan.store(self.target, self.work, total, in_place=self.in_place)
        except Exception as error:
            # Told by `wait`: this may be called by the wait for another operation.
            self.error = error
        self.done = True

    def wait(self):
        """Wait for the result and return it. Collective."""
        if not self.done:
            try:
                self.context.wait(self.test, self.sequence)
            except BaseException:
                self.run.finish_sends()
                raise
        if self.error is not None:
            raise self.error
        return self.result


def nonblocking(size: int) -> str:
    """Return the algorithm of a nonblocking sum that may choose: few rounds. Pure."""
    return "two_hop" if size <= TWO_HOP_RANKS else "butterfly"


@tells
def iallreduce(
    comm, x, op="sum", *, out=None, algorithm="auto", weight=None, reproducible=False
) -> Handle:
    """Begin an allreduce and return a `Handle`; `x` must not be touched until it is done.

    Collective over `comm`, in the same order on all ranks. Returns at once, whether or not the
    other ranks are there; but for the first call of all on `comm`. Parameters as for `allreduce`.
    Progress happens in ``handle.test()`` and in every wait of a collective of mpidist in this
    thread, so handles may be waited for in any order; MPI's own calls make none. "auto" and
    "native" are two_hop here, on many ranks the butterfly: few rounds, for progress is rare. MPI's
    own nonblocking allreduce is slower for long vectors, and only an own schedule can be left when
    the ranks disagree. What concerns the values, such as weights that add up to zero, is raised by
    ``handle.wait()``.
    """
    context = of(comm)  # first: with it comes the hook that ends the job where a check fails
    with context.call("iallreduce"):
        op = known(op)
        algorithm = algorithms.chosen(algorithm, reproducible)
        target = _target(x, out)
        if algorithm in (algorithms.MEASURED, algorithms.NATIVE, *algorithms.NODE):
            algorithm = nonblocking(comm.size)
        weights = None
        if weight is not None:
            _check_weighted(op, weight)
            sums = weight_sums(weight, context.rank)
            weight = float(sums[0])
            weights = Handle(context, _schedule(context, sums, "sum", algorithm), sums, sums)
        plan = _schedule(context, target, op, algorithm)
        return Handle(context, plan, target, x if out is None else out, weight, weights)


def _schedule(context: Context, x, op, algorithm: str) -> AllreducePlan:
    """Return the plan of a schedule, made without waiting for anybody."""
    return find(context, x, op, algorithm, agreed=False)


class Plan(partial):
    """What `md.plan` returns: call it to run the allreduce. Every call is collective.

    A `partial`, since calling one costs 40 ns less than a method.

    Attributes
    ----------
    algorithm : str
        The one that runs, also where "auto" was asked for.
    plan : object
        What it runs; a list, one for each vector, where that is an arena.
    """

    algorithm: str
    plan: object
    context: Context

    def close(self) -> None:
        """Give back what the plan keeps; no call after this. Idempotent; all ranks must do it."""
        release = self.__dict__.pop("release", None)
        if release is not None:
            # The one way to make a partial call something else.
            self.__setstate__((_closed, (self.context,), {}, self.__dict__))  # type: ignore[attr-defined]
            release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _closed(context: Context):
    with context.call("plan"):  # the other ranks may wait for this one
        raise ClosedError("this plan was closed; make a new one with md.plan")


def _bound(context: Context, run: Callable, algorithm: str, plan, release: Callable) -> Plan:
    made = Plan(run)
    made.__dict__.update(context=context, algorithm=algorithm, plan=plan, release=release)
    return made


@tells
def plan(comm, x, op="sum", *, algorithm="auto", reproducible=False) -> Plan:
    """Prepare an allreduce of `x` in place; calling the result runs it and returns `x`.

    Collective over `comm`, here and at each call. Parameters and errors as for `allreduce`. What it
    keeps is kept until ``close()``, or the end of a ``with``, on all ranks.

    >>> with md.plan(comm, gradient, "mean") as reduce:
    ...     for batch in batches:
    ...         compute(batch, gradient)
    ...         reduce()
    """
    context = of(comm)
    with context.call("plan"):
        op = known(op)
        algorithm = algorithms.chosen(algorithm, reproducible)
        if isinstance(x, Arena):
            plans = arena_sum.plans_of(context, x, op, algorithm)

            def reduce_arena():
                try:
                    x.check_open()
                    for each, vector in zip(plans, x.vectors, strict=True):
                        each(vector)
                    return x
                except BaseException as error:  # also between two vectors
                    context.escaped(error)
                    raise

            # They go with their arena.
            return _bound(context, reduce_arena, plans[0].algorithm, plans, lambda: None)
        target = _target(x, None)
        made = find(context, target, op, algorithm).owned()
        if made.short is not None and type(target) is np.ndarray:
            reduce = made.short.bind(target)
        else:
            reduce = partial(made, target)

        def run():
            reduce()
            return x

        # Where the array is its own target, nothing has to be wrapped: one function call less.
        call = reduce if target is x and isinstance(reduce, FunctionType) else run
        return _bound(context, call, made.algorithm, made, made.release)


def _target(x, out):
    """Return the array that is reduced in place: `x`, or `out` after it has taken the values."""
    x = as_array(x)
    if out is None:
        if not is_writable(x):
            raise ConfigError(
                f"array of shape {x.shape} is read-only; the result is written in place: "
                "pass out=, or a writable copy"
            )
        return x
    out = as_array(out)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ConfigError(
            f"out has shape {out.shape} and dtype {out.dtype}, expected {x.shape} and {x.dtype}"
        )
    if not is_writable(out):
        raise ConfigError(f"out of shape {out.shape} is read-only; pass a writable array")
    out[...] = x
    return out


def _check_weighted(op, weight) -> None:
    if op != "mean":
        raise ConfigError(f"weight={shown(weight)} needs op='mean', got op={shown(op)}")


def sum_of_weights(context: Context, op, weight, algorithm: str) -> float | None:
    """Sum of all ranks' weights, or None without weights. Collective when `weight` is given."""
    if weight is None:
        return None
    _check_weighted(op, weight)
    sums = weight_sums(weight, context.rank)
    # The total divides, so its bits are the result's: in order where the sum is.
    in_order = algorithm == algorithms.ORDERED
    find(context, sums, "sum", algorithms.ORDERED if in_order else algorithms.NATIVE)(sums)
    context.under_way = False  # the sum is over; what is wrong with it all ranks raise alike
    return total_weight(sums)
