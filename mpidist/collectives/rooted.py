"""``md.broadcast``, ``md.reduce``, ``md.gather``, ``md.scatter``: one rank gives or gets it all."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import (
    array_module,
    as_array,
    copy_into,
    element_name,
    is_writable,
    mpi_direct,
    mpi_empty,
    synchronize,
)
from ..errors import ConfigError
from ..runtime.agreement.mismatch import Signature
from ..runtime.agreement.tell_others import tells
from ..runtime.context import Context, of
from ..tensors import dtype_of
from .allreduce import sum_of_weights
from .blocks import _deliver, _rows
from .engines.native import run_native
from .engines.reductions import finish_mean, known, native_op, resolve
from .engines.transfer import (
    block_lengths,
    bounds_at,
    check_counts,
    check_out,
    check_root,
    counts_text,
    equal_counts,
    from_root,
    packed_copy,
    prepared,
    run_program,
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
        work = _packed(x)
        if name == algorithms.NATIVE:
            call = context.data.Bcast
            calls = [(call, ([part, MPI.BYTE], root)) for part in _byte_pieces(work)]
            run_native(context, signature, work.nbytes, *calls)
        else:
            build = algorithms.BROADCAST[name]
            plan = prepared(context, signature, build, work.size, work.dtype, np.add, root=root)
            run_program(context, signature, plan, work)
        if not (x.flags.c_contiguous and mpi_direct(x)):
            copy_into(x, work.reshape(x.shape))
        return x


@tells
def reduce(
    comm, x, op="sum", *, root=0, out=None, algorithm="auto", weight=None, reproducible=False
):
    """Combine `x` over all ranks; the root gets the result, the others None.

    Collective over `comm`. `x` stays as it is; the root's result is new unless `out` is given.

    Parameters
    ----------
    x : array
        Same shape and dtype on every rank.
    op : str or ufunc
        As for `allreduce`.
    root : int
        The rank that gets the result.
    out : array, optional
        Takes the result on the root.
    algorithm : str
        "auto" (the tree), "tree", "direct", "ordered", "native".
    weight : float, optional
        With op="mean": the weight of this rank's array, as for `allreduce`. All ranks give one,
        or none does.
    reproducible : bool
        The bits of ``allreduce(..., reproducible=True)``, whichever rank is the root; `algorithm`
        is only checked.

    Raises
    ------
    ConfigError, MismatchError
        As for `allreduce`.
    """
    context = of(comm)
    with context.call("reduce"):
        x = as_array(x)
        algorithm = algorithms.chosen(algorithm, reproducible, algorithms.REDUCE, "reduce")
        root = check_root(root, comm.size)
        op = known(op)
        reduction = resolve(op, x.dtype)
        algorithms.check_scratch(algorithm, comm.size, x.size, reduction.work.itemsize)
        if comm.rank == root:
            check_out(out, x.dtype, x.shape)
        name = "tree" if algorithm == algorithms.MEASURED else algorithm
        signature = Signature(
            "reduce", x.dtype.name, str(x.shape), reduction.name, name, f"root={root}"
        )
        total = sum_of_weights(context, op, weight, algorithm)
        work = packed_copy(x, reduction, name == algorithms.NATIVE)
        if comm.size == 1:
            total = None  # not weighted, and not rounded by that: the bits of `allreduce`
        if total is not None:
            np.multiply(work, work.dtype.type(weight), out=work)
            synchronize(work)
        if comm.size == 1:
            context.begin(signature)
        elif name == algorithms.NATIVE:
            buffers = (MPI.IN_PLACE, work) if comm.rank == root else (work, None)
            call = (context.data.Reduce, (*buffers, native_op(reduction), root))
            run_native(context, signature, work.nbytes, call)
        else:
            build = algorithms.REDUCE[name]
            plan = prepared(
                context, signature, build, work.size, reduction.work, reduction.ufunc, root=root
            )
            run_program(context, signature, plan, work)
        if comm.rank != root:
            return None
        finish_mean(reduction, work, comm.size if total is None else total)
        return _deliver(work.reshape(x.shape), x, out, x.shape)


@tells
def gather(comm, x, *, root=0, counts=None, out=None, algorithm="auto"):
    """Give the root the blocks of all ranks, one after the other; the others get None.

    Collective over `comm`. Parameters and errors as for `allgather`, and `root`. R74: a gather is a
    reduce whose operation is concatenation. algorithm: "auto" (direct), "direct", "native".
    """
    context = of(comm)
    with context.call("gather"):
        x = as_array(x)
        algorithms.check_name(algorithm, algorithms.GATHER, "gather")
        root = check_root(root, comm.size)
        rows, width = _rows(x)
        at_root = comm.rank == root
        if at_root:
            check_out(out, x.dtype)
        name = "direct" if algorithm == algorithms.MEASURED else algorithm
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
        vector = whole if at_root else _SparseVector(start, _packed(x))
        if at_root:
            copy_into(whole[start:stop].reshape(x.shape), x)
        if comm.size == 1:
            context.begin(signature)
        elif name == algorithms.NATIVE:
            buffers = ([_packed(x).view(np.uint8), MPI.BYTE], None)
            if at_root:
                nbytes = (elements * x.dtype.itemsize).tolist()
                buffers = (MPI.IN_PLACE, [whole.view(np.uint8), nbytes, None, MPI.BYTE])
            run_native(context, signature, x.nbytes, (context.data.Gatherv, (*buffers, root)))
        else:
            build, agreed = algorithms.GATHER[name], counts is None
            plan = prepared(
                context, signature, build, elements, x.dtype, np.add, agreed=agreed, root=root
            )
            run_program(context, signature, plan, vector)
        if not at_root:
            return None
        return _deliver(whole.reshape(shape), x, out, shape)


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
            vector = whole = _packed(x)
            block = whole[start:stop]
        else:
            block = np.empty(stop - start, dtype)
            vector = _SparseVector(start, block)
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
            run_program(context, signature, plan, vector)
        block = block.reshape(block_shape)
        if comm.rank == root and out is None:
            result = array_module(x).empty(block_shape, dtype)
            copy_into(result, block)
            return result
        return _deliver(block, block, out, block_shape)


class _SparseVector:
    """A vector of which this rank holds one block: what a leaf of gather or scatter touches."""

    def __init__(self, start: int, block: np.ndarray):
        self.start, self.block = start, block

    def __getitem__(self, span: slice):
        return self.block[span.start - self.start : span.stop - self.start]


def _packed(x):
    """Return `x` as a flat vector in C order that MPI takes: a view where it can be one."""
    if x.flags.c_contiguous and mpi_direct(x):
        synchronize(x)
        return x.reshape(-1)
    work = mpi_empty(x.size, x.dtype, like=x)
    copy_into(work.reshape(x.shape), x)
    return work


def _byte_pieces(work: np.ndarray):
    from .engines import executor

    flat = work.view(np.uint8) if work.size else work
    for start in range(0, flat.nbytes, executor.MAX_MESSAGE):
        yield flat[start : start + executor.MAX_MESSAGE]


_CODES = (*"?bBhHiIlLqQefdgFDG", "bfloat16")
_MOST_AXES = 64
_TEXT_BYTES = 8 * (_MOST_AXES + 1)


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
            rows, _ = _rows(x)
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
