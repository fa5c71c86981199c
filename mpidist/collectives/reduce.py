"""``md.reduce``: the root gets the sum, or another combination, of all ranks' arrays."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import as_array, device_of, synchronize
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import of
from .allreduce import sum_of_weights
from .blocks import deliver
from .engines.native import run_native
from .engines.prepare_call import check_out, check_root, packed_copy, prepared
from .engines.reductions import finish_mean, known, native_op, resolve
from .schedules import algorithms


@tells
def reduce(
    comm, x, op="sum", *, root=0, out=None, algorithm="auto", weight=None, reproducible=False
):
    """Combine the arrays `x` of all ranks; returns the result on the root, None on other ranks.

    Collective over `comm`. `x` does not change. On the root, the function returns `out` if given,
    and otherwise a new array.

    Parameters
    ----------
    x : array
        Same shape and dtype on every rank.
    op : str or ufunc
        "sum", "mean", "min", "max", "prod", MPI's SUM, PROD, MIN, MAX, or a binary ufunc that is
        associative and commutative.
    root : int
        The rank that gets the result.
    out : array, optional
        The array on the root that receives the result.
    algorithm : str
        "auto" (which means "tree"), "tree", "direct", "ordered" (rank order), "native" (MPI's own).
    weight : float, optional
        With op="mean": the weight of this rank's array, for example its number of samples. Either
        all ranks pass a weight, or none does.
    reproducible : bool
        Return the same bits as ``allreduce(..., reproducible=True)``. `algorithm` is then checked
        but not used.

    Raises
    ------
    ConfigError, MismatchError
        An argument is wrong, or the ranks differ in shape, dtype, `op`, `root` or the order of
        their calls.
    """
    context = of(comm)
    with context.call("reduce"):
        x = as_array(x, written=False)
        name = algorithms.chosen(algorithm, reproducible, algorithms.REDUCE, "reduce")
        root = check_root(root, comm.size)
        op = known(op)
        reduction = resolve(op, x.dtype)
        algorithms.check_scratch(name, comm.size, x.size, reduction.work.itemsize)
        if comm.rank == root:
            check_out(out, x.dtype, x.shape)
        facts = x.dtype.name, str(x.shape), reduction.name, name, f"root={root}"
        signature = Signature("reduce", *facts)
        total = sum_of_weights(context, op, weight, name)
        work = packed_copy(x, reduction, name == algorithms.NATIVE)
        if total is not None and comm.size > 1:
            with device_of(work):
                np.multiply(work, work.dtype.type(weight), out=work)
            synchronize(work)
        if comm.size == 1:
            total = None  # no weight: the result on one rank is exact, as in `allreduce`
            context.begin(signature)
        elif name == algorithms.NATIVE:
            buffers = (MPI.IN_PLACE, work) if comm.rank == root else (work, None)
            call = (context.data.Reduce, (*buffers, native_op(reduction), root))
            run_native(context, signature, work.nbytes, call)
        else:
            build, ufunc = algorithms.REDUCE[name], reduction.ufunc
            plan = prepared(context, signature, build, work.size, work.dtype, ufunc, root=root)
            plan.run(work)
        if comm.rank != root:
            return None
        finish_mean(reduction, work, comm.size if total is None else total)
        return deliver(work.reshape(x.shape), x, out, x.shape)
