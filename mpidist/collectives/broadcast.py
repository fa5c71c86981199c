"""``md.broadcast``: every rank gets the root's values, in place."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import as_array, copy_into, element_name, is_writable, mpi_direct
from ..errors import ConfigError
from ..partition import pieces
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import of
from .blocks import packed
from .engines import executor
from .engines.native import run_native
from .engines.prepare_call import check_root, prepared
from .schedules import algorithms


@tells
def broadcast(comm, x, *, root=0, algorithm="auto"):
    """Overwrite `x` on every rank with the root's values; returns `x`.

    Collective over `comm`.

    Parameters
    ----------
    x : array
        Same shape and dtype on every rank; any layout, any dtype of fixed size.
    root : int
        The rank whose values all ranks get.
    algorithm : str
        "auto" (which means "tree"), "tree", "direct", "native" (MPI's own).

    Raises
    ------
    ConfigError
        For an unknown algorithm, a root that is not a rank, and an array that cannot be written
        (the root's array may be read-only).
    MismatchError
        On all ranks, if they differ in shape, dtype, root or the order of their calls.
    """
    context = of(comm)
    with context.call("broadcast"):
        x = as_array(x)
        name = algorithms.chosen(algorithm, False, algorithms.BROADCAST, "broadcast")
        root = check_root(root, comm.size)
        if comm.rank != root and not is_writable(x):
            raise ConfigError(
                f"array x of shape {x.shape} is read-only; broadcast writes it in place"
            )
        dtype = element_name(x.dtype)
        signature = Signature("broadcast", dtype, str(x.shape), "", name, f"root={root}")
        if comm.size == 1:
            context.begin(signature)
            return x
        work = packed(x)
        if name == algorithms.NATIVE:
            flat = work.view(np.uint8) if work.size else work
            spans = pieces(0, flat.nbytes, executor.MAX_MESSAGE)
            calls = [(context.data.Bcast, ([flat[a:b], MPI.BYTE], root)) for a, b in spans]
            run_native(context, signature, work.nbytes, *calls)
        else:
            build = algorithms.BROADCAST[name]
            prepared(context, signature, build, work.size, work.dtype, root=root).run(work)
        if comm.rank != root and not (x.flags.c_contiguous and mpi_direct(x)):
            copy_into(x, work.reshape(x.shape))
        return x
