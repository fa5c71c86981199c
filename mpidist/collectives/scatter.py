"""``md.scatter``: each rank gets its block of the root's array."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import (
    array_module,
    as_array,
    copy_into,
    element_name,
)
from ..errors import ConfigError
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import Context, of
from ..tensors import dtype_of
from .blocks import BlockVector, deliver, packed, rows_of
from .engines.native import run_native
from .engines.transfer import (
    bounds_at,
    check_counts,
    check_out,
    check_root,
    counts_text,
    equal_counts,
    from_root,
    prepared,
)
from .schedules import algorithms

_CODES = (*"?bBhHiIlLqQefdgFDG", "bfloat16")
_MOST_AXES = 64
_TEXT_BYTES = 8 * (_MOST_AXES + 1)


@tells
def scatter(comm, x, *, root=0, counts=None, out=None, algorithm="auto"):
    """Give rank r block r of the root's array, cut along the first axis.

    Collective over `comm`. Returns the block, a new array unless `out` is given. Ranks other than
    the root may pass None for `x`: shape and dtype travel ahead (a few integers).

    Parameters
    ----------
    x : array
        The whole, on the root.
    root : int
    counts : sequence of int, optional
        Rows of every rank's block, needed on the root only. Default: as equal as possible.
    out : array, optional
        Takes the block; a device array where the block shall be on the device.
    algorithm : str
        "auto" (direct), "direct", "native".

    Raises
    ------
    ConfigError, MismatchError
        As for `allgather`.
    """
    context = of(comm)
    with context.call("scatter"):
        algorithms.check_name(algorithm, algorithms.SCATTER, "scatter")
        root = check_root(root, comm.size)
        name = "direct" if algorithm == algorithms.MEASURED else algorithm
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
            # The root waits for nobody, so ranks whose `out` is bad must be heard before it sends.
            context.begin_agreed(signature, "checked")
            plan = prepared(
                context, signature, build, elements, dtype, np.add, agreed=True, root=root
            )
            plan.run(vector)
        block = block.reshape(block_shape)
        if comm.rank == root and out is None:
            result = array_module(x).empty(block_shape, dtype)
            copy_into(result, block)
            return result
        return deliver(block, block, out, block_shape)


def _announce(context: Context, signature: Signature, x, counts, root: int):
    """Tell all ranks dtype, shape and counts of the root's array. Collective.

    Returns them, and on the root the array. What is wrong with them is raised by all ranks.
    """
    size = context.size
    facts = np.full(3 + _MOST_AXES + size, -1, np.int64)
    problem = None
    if context.rank == root:
        try:
            x = as_array(x)
            rows, _ = rows_of(x)
            element_name(x.dtype)
            code = x.dtype.name if x.dtype.name in _CODES else x.dtype.char
            if code not in _CODES:
                raise ConfigError(f"cannot scatter elements of dtype {x.dtype}")
            facts[3 + _MOST_AXES :] = (
                equal_counts(rows, size) if counts is None else check_counts(counts, rows, size)
            )
            facts[1 : 3 + x.ndim] = [x.dtype.isnative, x.ndim, *x.shape]
            facts[0] = _CODES.index(code)
        except Exception as error:
            problem = error
            text = f"rank {root} ({context.host}) has no array to scatter: {error}"
            data = np.frombuffer(text.encode()[:_TEXT_BYTES], np.uint8)
            facts[2 : 3 + _MOST_AXES].view(np.uint8)[: len(data)] = data
            facts[1] = len(data)
    from_root(context, signature, facts, root)
    if facts[0] < 0:
        data = facts[2 : 3 + _MOST_AXES].view(np.uint8)[: facts[1]]
        raise problem or ConfigError(data.tobytes().decode(errors="ignore"))
    dtype = dtype_of(_CODES[int(facts[0])])
    shape = tuple(int(n) for n in facts[3 : 3 + int(facts[2])])
    dtype = dtype if facts[1] else dtype.newbyteorder()
    return dtype, shape, facts[3 + _MOST_AXES :], x
