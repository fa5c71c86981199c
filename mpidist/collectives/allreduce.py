"""``md.allreduce``, ``md.iallreduce`` and ``md.plan``: combine an array over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..arrays import as_array, copy_into, is_device, is_writable
from ..errors import ClosedError, ConfigError, shown
from ..runtime.agreement.tell_others import contexts, tell, tells
from ..runtime.context import Context, of, running
from ..runtime.node_memory.arena import Arena
from .engines import arena_sum
from .engines.executor import Program, Run, heading, hear_first
from .engines.prepare_call import check_out
from .engines.reductions import known, total_weight, weight_sums
from .plan import AllreducePlan, find, make_plan, remember
from .schedules import algorithms

_ndarray = np.ndarray

#: On at most this many ranks, a nonblocking sum uses the algorithm `two_hop`, in which every rank
#: sends to every other rank.
TWO_HOP_RANKS = 16


def allreduce(comm, x, op="sum", *, out=None, algorithm="auto", weight=None, reproducible=False):
    """Combine the arrays `x` of all ranks elementwise; every rank gets the same bits.

    Collective over `comm`. The result is written to `out` if given, and otherwise to `x`. Returns
    the array that holds the result.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
    x : array
        NumPy, CuPy or DLPack array of the same shape and dtype on every rank; any layout, any
        length (also zero). float16 and bfloat16 are summed in float32 and rounded once. `x` may
        also be an `Arena` (tensors in shared memory); the function then combines all its tensors.
    op : str or ufunc
        "sum", "mean" (or "average"), "min", "max", "prod", MPI's SUM, PROD, MIN, MAX, or a binary
        ufunc that keeps its dtype and is associative and commutative. NaN propagates.
    out : array, optional
        An array of the shape and dtype of `x` that receives the result; `x` then does not change.
    algorithm : str
        "auto" (the fastest, measured once for vectors of about this length), "native" (MPI's own),
        "node" (in memory that the ranks of a node share), "single_copy" (the kernel copies between
        the private memories of the ranks of a node), "hierarchical" (first inside the nodes, then
        between them), "ring", "tree", "double_tree", "butterfly", "recursive_doubling",
        "halving_doubling", "direct", "two_hop", "ordered", "naive".
    weight : float, optional
        With op="mean": the weight of this rank's array, for example its number of samples.
    reproducible : bool
        Add in an order that depends on the number of ranks alone, so that the result has the same
        bits with every MPI library and on any number of nodes. `algorithm` is then checked but not
        used.

    Raises
    ------
    ConfigError
        For an unknown op or algorithm, a read-only array, and the mean of integers. If the weight
        of one rank is negative or not finite, or all weights add up to zero, every rank raises this
        error.
    MismatchError
        On all ranks, if they differ in shape, dtype, op, algorithm or the order of their calls.

    Notes
    -----
    Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
    IJHPCA 19(1), 2005, compare such algorithms.
    """
    try:
        target = x if out is None else out
        if weight is None and type(target) is _ndarray and target.flags.writeable:
            # This is the fast path: if a plan exists for these arguments, the plan runs at once.
            name = algorithms.chosen(algorithm, True) if reproducible is True else algorithm
            try:
                run = contexts[comm.handle].quick.get((op, name, x.dtype, x.shape))
            except (KeyError, AttributeError, TypeError):  # a first call, or a bad argument
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
        context = of(comm)  # first, since `of` installs the hook that ends a failed job
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
    """Return the prepared operations of an allreduce, their vectors, and the sum of weights.

    Collective.
    """
    if not isinstance(x, Arena):
        target = _target(x, out)
        total = sum_of_weights(context, op, weight, algorithm)
        return [find(context, target, op, algorithm)], [target], total
    if out is not None:
        raise ConfigError("an arena is reduced in place; copy the tensors first, and pass no out=")
    total = sum_of_weights(context, op, weight, algorithm)
    return arena_sum.plans_of(context, x, op, algorithm), x.vectors, total


class Handle:
    """A nonblocking allreduce that is running; `test` makes progress, `wait` waits for the result.

    Only the thread that began the operation may call `wait`. Any thread may call `test`, which
    returns False while another thread is in `test`.
    """

    def __init__(
        self, context: Context, plan: AllreducePlan, target, result, weight=None, weights=None
    ):
        self.context, self.plan, self.target, self.result = context, plan, target, result
        self.weights: Handle | None = weights  # a running sum of all ranks' weights
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
        """Continue the operation; return whether it has ended, by a result or by an error."""
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
            # The error is stored here, and `wait` raises it, because this method may run inside the
            # wait of another operation.
            self.error = error
        self.done = True

    def wait(self):
        """Wait for the result and return it. Collective."""
        if not self.done:
            try:
                self.context.wait(self.test, self.sequence)
            except BaseException as error:
                self.run.finish_sends(error)
                raise
        if self.error is not None:
            raise self.error
        return self.result


def nonblocking(size: int) -> str:
    """Return the algorithm that "auto" means for nonblocking sums on `size` ranks."""
    return "two_hop" if size <= TWO_HOP_RANKS else "butterfly"


@tells
def iallreduce(
    comm, x, op="sum", *, out=None, algorithm="auto", weight=None, reproducible=False
) -> Handle:
    """Begin an allreduce and return a `Handle`; do not use `x` before the operation has ended.

    Collective over `comm`, in the same order on all ranks. The docstring of `allreduce` explains
    the parameters; here `x` must not be an `Arena` (tensors in shared memory; pass ``arena.flat``).
    The function returns at once, even if other ranks are late; only the first call on `comm` waits
    for the other ranks.

    The operation advances only while a thread calls ``handle.test()``, or while the thread that has
    begun the operation waits in a collective of mpidist. A program may wait for its handles in any
    order.

    The algorithms "auto" and "native" mean "two_hop" on up to 16 ranks, and "butterfly" on more
    ranks. Errors in the values, for example weights that add up to zero, are raised by
    ``handle.wait()``.
    """
    context = of(comm)  # first, since `of` installs the hook that ends a failed job
    with context.call("iallreduce"):
        op, algorithm = known(op), algorithms.chosen(algorithm, reproducible)
        if isinstance(x, Arena):
            raise ConfigError("iallreduce takes no arena; pass arena.flat, or call allreduce")
        target = _target(x, out)
        if algorithm in (algorithms.MEASURED, algorithms.NATIVE, *algorithms.NODE):
            algorithm = nonblocking(comm.size)
        weights = None
        if weight is not None:
            sums = _weight_sums(context, op, weight)
            weight = float(sums[0])
            plan = find(context, sums, "sum", algorithm, agreed=False)
            weights = Handle(context, plan, sums, sums)
        plan = find(context, target, op, algorithm, agreed=False)
        return Handle(context, plan, target, x if out is None else out, weight, weights)


class Plan(partial):
    """An allreduce that `md.plan` has prepared; calling the object runs it. Collective.

    Attributes
    ----------
    algorithm : str
        The algorithm that runs, even if the caller has asked for "auto".
    plan : object
        The object that runs the operation. For an `Arena` (tensors in shared memory), a list with
        one such object per dtype.
    """

    algorithm: str
    plan: object
    context: Context

    def close(self) -> None:
        """Free the memory of this prepared allreduce; a later call of it raises ClosedError.

        All ranks must call this method. A second call of ``close`` does nothing.
        """
        release = self.__dict__.pop("release", None)
        if release is not None:
            # `__setstate__` is the only method of a partial object that replaces the function it
            # calls.
            self.__setstate__((_closed, (self.context,), {}, self.__dict__))  # type: ignore[attr-defined]
            release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


def _closed(context: Context):
    with context.call("plan"):  # sends the error to ranks that may wait for this rank
        raise ClosedError("this plan was closed; make a new one with md.plan")


def _bound(context: Context, run: Callable, algorithm: str, plan, release: Callable) -> Plan:
    made = Plan(run)
    made.__dict__.update(context=context, algorithm=algorithm, plan=plan, release=release)
    return made


@tells
def plan(comm, x, op="sum", *, algorithm="auto", reproducible=False) -> Plan:
    """Prepare an in-place allreduce of `x`; calling the result runs it and returns `x`.

    Collective over `comm`, and so is each call of the result. The docstring of `allreduce` explains
    the parameters and the errors. The prepared operation keeps its memory until all ranks call its
    method ``close()`` or leave its ``with`` block.

    >>> with md.plan(comm, gradient, "mean") as reduce:
    ...     for batch in batches:
    ...         compute(batch, gradient)
    ...         reduce()
    """
    context = of(comm)
    with context.call("plan"):
        op, algorithm = known(op), algorithms.chosen(algorithm, reproducible)
        if isinstance(x, Arena):
            plans = arena_sum.plans_of(context, x, op, algorithm)

            def reduce_arena():
                try:
                    x.check_open()
                    for each, vector in zip(plans, x.vectors, strict=True):
                        each(vector)
                    return x
                except BaseException as error:  # also an error raised between two vectors
                    context.escaped(error)
                    raise

            # The arena closes these plans when it is closed.
            return _bound(context, reduce_arena, plans[0].algorithm, plans, lambda: None)
        target = _target(x, None)
        made = find(context, target, op, algorithm).owned()
        if made.short is not None and type(target) is np.ndarray:
            reduce = made.short.bind(target)
        else:

            def reduce():
                return made(target)

        def run():
            if is_device(target):  # the other library may work in another stream in each step
                as_array(x)
            reduce()
            return x

        # `reduce` returns `target`, and `run` returns `x`. If `target` and `x` are the same array,
        # `reduce` is used without the extra function `run`.
        call = reduce if target is x else run
        return _bound(context, call, made.algorithm, made, made.release)


def _target(x, out):
    """Return the array to reduce in place: `x`, or `out` after `x` has been copied into it."""
    x = as_array(x, written=out is None)
    if out is None:
        if not is_writable(x):
            raise ConfigError(
                f"array of shape {x.shape} is read-only; the result is written in place: "
                "pass out=, or a writable copy"
            )
        return x
    check_out(out, x.dtype, x.shape)
    out = as_array(out)
    copy_into(out, x)  # one of the two may be on a device
    return out


def _weight_sums(context: Context, op, weight):
    """Return the numbers of `weight_sums` for `weight`; ConfigError unless `op` is "mean"."""
    if op != "mean":
        raise ConfigError(f"weight={shown(weight)} needs op='mean', got op={shown(op)}")
    return weight_sums(weight, context.rank)


def sum_of_weights(context: Context, op, weight, algorithm: str) -> float | None:
    """Return the sum of all ranks' weights, or None if `weight` is None.

    Collective unless `weight` is None.
    """
    if weight is None:
        return None
    sums = _weight_sums(context, op, weight)
    # The weighted sum of the vectors is divided by this sum of weights. If the vectors are summed
    # in rank order ("ordered"), the weights are summed in rank order, too.
    in_order = algorithm == algorithms.ORDERED
    name = algorithms.ORDERED if in_order else algorithms.NATIVE
    plan = context.plans.get(place := ("weights", name))
    if plan is None:
        # If another rank gives no weight, the error must not show it a sum that nobody has called.
        plan = make_plan(context, sums, "sum", name, "weights of a mean")
        remember(context, place, plan)
    plan(sums)
    context.under_way = False  # all ranks have the same sum, and raise the same error
    return total_weight(sums)
