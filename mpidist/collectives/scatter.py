"""``md.scatter``: each rank gets its block of the root's array."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import array_module, as_array, element_name
from ..errors import ConfigError
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import Context, of
from ..tensors import dtype_of
from .blocks import BlockVector, deliver, packed, rows_of
from .engines.native import run_native
from .engines.prepare_call import (
    bounds_at,
    check_counts,
    check_out,
    check_root,
    counts_text,
    prepared,
)
from .schedules import algorithms

_CODES = (*"?bBhHiIlLqQefdgFDG", "bfloat16")
_MOST_AXES = 64


@tells
def scatter(comm, x, *, root=0, counts=None, out=None, algorithm="auto"):
    """Cut the root's array along the first axis into blocks, and give block r to rank r.

    Collective over `comm`. The function returns `out` if given, otherwise a new array. Ranks other
    than the root may pass None for `x`.

    Parameters
    ----------
    x : array
        The array that the root cuts; the other ranks' `x` is not used.
    root : int
        The rank that has the array.
    counts : sequence of int, optional
        The number of rows of each rank's block; only the value that the root passes is used. By
        default the lengths of blocks differ by at most one row.
    out : array, optional
        The array that receives this rank's block; a device array keeps the block on the device.
    algorithm : str
        "auto" (which means "direct"), "direct", "native" (MPI's own).

    Raises
    ------
    ConfigError, MismatchError
        An argument is wrong, or the ranks differ in `root`, `algorithm` or the order of their
        calls.
    """
    context = of(comm)
    with context.call("scatter"):
        name = algorithms.chosen(algorithm, False, algorithms.SCATTER, "scatter")
        root = check_root(root, comm.size)
        signature = Signature("scatter", "", "", "", name, f"root={root}")
        dtype, shape, lengths, x = _announce(context, signature, x, counts, root)
        elements = lengths * int(np.prod(shape[1:], dtype=np.int64))
        start, stop = bounds_at(elements, comm.rank)
        block_shape = (int(lengths[comm.rank]), *shape[1:])
        check_out(out, dtype, block_shape)
        extra = f"root={root} {counts_text(lengths)}"
        signature = Signature("scatter", element_name(dtype), str(shape), "", name, extra)
        if comm.rank == root:
            vector = whole = packed(x)
            block = whole[start:stop]
        else:
            block = np.empty(stop - start, dtype)
            vector = BlockVector(start, block)
        if comm.size == 1:
            context.begin(signature)
        elif name == algorithms.NATIVE:
            buffers = (None, [block.view(np.uint8), MPI.BYTE])
            if comm.rank == root:
                nbytes = (elements * dtype.itemsize).tolist()
                buffers = ([whole.view(np.uint8), nbytes, None, MPI.BYTE], MPI.IN_PLACE)
            run_native(context, signature, block.nbytes, (context.data.Scatterv, (*buffers, root)))
        else:
            build = algorithms.SCATTER[name]
            # The root does not wait for other ranks. A rank with a bad `out` must therefore raise
            # before the root sends, and not later.
            context.begin_agreed(signature, "checked")
            plan = prepared(context, signature, build, elements, dtype, agreed=True, root=root)
            plan.run(vector)
        block = block.reshape(block_shape)
        if comm.rank == root and out is None:
            out = array_module(x).empty(block_shape, dtype)  # a view would keep all of `x`
        return deliver(block, block, out, block_shape)


def _announce(context: Context, signature: Signature, x, counts, root: int):
    """Send the root's dtype, shape and counts (rows per block) to all ranks; collective.

    Returns them and, on the root, the array. All ranks raise an error if one of them is invalid.
    """
    size = context.size
    # The root sends a code of the dtype, the byte order, the number of axes, their lengths and the
    # counts. If the root has no valid array, the root sends -1, the length of an error text, and
    # the text.
    facts = np.full(3 + _MOST_AXES + size, -1, np.int64)
    room = facts[2 : 3 + _MOST_AXES].view(np.uint8)
    problem = None
    if context.rank == root:
        try:
            x = as_array(x, written=False)
            rows, _ = rows_of(x)
            element_name(x.dtype)
            code = x.dtype.name if x.dtype.name in _CODES else x.dtype.char
            if code not in _CODES:
                raise ConfigError(f"cannot scatter elements of dtype {x.dtype}")
            facts[3 + _MOST_AXES :] = check_counts(counts, rows, size)
            facts[1 : 3 + x.ndim] = [x.dtype.isnative, x.ndim, *x.shape]
            facts[0] = _CODES.index(code)
        except Exception as error:
            problem = error
            text = f"rank {root} ({context.host}) has no array to scatter: {error}"
            data = np.frombuffer(text.encode()[: room.size], np.uint8)
            room[: len(data)] = data
            facts[1] = len(data)
    context.begin_agreed(signature, "facts")
    if size > 1:
        context.wait(context.control.Ibcast([facts, MPI.INT64_T], root).Test)
    if facts[0] < 0:
        raise problem or ConfigError(room[: facts[1]].tobytes().decode(errors="ignore"))
    dtype = dtype_of(_CODES[int(facts[0])])
    shape = tuple(int(n) for n in facts[3 : 3 + int(facts[2])])
    dtype = dtype if facts[1] else dtype.newbyteorder()
    return dtype, shape, facts[3 + _MOST_AXES :], x
