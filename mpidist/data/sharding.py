"""Choose the records of each rank for your own training loop, in one of four modes.

    mode          a rank reads                         an epoch of all ranks together
    file          whole files                          each record once; files decide how evenly
    record        a block of one shuffled order        each record once; needs an index of records
    grid          a part of the files of its node      each record once; a node reads its own files
    independent   all records, in its own order        records repeat early and are missing late

Every rank computes its own part without messages.
"""

from __future__ import annotations

import heapq
import sys
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import events
from ..errors import ConfigError, nearest
from ..partition import BlockPartition, bounds_of
from .shuffle import Bijection

MODES = ("auto", "file", "record", "grid", "independent")
#: "auto" chooses "file" if the rank with the most records has at most this many times the mean.
_UNEVEN = 1.1


class RankPart(NamedTuple):
    """The files and records that one rank reads in an epoch, with `records` in the order of use."""

    mode: str
    why: str
    files: tuple[int, ...]
    records: np.ndarray


def shard(
    mode: str,
    counts: Sequence[int],
    ranks_of_nodes: Sequence[int],
    rank: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    indexed: bool = True,
) -> RankPart:
    """Return the files and records that `rank` reads in `epoch`.

    Parameters
    ----------
    mode : str
        "file", "record", "grid" or "independent" (see the table at the top of this module). With
        "auto", the mode is chosen, and rank 0 prints it with the reason.
    counts : sequence of int
        Number of records in each file. Records are numbered consecutively through all files.
    ranks_of_nodes : sequence of int
        Number of ranks on each node. Ranks are numbered consecutively through all nodes.
    rank : int
    seed, epoch : int
        Seed and epoch of the shuffle.
    indexed : bool
        Whether each record can be read without the records before it. If not, mode "record" warns,
        because every rank must then read all records.
    """
    size = sum(ranks_of_nodes)
    if mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ConfigError(
            f"unknown sharding {mode!r}: expected one of {known}{nearest(mode, MODES)}"
        )
    if not 0 <= rank < size or min(counts, default=0) < 0 or not len(counts):
        raise ConfigError(
            f"sharding: rank {rank} of {size} ranks, files of {list(counts)} records; expected a "
            "rank from 0 on, below the number of ranks, and at least one file"
        )
    why = "it was asked for"
    if mode == "auto":
        mode, why = choose_sharding(counts, ranks_of_nodes, indexed)
        events.emit("sharding", mode=mode, why=why)
        if rank == 0 and events.VERBOSITY:
            print(f"mpidist: sharding by {mode}: {why}", file=sys.stderr, flush=True)
    if mode == "record" and not indexed:
        warnings.warn(
            f"sharding by record without an index: all {size} ranks read all {sum(counts)} records "
            "and use only their own; make an index, or shard by file",
            stacklevel=2,
        )
    files, records = _PARTS[mode](counts, ranks_of_nodes, rank, (seed, epoch))
    return RankPart(mode, why, files, records)


def choose_sharding(
    counts: Sequence[int], ranks_of_nodes: Sequence[int], indexed: bool
) -> tuple[str, str]:
    """Return (mode, reason); mode is "file" if the files can be spread evenly over the ranks."""
    size = sum(ranks_of_nodes)
    dealt = deal(counts, [1] * size)
    most = max(sum(counts[f] for f in files) for files in dealt)
    mean = sum(counts) / size
    uneven = f"the largest share of a rank would be {most / max(mean, 1e-9):.2f} times the mean"
    if len(counts) >= size and most <= _UNEVEN * mean:
        return "file", f"{len(counts)} files can be spread evenly: {uneven}"
    reason = f"{len(counts)} files are too few for {size} ranks" if len(counts) < size else uneven
    if indexed:
        return "record", f"{reason}, and there is an index"
    if len(counts) >= len(ranks_of_nodes) > 1:
        return "grid", f"{reason}, there is no index, and there is at least one file per node"
    return "record", f"{reason}, and no other mode gives all ranks equal shares"


def deal(counts: Sequence[int], shares: Sequence[int]) -> list[list[int]]:
    """Distribute files to owners (ranks or nodes); return the numbers of each owner's files.

    Each owner gets records in proportion to its entry in `shares`: the largest file is given first,
    and each file goes to the owner with the fewest records relative to its entry (Graham, "Bounds
    on multiprocessing timing anomalies", 1969).
    """
    owned: list[list[int]] = [[] for _ in shares]
    heap = [(0.0, owner) for owner in range(len(shares))]
    for file in sorted(range(len(counts)), key=lambda file: (-counts[file], file)):
        load, owner = heapq.heappop(heap)
        owned[owner].append(file)
        heapq.heappush(heap, (load + counts[file] / shares[owner], owner))
    return [sorted(files) for files in owned]


def _by_file(counts, nodes, rank, key):
    files = deal(counts, [1] * sum(nodes))[rank]
    # The files are shuffled, and then the records within each file, so only one file is open at a
    # time.
    files = [files[k] for k in np.random.default_rng((*key, rank)).permutation(len(files))]
    starts = bounds_of(counts)
    within = [starts[f] + np.random.default_rng((*key, f)).permutation(counts[f]) for f in files]
    return tuple(files), np.concatenate([np.empty(0, np.int64), *within])


def _by_record(counts, nodes, rank, key):
    start, stop = BlockPartition(sum(counts), sum(nodes)).range(rank)
    records = Bijection(max(1, sum(counts)), key)(np.arange(start, stop))
    return tuple(range(len(counts))), records


def _grid(counts, nodes, rank, key):
    bounds, starts = bounds_of(nodes), bounds_of(counts)
    node = bisect_right(bounds, rank) - 1
    files = deal(counts, nodes)[node]
    ranges = [np.arange(starts[f], starts[f + 1]) for f in files]
    every = np.concatenate([np.empty(0, np.int64), *ranges])
    start, stop = BlockPartition(len(every), nodes[node]).range(rank - bounds[node])
    if not len(every):
        return (), every
    # Each node has its own seed, because nodes with equal seeds would use equal orders.
    return tuple(files), every[Bijection(len(every), (*key, node))(np.arange(start, stop))]


def _independent(counts, nodes, rank, key):
    count = sum(counts)
    return tuple(range(len(counts))), Bijection(max(1, count), (*key, rank))(np.arange(count))


_PARTS = {"file": _by_file, "record": _by_record, "grid": _grid, "independent": _independent}


class Coverage(NamedTuple):
    """How many of a data set's records are used at least once in a given number of draws."""

    draws: int
    seen: float  # share of the records that were used at least once
    repeated: float  # share of the draws that used a record again
    most: int  # how many times the most used record was used


def coverage(count: int, parts: Sequence[np.ndarray], draws: int | None = None) -> Coverage:
    """Measure how many of `count` records are used when the ranks together draw `draws` records.

    `parts` has, for each rank, its records in the order of use. By default `draws` is `count`.
    """
    draws = count if draws is None else draws
    times = np.zeros(count, np.int64)
    taken = 0
    for part, share in zip(parts, BlockPartition(draws, len(parts)).counts(), strict=True):
        used = part[:share]
        np.add.at(times, used, 1)
        taken += len(used)
    seen = int((times > 0).sum())
    return Coverage(
        taken, seen / max(count, 1), 1 - seen / max(taken, 1), int(times.max(initial=0))
    )
