"""``md.allgather``: every rank gets the blocks of all ranks."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import as_array, copy_into, element_name, mpi_empty
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import of
from .blocks import deliver, rows_of
from .engines.native import run_native
from .engines.prepare_call import block_lengths, bounds_at, check_out, counts_text, prepared
from .schedules import algorithms


@tells
def allgather(comm, x, *, counts=None, out=None, algorithm="auto"):
    """Give every rank the blocks of all ranks, one after the other along the first axis.

    Collective over `comm`. `x` does not change. The function returns `out` if given, otherwise a
    new array.

    Parameters
    ----------
    x : array
        This rank's block. The length of the first axis may differ between ranks; the dtype and the
        other axes are the same on every rank.
    counts : sequence of int, optional
        The number of rows of each rank's block. Without `counts`, each rank sends the number of its
        rows to the other ranks (8 bytes).
    out : array, optional
        The array that receives all blocks.
    algorithm : str
        "auto" (which means "ring"), "ring", "direct", "native" (MPI's own).

    Raises
    ------
    ConfigError, MismatchError
        An argument is wrong, the length of `x` differs from ``counts[rank]``, or the ranks differ
        in dtype, in the length of an axis after the first, or in the order of their calls.
    """
    context = of(comm)
    with context.call("allgather"):
        x = as_array(x, written=False)
        name = algorithms.chosen(algorithm, False, algorithms.ALLGATHER, "allgather")
        rows, width = rows_of(x)
        check_out(out, x.dtype)
        signature = Signature("allgather", element_name(x.dtype), f"(*, {x.shape[1:]})", "", name)
        lengths = block_lengths(context, signature, counts, rows)
        shape = (int(lengths.sum()), *x.shape[1:])
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
            prepared(context, signature, build, elements, x.dtype, agreed=agreed).run(whole)
        return deliver(whole.reshape(shape), x, out, shape)
