"""``md.reduce_scatter``: each rank gets its block of the sum; the first half of a ring."""

from __future__ import annotations

from ..arrays import (
    as_array,
    mpi_empty,
)
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import Context, of
from .blocks import deliver, rows_of
from .engines.native import run_native
from .engines.reductions import finish_mean, native_op, resolve
from .engines.transfer import (
    bounds_at,
    check_counts,
    check_out,
    counts_text,
    equal_counts,
    packed_copy,
    prepared,
)
from .schedules import algorithms


@tells
def reduce_scatter(comm, x, op="sum", *, counts=None, out=None, algorithm="auto"):
    """Combine `x` over all ranks; rank r gets block r of the result.

    Collective over `comm`. `x` stays as it is; returns the block: new, unless `out` is given.

    Parameters
    ----------
    x : array
        Same shape and dtype on every rank. Blocks are cut along the first axis.
    op : str or ufunc
        As for `allreduce`.
    counts : sequence of int, optional
        Rows of every rank's block, the same on all ranks, adding up to ``len(x)``; blocks may be
        empty. Default: as equal as possible, longer ones first.
    out : array, optional
        Takes the block.
    algorithm : str
        "auto" (the ring), "ring", "direct", "native".

    Raises
    ------
    ConfigError, MismatchError
        As for `allreduce`, and for counts that do not add up.

    Notes
    -----
    The first half of Patarasuk and Yuan's ring, JPDC 69(2), 2009: (p-1)/p N bytes per rank.
    """
    context = of(comm)
    with context.call("reduce_scatter"):
        x = as_array(x)
        algorithms.check_name(algorithm, algorithms.REDUCE_SCATTER, "reduce_scatter")
        rows, width = rows_of(x)
        lengths = (
            equal_counts(rows, comm.size)
            if counts is None
            else check_counts(counts, rows, comm.size)
        )
        reduction = resolve(op, x.dtype)
        shape = (int(lengths[comm.rank]), *x.shape[1:])
        check_out(out, x.dtype, shape)
        name = "ring" if algorithm == algorithms.MEASURED else algorithm
        signature = Signature(
            "reduce_scatter", x.dtype.name, str(x.shape), reduction.name, name, counts_text(lengths)
        )
        work = packed_copy(x, reduction, name == algorithms.NATIVE)
        elements = lengths * width
        if comm.size == 1:
            context.begin(signature)
        elif name == algorithms.NATIVE:
            _native_reduce_scatter(context, signature, reduction, work, elements)
        else:
            build = algorithms.REDUCE_SCATTER[name]
            plan = prepared(context, signature, build, elements, reduction.work, reduction.ufunc)
            plan.run(work)
        # A copy: a view would keep the memory of the whole for as long as the block lives.
        block = work[slice(*bounds_at(elements, comm.rank))].copy()
        finish_mean(reduction, block, comm.size)
        return deliver(block.reshape(shape), x, out, shape)


def _native_reduce_scatter(context: Context, signature, reduction, work, elements) -> None:
    start, stop = bounds_at(elements, context.rank)
    block = mpi_empty(stop - start, work.dtype, like=work)
    arguments = (work, block, elements.tolist(), native_op(reduction))
    run_native(context, signature, work.nbytes, (context.data.Reduce_scatter, arguments))
    work[start:stop] = block
