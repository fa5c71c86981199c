"""``md.allreduce``, ``md.iallreduce`` and ``md.plan``: combine an array over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType

import numpy as np

from ..arena import Arena
from ..arrays import as_array, is_writable
from ..context import Context, contexts, of, running
from ..errors import ConfigError
from . import algorithms, arenas
from .plans import Plan, find

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
        "sum", "mean", "min", "max", "prod", or a binary ufunc that keeps its dtype and is
        associative and commutative. NaN propagates.
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
        tree over the ranks that ``collectives/ordered.py`` describes; `algorithm` is only checked.

    Raises
    ------
    ConfigError
        For an unknown op or algorithm, a read-only array, the mean of integers, weights that
        add up to zero.
    MismatchError
        On all ranks, when they differ in shape, dtype, op, algorithm or order of calls.

    Notes
    -----
    The cost of each algorithm stands in its module; Thakur, Rabenseifner, Gropp, "Optimization of
    Collective Communication Operations in MPICH", IJHPCA 19(1), 2005, compares them.
    """
    if reproducible:
        algorithm = algorithms.in_order(algorithm)
    if out is None and weight is None and type(x) is _ndarray and x.flags.writeable:
        # The short way, for a plan that is there already: nothing is looked up but the plan.
        context = contexts.get(comm.handle)
        if context is not None:
            run = context.quick.get((op, algorithm, x.dtype, x.shape))
            if run is not None:
                run(x)
                return x
    context = of(comm)  # first: with it comes the hook that ends the job where a check fails
    if isinstance(x, Arena):
        if out is not None:
            raise ConfigError("an arena is reduced in place; copy what is needed and leave out=")
        total = _total(context, op, weight, algorithm)
        arenas.find(context, x, op, algorithm)(weight, total)
        return x
    target = _target(x, out)
    total = _total(context, op, weight, algorithm)
    find(context, target, op, algorithm)(target, weight, total)
    return x if out is None else out


class Handle:
    """An allreduce under way. `test` makes progress; `wait` returns the result."""

    def __init__(self, context: Context, plan: Plan, target, result, total, weight):
        self.context, self.plan, self.target, self.result = context, plan, target, result
        self.total, self.done = context.size if total is None else total, False
        number = context.begin(plan.signature, plan.runs)
        self.sequence = context.sequence
        if context.size == 1:
            self.done = True
            return
        self.program = plan.engine.program
        self.work = plan.load(target, weight, fresh=not plan.in_place(target))
        tag = context.tag(plan.signature, number)
        self.run = self.program.start(context.data, self.work, tag)
        running.append(self)

    def test(self) -> bool:
        """Make progress; true when the result is there. Local."""
        if not self.done and self.run.test():
            self.plan.store(self.target, self.work, self.total)
            self.done = True
            if self in running:
                running.remove(self)
        return self.done

    def wait(self):
        """Wait for the result and return it. Collective."""
        self.context.wait(self.test, self.sequence)
        return self.result


def iallreduce(
    comm, x, op="sum", *, out=None, algorithm="auto", weight=None, reproducible=False
) -> Handle:
    """Begin an allreduce and return a `Handle`; `x` must not be touched until it is done.

    Collective over `comm`, in the same order on all ranks. Parameters as for `allreduce`. Progress
    happens in ``handle.test()`` and in every wait of a collective of mpidist, so handles may be
    waited for in any order; MPI's own calls make none. "auto" and "native" are two_hop here, on
    many ranks the butterfly: few rounds, for progress is rare. MPI's own nonblocking allreduce is
    slower for long vectors, and only an own schedule can be left when the ranks disagree.
    """
    context = of(comm)  # first: with it comes the hook that ends the job where a check fails
    if reproducible:
        algorithm = algorithms.in_order(algorithm)
    target = _target(x, out)
    total = _total(context, op, weight, algorithm)
    algorithms.check_name(algorithm, algorithms.ALLREDUCE)
    if algorithm in (algorithms.MEASURED, algorithms.NATIVE, *algorithms.NODE):
        algorithm = "two_hop" if comm.size <= TWO_HOP_RANKS else "butterfly"
    plan = find(context, target, op, algorithm)
    return Handle(context, plan, target, x if out is None else out, total, weight)


def plan(comm, x, op="sum", *, algorithm="auto", reproducible=False) -> Callable:
    """Prepare an allreduce of `x` in place; calling the result runs it and returns `x`.

    Collective over `comm`, here and at each call. Parameters and errors as for `allreduce`. The
    function that comes back has two attributes: ``algorithm``, the one that runs (also where
    "auto" was asked for), and ``plan``.
    """
    context = of(comm)
    if reproducible:
        algorithm = algorithms.in_order(algorithm)
    if isinstance(x, Arena):
        prepared = arenas.find(context, x, op, algorithm)

        def reduce_arena():
            prepared()
            return x

        reduce_arena.algorithm, reduce_arena.plan = prepared.algorithm, prepared  # type: ignore
        return reduce_arena
    target = _target(x, None)
    made = find(context, target, op, algorithm)
    made.bound += 1
    if made.short is not None and type(target) is np.ndarray:
        reduce = made.short.bind(target)
    else:
        reduce = partial(made, target)

    def run():
        reduce()
        return x

    # Where the array is its own target, nothing has to be wrapped: one function call less.
    call = reduce if target is x and isinstance(reduce, FunctionType) else run
    call.algorithm, call.plan = made.algorithm, made  # type: ignore[attr-defined]
    return call


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


def _total(context: Context, op, weight, algorithm: str) -> float | None:
    """Sum of all ranks' weights, or None without weights. Collective when `weight` is given."""
    if weight is None:
        return None
    if op != "mean":
        raise ConfigError(f"weight={weight} needs op='mean', got op={op!r}")
    total = np.array([weight], np.float64)
    # The total divides, so its bits are the result's: in order where the sum is.
    in_order = algorithm == algorithms.ORDERED
    find(context, total, "sum", algorithms.ORDERED if in_order else algorithms.NATIVE)(total)
    if not total[0] > 0:
        raise ConfigError(f"the weights of all ranks add up to {total[0]}; expected more than 0")
    return float(total[0])
