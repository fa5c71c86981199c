"""``md.reduce_scatter``: each rank gets one block of the sum over all ranks."""

from __future__ import annotations

from ..arrays import as_array, mpi_empty
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import of
from .blocks import deliver, rows_of
from .engines.native import run_native
from .engines.prepare_call import (
    bounds_at,
    check_counts,
    check_out,
    counts_text,
    packed_copy,
    prepared,
)
from .engines.reductions import finish_mean, native_op, resolve
from .schedules import algorithms


@tells
def reduce_scatter(comm, x, op="sum", *, counts=None, out=None, algorithm="auto"):
    """Combine the arrays `x` of all ranks elementwise; rank r gets block r of the result.

    Collective over `comm`. `x` does not change. The function returns `out` if given, otherwise a
    new array.

    Parameters
    ----------
    x : array
        Same shape and dtype on every rank. Blocks are cut along the first axis.
    op : str or ufunc
        "sum", "mean", "min", "max", "prod", MPI's SUM, PROD, MIN, MAX, or a binary ufunc that is
        associative and commutative.
    counts : sequence of int, optional
        The number of rows of each rank's block, which may be 0; the same list on every rank, with
        the sum ``len(x)``. By default the lengths of blocks differ by at most one row, and the
        longer blocks come first.
    out : array, optional
        The array that receives this rank's block.
    algorithm : str
        "auto" (which means "ring"), "ring", "direct", "native" (MPI's own).

    Raises
    ------
    ConfigError, MismatchError
        An argument is wrong, `counts` do not add up to ``len(x)``, or the ranks differ in shape,
        dtype, `op`, `counts` or the order of their calls.

    Notes
    -----
    In the default, "ring", each of p ranks sends (p-1)/p of the bytes of `x` (Patarasuk and Yuan,
    JPDC 69(2), 2009).
    """
    context = of(comm)
    with context.call("reduce_scatter"):
        x = as_array(x, written=False)
        name = algorithms.chosen(algorithm, False, algorithms.REDUCE_SCATTER, "reduce_scatter")
        rows, width = rows_of(x)
        lengths = check_counts(counts, rows, comm.size)
        reduction = resolve(op, x.dtype)
        shape = (int(lengths[comm.rank]), *x.shape[1:])
        check_out(out, x.dtype, shape)
        signature = Signature(
            "reduce_scatter", x.dtype.name, str(x.shape), reduction.name, name, counts_text(lengths)
        )
        work = packed_copy(x, reduction, name == algorithms.NATIVE)
        elements = lengths * width
        if comm.size == 1:
            context.begin(signature)
        elif name == algorithms.NATIVE:
            start, stop = bounds_at(elements, comm.rank)
            block = mpi_empty(stop - start, work.dtype, like=work)
            arguments = (work, block, elements.tolist(), native_op(reduction))
            run_native(context, signature, work.nbytes, (context.data.Reduce_scatter, arguments))
            work[start:stop] = block
        else:
            build, dtype = algorithms.REDUCE_SCATTER[name], reduction.work
            prepared(context, signature, build, elements, dtype, reduction.ufunc).run(work)
        # The block is copied, because a view of it would keep the whole vector in memory.
        block = work[slice(*bounds_at(elements, comm.rank))].copy()
        finish_mean(reduction, block, comm.size)
        return deliver(block.reshape(shape), x, out, shape)
