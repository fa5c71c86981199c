"""``md.gather``: the root gets the blocks of all ranks."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import as_array, copy_into, element_name, mpi_empty
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import of
from .blocks import BlockVector, deliver, packed, rows_of
from .engines.native import run_native
from .engines.prepare_call import (
    block_lengths,
    bounds_at,
    check_out,
    check_root,
    counts_text,
    prepared,
)
from .schedules import algorithms


@tells
def gather(comm, x, *, root=0, counts=None, out=None, algorithm="auto"):
    """Give rank `root` the blocks of all ranks, one after the other; returns None on other ranks.

    Collective over `comm`. The docstring of `allgather` explains the other parameters and the
    errors. The algorithms of `gather` are "auto" (the same as "direct"), "direct" and "native".
    """
    context = of(comm)
    with context.call("gather"):
        x = as_array(x, written=False)
        name = algorithms.chosen(algorithm, False, algorithms.GATHER, "gather")
        root = check_root(root, comm.size)
        rows, width = rows_of(x)
        at_root = comm.rank == root
        if at_root:
            check_out(out, x.dtype)
        dtype = element_name(x.dtype)
        signature = Signature("gather", dtype, f"(*, {x.shape[1:]})", "", name, f"root={root}")
        lengths = block_lengths(context, signature, counts, rows)
        shape = (int(lengths.sum()), *x.shape[1:])
        if at_root:
            check_out(out, x.dtype, shape)
        elements = lengths * width
        signature = signature._replace(extra=f"root={root} {counts_text(lengths)}")
        start, stop = bounds_at(elements, comm.rank)
        whole = mpi_empty(shape[0] * width if at_root else 0, x.dtype, like=x)
        vector = whole if at_root else BlockVector(start, packed(x))
        if at_root:
            copy_into(whole[start:stop].reshape(x.shape), x)
        if comm.size == 1:
            context.begin(signature)
        elif name == algorithms.NATIVE:
            buffers = ([packed(x).view(np.uint8), MPI.BYTE], None)
            if at_root:
                nbytes = (elements * x.dtype.itemsize).tolist()
                buffers = (MPI.IN_PLACE, [whole.view(np.uint8), nbytes, None, MPI.BYTE])
            run_native(context, signature, x.nbytes, (context.data.Gatherv, (*buffers, root)))
        else:
            build, options = algorithms.GATHER[name], {"agreed": counts is None, "root": root}
            prepared(context, signature, build, elements, x.dtype, **options).run(vector)
        if not at_root:
            return None
        return deliver(whole.reshape(shape), x, out, shape)
