"""``md.broadcast``: every rank gets the root's values, in place."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import (
    as_array,
    copy_into,
    element_name,
    is_writable,
    mpi_direct,
)
from ..errors import ConfigError
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import of
from .blocks import packed
from .engines import executor
from .engines.native import run_native
from .engines.transfer import (
    check_root,
    prepared,
)
from .schedules import algorithms


@tells
def broadcast(comm, x, *, root=0, algorithm="auto"):
    """Give every rank the root's values, in place; returns `x`.

    Collective over `comm`.

    Parameters
    ----------
    x : array
        Same shape and dtype on every rank; any layout, any dtype of fixed size.
    root : int
        The rank whose values all get.
    algorithm : str
        "auto" (the tree), "tree", "direct", "native".

    Raises
    ------
    ConfigError
        For an unknown algorithm, a root that is no rank, a read-only array.
    MismatchError
        On all ranks, when they differ in shape, dtype, root or order of calls.
    """
    context = of(comm)
    with context.call("broadcast"):
        x = as_array(x)
        algorithms.check_name(algorithm, algorithms.BROADCAST, "broadcast")
        root = check_root(root, comm.size)
        if not is_writable(x):
            raise ConfigError(
                f"array x of shape {x.shape} is read-only; broadcast writes it in place"
            )
        name = "tree" if algorithm == algorithms.MEASURED else algorithm
        dtype = element_name(x.dtype)
        signature = Signature("broadcast", dtype, str(x.shape), "", name, f"root={root}")
        if comm.size == 1:
            context.begin(signature)
            return x
        work = packed(x)
        if name == algorithms.NATIVE:
            call = context.data.Bcast
            calls = [(call, ([part, MPI.BYTE], root)) for part in _byte_pieces(work)]
            run_native(context, signature, work.nbytes, *calls)
        else:
            build = algorithms.BROADCAST[name]
            plan = prepared(context, signature, build, work.size, work.dtype, np.add, root=root)
            plan.run(work)
        if not (x.flags.c_contiguous and mpi_direct(x)):
            copy_into(x, work.reshape(x.shape))
        return x


def _byte_pieces(work: np.ndarray):
    flat = work.view(np.uint8) if work.size else work
    for start in range(0, flat.nbytes, executor.MAX_MESSAGE):
        yield flat[start : start + executor.MAX_MESSAGE]
