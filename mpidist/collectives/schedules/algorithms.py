"""Tables that map the name of an algorithm to its builder, which returns the steps of a rank.

A builder is called as ``build(size, rank, n, itemsize)``, where `n` is the length of the vector.
For a reduce-scatter, allgather, gather or scatter, the list of the lengths of all ranks' blocks
takes the place of `n`. For an operation with a root, ``root=`` takes the place of `itemsize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ...errors import ConfigError, nearest, shown
from . import butterfly, direct, double_tree, fixed_tree, ring, tree

#: A ring cuts each chunk into segments of this many bytes. One segment is added while the next one
#: is being sent.
SEGMENT_BYTES = 1 << 20
MAX_SEGMENTS = 16
#: A double tree cuts each half of the vector into segments of this many bytes. Over TCP, Open MPI
#: sends messages below 64 KiB without waiting for the receiver's answer (docs/benchmarks.md, "Long
#: messages over TCP").
TREE_SEGMENT_BYTES = 60 << 10
MAX_TREE_SEGMENTS = 512

#: The largest number of segments of all chunks of a ring together. The limit keeps plans short on
#: 8,192 ranks and more.
MAX_SCHEDULE = 1 << 17
#: The largest scratch memory of a schedule, in bytes. A schedule that needs more is refused with an
#: error on all ranks, because otherwise some rank might run out of memory.
MAX_SCRATCH = 4 << 30


def segments(nbytes: int, size: int) -> int:
    """Return the number of messages into which a ring cuts each chunk that a rank sends.

    The vector has `nbytes` bytes, and is cut into one chunk for each of `size` ranks.
    """
    return max(1, min(MAX_SEGMENTS, MAX_SCHEDULE // size, nbytes // size // SEGMENT_BYTES))


def check_scratch(name: str, size: int, n: int, itemsize: int) -> None:
    """Raise ConfigError if an algorithm would need more than 4 GiB of extra memory."""
    nbytes = (size - 1) * n * itemsize
    if name in EVERY_VECTOR and nbytes > MAX_SCRATCH:
        raise ConfigError(
            f"algorithm={name!r} keeps the vectors of all {size} ranks: {nbytes / 2**30:.1f} GiB "
            f"of scratch, expected at most {MAX_SCRATCH >> 30} GiB; use 'auto'"
        )


def tree_segments(nbytes: int) -> int:
    """Return in how many parts each of two trees sums its half of a vector of `nbytes` bytes."""
    return max(1, min(MAX_TREE_SEGMENTS, nbytes // 2 // TREE_SEGMENT_BYTES))


def _plain(build: Callable) -> Callable:
    """Return a function that takes and ignores `itemsize`, and calls `build` without it."""
    return lambda size, rank, problem, itemsize: build(size, rank, problem)


def _sized(build: Callable) -> Callable:
    """Return a function that takes `itemsize` as fourth argument and passes it on to `build`."""
    return lambda size, rank, n, itemsize: build(size, rank, n, itemsize=itemsize)


def _ring(build: Callable) -> Callable:
    """Return a function that calls a ring's builder with a suitable number of segments."""

    def adapted(size, rank, problem, itemsize):
        nbytes = int(np.sum(problem)) * itemsize
        return build(size, rank, problem, segments=segments(nbytes, size))

    return adapted


#: Name -> builder.
Table = dict[str, Callable]

#: Algorithms in which a rank receives the whole vector of every rank before it adds.
EVERY_VECTOR = ("direct", "naive")

ALLREDUCE: Table = {
    "ring": _ring(ring.allreduce),
    "tree": _plain(tree.allreduce),
    "double_tree": lambda size, rank, n, itemsize: double_tree.allreduce(
        size, rank, n, segments=tree_segments(n * itemsize)
    ),
    "butterfly": _sized(butterfly.butterfly),
    "recursive_doubling": _plain(butterfly.recursive_doubling),
    "halving_doubling": _sized(butterfly.halving_doubling),
    "direct": _plain(direct.allreduce),
    "two_hop": _plain(direct.two_hop),
    "ordered": lambda size, rank, n, itemsize: fixed_tree.allreduce(
        size, rank, n, segments=segments(n * itemsize, size), itemsize=itemsize
    ),
    "naive": _plain(direct.naive),
}
REDUCE_SCATTER: Table = {
    "ring": _ring(ring.reduce_scatter),
    "direct": _plain(direct.reduce_scatter),
}
ALLGATHER: Table = {"ring": _ring(ring.allgather), "direct": _plain(direct.allgather)}
#: The builders of rooted collectives take ``root``, and no ``itemsize``.
BROADCAST: Table = {"tree": tree.broadcast, "direct": direct.broadcast}
REDUCE: Table = {"tree": tree.reduce, "direct": direct.reduce, "ordered": fixed_tree.reduce}
GATHER: Table = {"direct": direct.gather}
SCATTER: Table = {"direct": direct.scatter}

#: Names of algorithms that every collective accepts in addition to the names in its table.
MEASURED, NATIVE = "auto", "native"
#: The algorithm whose bits depend on the number of ranks alone.
ORDERED = "ordered"
#: The algorithm that copies directly between the private memories of the ranks of a node, without
#: buffers in shared memory.
SINGLE_COPY = "single_copy"
#: Algorithms that use the memory of a node; "hierarchical" also sends messages between nodes.
NODE = ("node", SINGLE_COPY, "hierarchical")


def check_name(algorithm: str, table: Iterable[str], what: str = "allreduce") -> None:
    """Raise ConfigError for an algorithm that is not in `table`; suggest the most similar name."""
    names = [MEASURED, NATIVE, *table, *(NODE if table is ALLREDUCE else ())]
    if not isinstance(algorithm, str) or algorithm not in names:
        raise ConfigError(
            f"unknown {what} algorithm {shown(algorithm)}; expected one of {', '.join(names)}"
            + nearest(algorithm, names)
        )


def chosen(
    algorithm: str, reproducible: bool, table: Iterable[str] = ALLREDUCE, what: str = "allreduce"
) -> str:
    """Return the algorithm to run, which is "ordered" if `reproducible`, else `algorithm`.

    If `algorithm` is "auto", return the first algorithm of `table`; for allreduce, return "auto".
    Raises ConfigError if `algorithm` is unknown or `reproducible` is not a bool.
    """
    check_name(algorithm, table, what)
    if not isinstance(reproducible, bool | np.bool_):
        raise ConfigError(f"reproducible={shown(reproducible)}: expected True or False")
    if reproducible:
        return ORDERED
    return next(iter(table)) if algorithm == MEASURED and table is not ALLREDUCE else algorithm
