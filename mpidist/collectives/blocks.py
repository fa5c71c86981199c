"""``md.reduce_scatter`` and ``md.allgather``: the two halves of the ring; uneven blocks too."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import array_module, as_array, copy_into, element_name, mpi_empty
from ..errors import ConfigError
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import Context, of
from .engines.native import run_native
from .engines.reductions import finish_mean, native_op, resolve
from .engines.transfer import (
    block_lengths,
    bounds_at,
    check_counts,
    check_out,
    counts_text,
    equal_counts,
    packed_copy,
    prepared,
    run_program,
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
        rows, width = _rows(x)
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
            run_program(context, signature, plan, work)
        # A copy: a view would keep the memory of the whole for as long as the block lives.
        block = work[slice(*bounds_at(elements, comm.rank))].copy()
        finish_mean(reduction, block, comm.size)
        return _deliver(block.reshape(shape), x, out, shape)


def _native_reduce_scatter(context: Context, signature, reduction, work, elements) -> None:
    start, stop = bounds_at(elements, context.rank)
    block = mpi_empty(stop - start, work.dtype, like=work)
    arguments = (work, block, elements.tolist(), native_op(reduction))
    run_native(context, signature, work.nbytes, (context.data.Reduce_scatter, arguments))
    work[start:stop] = block


@tells
def allgather(comm, x, *, counts=None, out=None, algorithm="auto"):
    """Give every rank the blocks of all ranks, one after the other along the first axis.

    Collective over `comm`. `x` stays as it is; returns the whole: new, unless `out` is given.

    Parameters
    ----------
    x : array
        This rank's block; dtype and trailing shape are the same on every rank, the length of the
        first axis may differ.
    counts : sequence of int, optional
        Rows of every rank's block. Default: the ranks tell each other (8 bytes each).
    out : array, optional
        Takes the whole.
    algorithm : str
        "auto" (the ring), "ring", "direct", "native".

    Raises
    ------
    ConfigError, MismatchError
        As for `allreduce`, and for a block whose length is not what `counts` says.
    """
    context = of(comm)
    with context.call("allgather"):
        x = as_array(x)
        algorithms.check_name(algorithm, algorithms.ALLGATHER, "allgather")
        rows, width = _rows(x)
        check_out(out, x.dtype)
        name = "ring" if algorithm == algorithms.MEASURED else algorithm
        trailing = x.shape[1:]
        signature = Signature("allgather", element_name(x.dtype), f"(*, {trailing})", "", name)
        lengths = block_lengths(context, signature, counts, rows)
        shape = (int(lengths.sum()), *trailing)
        check_out(out, x.dtype, shape)
        elements = lengths * width
        whole = mpi_empty(shape[0] * width, x.dtype, like=x)
        mine = whole[slice(*bounds_at(elements, comm.rank))]
        copy_into(mine.reshape(x.shape), x)
        signature = signature._replace(extra=counts_text(lengths))
        if comm.size == 1:
            context.begin(signature)
        elif name == algorithms.NATIVE:
            nbytes = (elements * x.dtype.itemsize).tolist()
            arguments = (MPI.IN_PLACE, [whole.view(np.uint8), nbytes, None, MPI.BYTE])
            run_native(context, signature, mine.nbytes, (context.data.Allgatherv, arguments))
        else:
            build, agreed = algorithms.ALLGATHER[name], counts is None
            plan = prepared(context, signature, build, elements, x.dtype, np.add, agreed=agreed)
            run_program(context, signature, plan, whole)
        return _deliver(whole.reshape(shape), x, out, shape)


def _rows(x) -> tuple[int, int]:
    """Length of the first axis, and elements per row."""
    if x.ndim == 0:
        raise ConfigError("a 0-d array has no first axis to cut blocks from; use x.reshape(1)")
    return x.shape[0], int(np.prod(x.shape[1:], dtype=np.int64))


def _deliver(block, like, out, shape):
    """Put a block where the caller wants it: into `out`, or a new array beside `like`."""
    if out is None:
        if isinstance(like, np.ndarray):
            return block if block.dtype == like.dtype else block.astype(like.dtype)
        out = array_module(like).empty(shape, like.dtype)
    out = as_array(out)
    copy_into(out, block)
    return out
