"""The tables of algorithms. A new one is one file and one line here.

Every builder is called as ``build(size, rank, n or counts, itemsize)`` and returns the steps of
`rank`. ``native`` is MPI's own and has no steps; ``auto`` measures (``selection``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ...errors import ConfigError, nearest, shown
from . import butterfly, direct, double_tree, fixed_tree, ring, tree

#: A ring chunk is cut in segments of about this many bytes, so that adding one overlaps the wire.
SEGMENT_BYTES = 1 << 20
MAX_SEGMENTS = 16
#: The same for one half in a double tree: below 64 KiB Open MPI sends eagerly over TCP, without
#: an answer to wait for (docs/benchmarks.md, "Long messages over TCP").
TREE_SEGMENT_BYTES = 60 << 10
MAX_TREE_SEGMENTS = 512


#: Segments of all chunks together: what bounds a plan. Below 8,192 ranks it is never reached.
MAX_SCHEDULE = 1 << 17
#: Scratch that a schedule may take: more is refused, for some rank would run out of memory.
MAX_SCRATCH = 4 << 30


def segments(nbytes: int, size: int) -> int:
    """Number of segments of one ring chunk of a vector of `nbytes`."""
    size = max(size, 1)
    most = min(MAX_SEGMENTS, MAX_SCHEDULE // size)
    return max(1, min(most, nbytes // size // SEGMENT_BYTES))


def check_scratch(name: str, size: int, n: int, itemsize: int) -> None:
    """Raise ConfigError if a rank would need room for all ranks' vectors, and they are too long.

    The figure follows from the problem, so all ranks refuse alike.
    """
    nbytes = (size - 1) * n * itemsize
    if name in EVERY_VECTOR and nbytes > MAX_SCRATCH:
        raise ConfigError(
            f"algorithm={name!r} keeps the vectors of all {size} ranks: {nbytes / 2**30:.1f} GiB "
            f"of scratch, expected at most {MAX_SCRATCH >> 30} GiB; use 'auto'"
        )


def _ring(size, rank, n, itemsize):
    return ring.allreduce(size, rank, n, segments=segments(n * itemsize, size))


def _ring_reduce_scatter(size, rank, counts, itemsize):
    count = segments(sum(counts) * itemsize, size)
    return ring.reduce_scatter(size, rank, counts, segments=count)


def _ring_allgather(size, rank, counts, itemsize):
    count = segments(sum(counts) * itemsize, size)
    return ring.allgather(size, rank, counts, segments=count)


def tree_segments(nbytes: int) -> int:
    """Number of segments of each half in a double tree of `nbytes`."""
    return max(1, min(MAX_TREE_SEGMENTS, nbytes // 2 // TREE_SEGMENT_BYTES))


def _double_tree(size, rank, n, itemsize):
    return double_tree.allreduce(size, rank, n, segments=tree_segments(n * itemsize))


def _plain(build: Callable) -> Callable:
    return lambda size, rank, problem, itemsize: build(size, rank, problem)


#: Algorithms that receive every rank's whole vector before they add.
EVERY_VECTOR = ("direct", "naive")

ALLREDUCE: dict[str, Callable] = {
    "ring": _ring,
    "tree": _plain(tree.allreduce),
    "double_tree": _double_tree,
    "butterfly": lambda size, rank, n, itemsize: butterfly.butterfly(
        size, rank, n, itemsize=itemsize
    ),
    "recursive_doubling": _plain(butterfly.recursive_doubling),
    "halving_doubling": lambda size, rank, n, itemsize: butterfly.halving_doubling(
        size, rank, n, itemsize=itemsize
    ),
    "direct": _plain(direct.allreduce),
    "two_hop": _plain(direct.two_hop),
    "ordered": lambda size, rank, n, itemsize: fixed_tree.allreduce(
        size, rank, n, segments=segments(n * itemsize, size), itemsize=itemsize
    ),
    "naive": _plain(direct.naive),
}
REDUCE_SCATTER: dict[str, Callable] = {
    "ring": _ring_reduce_scatter,
    "direct": _plain(direct.reduce_scatter),
}
ALLGATHER: dict[str, Callable] = {
    "ring": _ring_allgather,
    "direct": _plain(direct.allgather),
}
#: Rooted builders take ``root`` as well.
BROADCAST: dict[str, Callable] = {"tree": tree.broadcast, "direct": direct.broadcast}
REDUCE: dict[str, Callable] = {
    "tree": tree.reduce,
    "direct": direct.reduce,
    "ordered": fixed_tree.reduce,
}
GATHER: dict[str, Callable] = {"direct": direct.gather}
SCATTER: dict[str, Callable] = {"direct": direct.scatter}

#: Names that every collective takes besides those in its table.
MEASURED, NATIVE = "auto", "native"
#: The algorithm whose bits depend on the number of ranks alone.
ORDERED = "ordered"
#: Private vectors of one node, read and written where they lie.
SINGLE_COPY = "single_copy"
#: Allreduce in memory that the ranks of a node share; "hierarchical" goes on between nodes.
NODE = ("node", SINGLE_COPY, "hierarchical")


def check_name(algorithm: str, table: Iterable[str], what: str = "allreduce") -> None:
    """Raise ConfigError that lists the names, and the nearest one, for an unknown algorithm."""
    names = [MEASURED, NATIVE, *table, *(NODE if table is ALLREDUCE else ())]
    if not isinstance(algorithm, str) or algorithm not in names:
        raise ConfigError(
            f"unknown {what} algorithm {shown(algorithm)}; expected one of {', '.join(names)}"
            + nearest(algorithm, names)
        )


def chosen(
    algorithm: str,
    reproducible: bool,
    table: Iterable[str] = ALLREDUCE,
    what: str = "allreduce",
) -> str:
    """Return what a sum runs: with `reproducible` the one in order, whatever was asked for.

    ConfigError for an `algorithm` that there is not, and a `reproducible` that is no bool.
    """
    check_name(algorithm, table, what)
    if not isinstance(reproducible, bool | np.bool_):
        raise ConfigError(f"reproducible={shown(reproducible)}: expected True or False")
    return ORDERED if reproducible else algorithm
