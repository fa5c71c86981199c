"""``md.allgather``: every rank gets the blocks of all; the second half of a ring."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import (
    as_array,
    copy_into,
    element_name,
    mpi_empty,
)
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import of
from .blocks import deliver, rows_of
from .engines.native import run_native
from .engines.transfer import (
    block_lengths,
    bounds_at,
    check_out,
    counts_text,
    prepared,
)
from .schedules import algorithms


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
        rows, width = rows_of(x)
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
            plan.run(whole)
        return deliver(whole.reshape(shape), x, out, shape)
