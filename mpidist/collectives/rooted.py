"""``md.broadcast``, ``md.reduce``, ``md.gather``, ``md.scatter``: one rank gives or gets it all."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ..arrays import (
    array_module,
    as_array,
    copy_into,
    is_writable,
    mpi_direct,
    mpi_empty,
    synchronize,
)
from ..context import Context, of
from ..errors import ConfigError
from ..mismatch import Signature
from ..partition import BlockPartition, bounds_of
from . import algorithms
from .blocks import _deliver, _rows
from .native import handshake
from .reductions import finish_mean, native_op, resolve
from .transfer import (
    block_lengths,
    check_counts,
    check_root,
    element_name,
    from_root,
    packed_copy,
    prepared,
    run_program,
)


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
    x = as_array(x)
    algorithms.check_name(algorithm, algorithms.BROADCAST, "broadcast")
    check_root(root, comm.size)
    if not is_writable(x):
        raise ConfigError(f"array of shape {x.shape} is read-only; broadcast writes it in place")
    name = "tree" if algorithm == algorithms.MEASURED else algorithm
    dtype = element_name(x.dtype)
    signature = Signature("broadcast", dtype, str(x.shape), "", name, f"root={root}")
    if comm.size == 1:
        context.begin(signature)
        return x
    work = _packed(x)
    if name == algorithms.NATIVE:
        _native(context, signature, work.nbytes)
        for part in _byte_pieces(work):
            context.data.Bcast([part, MPI.BYTE], root)
    else:
        build = algorithms.BROADCAST[name]
        plan = prepared(context, signature, build, work.size, work.dtype, np.add, root=root)
        run_program(context, signature, plan, work)
    if not (x.flags.c_contiguous and mpi_direct(x)):
        copy_into(x, work.reshape(x.shape))
    return x


def reduce(comm, x, op="sum", *, root=0, out=None, algorithm="auto"):
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
        "auto" (the tree), "tree", "direct", "native".

    Raises
    ------
    ConfigError, MismatchError
        As for `allreduce`.
    """
    context = of(comm)
    x = as_array(x)
    algorithms.check_name(algorithm, algorithms.REDUCE, "reduce")
    check_root(root, comm.size)
    reduction = resolve(op, x.dtype)
    name = "tree" if algorithm == algorithms.MEASURED else algorithm
    signature = Signature(
        "reduce", x.dtype.name, str(x.shape), reduction.name, name, f"root={root}"
    )
    work = packed_copy(x, reduction, name == algorithms.NATIVE)
    if comm.size == 1:
        context.begin(signature)
    elif name == algorithms.NATIVE:
        _native(context, signature, work.nbytes)
        mpi_op = native_op(reduction)
        if comm.rank == root:
            context.data.Reduce(MPI.IN_PLACE, work, mpi_op, root)
        else:
            context.data.Reduce(work, None, mpi_op, root)
    else:
        build = algorithms.REDUCE[name]
        plan = prepared(
            context, signature, build, work.size, reduction.work, reduction.ufunc, root=root
        )
        run_program(context, signature, plan, work)
    if comm.rank != root:
        return None
    finish_mean(reduction, work, comm.size)
    return _deliver(work.reshape(x.shape), x, out, x.shape)


def gather(comm, x, *, root=0, counts=None, out=None, algorithm="auto"):
    """Give the root the blocks of all ranks, one after the other; the others get None.

    Collective over `comm`. Parameters and errors as for `allgather`, and `root`. R74: a gather is a
    reduce whose operation is concatenation. algorithm: "auto" (direct), "direct", "native".
    """
    context = of(comm)
    x = as_array(x)
    algorithms.check_name(algorithm, algorithms.GATHER, "gather")
    check_root(root, comm.size)
    rows, width = _rows(x)
    name = "direct" if algorithm == algorithms.MEASURED else algorithm
    dtype = element_name(x.dtype)
    signature = Signature("gather", dtype, f"(*, {x.shape[1:]})", "", name, f"root={root}")
    counts = block_lengths(context, signature, counts, rows)
    elements = [count * width for count in counts]
    bounds = bounds_of(elements)
    whole = mpi_empty(bounds[-1] if comm.rank == root else 0, x.dtype, like=x)
    signature = signature._replace(extra=f"root={root} counts={counts}")
    vector = whole if comm.rank == root else _SparseVector(bounds, comm.rank, _packed(x))
    if comm.rank == root:
        copy_into(whole[bounds[root] : bounds[root + 1]].reshape(x.shape), x)
    if comm.size == 1:
        context.begin(signature)
    elif name == algorithms.NATIVE:
        _native(context, signature, x.nbytes)
        spec = [whole.view(np.uint8), [e * x.dtype.itemsize for e in elements], None, MPI.BYTE]
        if comm.rank == root:
            context.data.Gatherv(MPI.IN_PLACE, spec, root)
        else:
            context.data.Gatherv([_packed(x).view(np.uint8), MPI.BYTE], None, root)
    else:
        build = algorithms.GATHER[name]
        plan = prepared(context, signature, build, elements, x.dtype, np.add, root=root)
        run_program(context, signature, plan, vector)
    if comm.rank != root:
        return None
    shape = (sum(counts), *x.shape[1:])
    return _deliver(whole.reshape(shape), x, out, shape)


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
    algorithms.check_name(algorithm, algorithms.SCATTER, "scatter")
    check_root(root, comm.size)
    name = "direct" if algorithm == algorithms.MEASURED else algorithm
    signature = Signature("scatter", "", "", "", name, f"root={root}")
    dtype, shape, counts, x = _announce(context, signature, x, counts, root)
    width = int(np.prod(shape[1:], dtype=np.int64))
    elements = [count * width for count in counts]
    bounds = bounds_of(elements)
    mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
    signature = Signature(
        "scatter", element_name(dtype), str(shape), "", name, f"root={root} counts={counts}"
    )
    if comm.rank == root:
        vector = whole = _packed(x)
        block = whole[mine]
    else:
        block = np.empty(elements[comm.rank], dtype)
        vector = _SparseVector(bounds, comm.rank, block)
    if comm.size == 1:
        context.begin(signature)
    elif name == algorithms.NATIVE:
        _native(context, signature, block.nbytes)
        lengths = [e * dtype.itemsize for e in elements]
        if comm.rank == root:
            context.data.Scatterv(
                [whole.view(np.uint8), lengths, None, MPI.BYTE], MPI.IN_PLACE, root
            )
        else:
            context.data.Scatterv(None, [block.view(np.uint8), MPI.BYTE], root)
    else:
        build = algorithms.SCATTER[name]
        plan = prepared(context, signature, build, elements, dtype, np.add, root=root)
        run_program(context, signature, plan, vector)
    block_shape = (counts[comm.rank], *shape[1:])
    block = block.reshape(block_shape)
    if comm.rank == root and out is None:
        xp = array_module(x)
        result = xp.empty(block_shape, dtype)
        copy_into(result, block)
        return result
    return _deliver(block, block, out, block_shape)


class _SparseVector:
    """A vector of which this rank holds one block: what a leaf of gather or scatter touches."""

    def __init__(self, bounds, rank: int, block: np.ndarray):
        self.start, self.block = bounds[rank], block

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
    from . import executor

    flat = work.view(np.uint8) if work.size else work
    for start in range(0, flat.nbytes, executor.MAX_MESSAGE):
        yield flat[start : start + executor.MAX_MESSAGE]


def _native(context: Context, signature: Signature, nbytes: int) -> None:
    """Agree that all ranks are about to make the same blocking call of MPI's own."""
    context.begin(signature)
    handshake(context)(signature.key)
    context.sent.native_calls += 1
    context.sent.native_bytes += nbytes


_CODES = "?bBhHiIlLqQefdgFDG"
_MOST_AXES = 64


def _announce(context: Context, signature: Signature, x, counts, root: int):
    """Tell all ranks dtype, shape and counts of the root's array. Collective.

    Returns them, and on the root the array.
    """
    facts = np.full(3 + _MOST_AXES, -1, np.int64)
    size = context.size
    lengths = np.zeros(size, np.int64)
    problem = None
    if context.rank == root:
        try:
            x = as_array(x)
            rows, _ = _rows(x)
            counts = BlockPartition(rows, size).counts() if counts is None else counts
            lengths[:] = check_counts(counts, rows, size)
            if x.dtype.char not in _CODES:
                raise ConfigError(f"cannot scatter elements of dtype {x.dtype}")
            code = _CODES.index(x.dtype.char)
            facts[: 3 + x.ndim] = [code, x.dtype.isnative, x.ndim, *x.shape]
        except ConfigError as error:
            problem = error
    from_root(context, signature, facts, root)
    if facts[0] < 0:
        raise problem or ConfigError(f"scatter: rank {root} (root) refused its array")
    from_root(context, signature, lengths, root)
    dtype = np.dtype(_CODES[int(facts[0])])
    shape = tuple(int(n) for n in facts[3 : 3 + int(facts[2])])
    return dtype if facts[1] else dtype.newbyteorder(), shape, tuple(map(int, lengths)), x
