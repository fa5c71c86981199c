"""Which records a rank reads, for loops of one's own: four ways, and what each of them promises.

    file          whole files to ranks               disjoint, all; as even as the files are
    record        blocks of one shuffled order       disjoint, all; needs an index of the records
    grid          files to nodes, records of a       disjoint, all; a node reads its own files only
                  node to its ranks
    independent   everything, each in its own order  neither: duplicates early, misses late

`md.train` reads by record and needs none of these. Pure functions of (mode, records per file, ranks
per node, seed, epoch): every rank computes its own part and asks nobody.
"""

from __future__ import annotations

import heapq
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import events
from ..errors import ConfigError, nearest
from ..partition import BlockPartition
from .shuffle import Bijection

MODES = ("auto", "file", "record", "grid", "independent")
#: By file is chosen where the fullest rank has at most this much more than the mean.
_UNEVEN = 1.1


class RankPart(NamedTuple):
    """What one rank reads in one epoch: `records` in the order of use."""

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
    """Return what `rank` reads in `epoch`.

    Parameters
    ----------
    mode : str
        "file", "record", "grid", "independent", or "auto": rank 0 says on stderr which one that
        is and why (not with ``MPIDIST_VERBOSE=0``), every rank in its events.
    counts : sequence of int
        Records of each file. Records are numbered through all files.
    ranks_of_nodes : sequence of int
        How many ranks each node has; ranks are numbered through all nodes.
    rank : int
    seed, epoch : int
        Of the shuffle.
    indexed : bool
        Whether a record can be reached without reading the ones before it. By record and without
        an index every rank reads everything and drops most of it, which is warned of.
    """
    size = sum(ranks_of_nodes)
    if mode not in MODES:
        known = ", ".join(map(repr, MODES))
        raise ConfigError(
            f"unknown sharding {mode!r}: expected one of {known}{nearest(mode, MODES)}"
        )
    if not 0 <= rank < size or min(counts, default=0) < 0 or not len(counts):
        raise ConfigError(f"sharding: rank {rank} of {size} ranks, files of {list(counts)} records")
    why = "it was asked for"
    if mode == "auto":
        mode, why = choose_sharding(counts, ranks_of_nodes, indexed)
        events.emit("sharding", mode=mode, why=why)
        if rank == 0 and events.VERBOSITY:
            print(f"mpidist: sharding by {mode}: {why}", file=sys.stderr, flush=True)
    if mode == "record" and not indexed:
        warnings.warn(
            f"sharding by record without an index: all {size} ranks read all {sum(counts)} records "
            "and each drops those of the others; make an index, or shard by file",
            stacklevel=2,
        )
    files, records = _PARTS[mode](counts, ranks_of_nodes, rank, (seed, epoch))
    return RankPart(mode, why, files, records)


def choose_sharding(
    counts: Sequence[int], ranks_of_nodes: Sequence[int], indexed: bool
) -> tuple[str, str]:
    """Return (mode, why): by file where files are even enough, else by record, else grid."""
    size = sum(ranks_of_nodes)
    dealt = deal(counts, [1] * size)
    most = max(sum(counts[f] for f in files) for files in dealt)
    mean = sum(counts) / size
    uneven = f"the fullest of {size} ranks would have {most / max(mean, 1e-9):.2f} times the mean"
    if len(counts) >= size and most <= _UNEVEN * mean:
        return "file", f"{len(counts)} files are even enough: {uneven}"
    reason = f"{len(counts)} files do for no {size} ranks" if len(counts) < size else uneven
    if indexed:
        return "record", f"{reason}, and there is an index"
    if len(counts) >= len(ranks_of_nodes) > 1:
        return "grid", f"{reason}, there is no index, and each of the nodes has files of its own"
    return "record", f"{reason}, and there is no other way to give each rank as much"


def deal(counts: Sequence[int], shares: Sequence[int]) -> list[list[int]]:
    """Deal files to owners in proportion to their `shares`, the largest first.

    The owner with the least load gets the next file (R. L. Graham, "Bounds on multiprocessing
    timing anomalies", 1969). Every file has one owner; an owner may have none.
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
    # The order of the files, and within each one: one file is open at a time.
    files = [files[k] for k in np.random.default_rng((*key, rank)).permutation(len(files))]
    starts = np.concatenate([[0], np.cumsum(counts)])
    within = [starts[f] + np.random.default_rng((*key, f)).permutation(counts[f]) for f in files]
    return tuple(files), np.concatenate([np.empty(0, np.int64), *within])


def _by_record(counts, nodes, rank, key):
    start, stop = BlockPartition(sum(counts), sum(nodes)).range(rank)
    records = Bijection(max(1, sum(counts)), key)(np.arange(start, stop))
    return tuple(range(len(counts))), records


def _grid(counts, nodes, rank, key):
    bounds = np.concatenate([[0], np.cumsum(nodes)])
    node = int(np.searchsorted(bounds, rank, side="right")) - 1
    files = deal(counts, nodes)[node]
    starts = np.concatenate([[0], np.cumsum(counts)])
    every = np.concatenate(
        [np.empty(0, np.int64), *(np.arange(starts[f], starts[f + 1]) for f in files)]
    )
    start, stop = BlockPartition(len(every), nodes[node]).range(rank - int(bounds[node]))
    if not len(every):
        return (), every
    # A seed of its own for every node: equal ones would walk through their files alike.
    return tuple(files), every[Bijection(len(every), (*key, node))(np.arange(start, stop))]


def _independent(counts, nodes, rank, key):
    count = sum(counts)
    return tuple(range(len(counts))), Bijection(max(1, count), (*key, rank))(np.arange(count))


_PARTS = {"file": _by_file, "record": _by_record, "grid": _grid, "independent": _independent}


class Coverage(NamedTuple):
    """How a number of draws covers a data set."""

    draws: int
    seen: float  # share of the records that were used at least once
    repeated: float  # share of the draws that used a record again
    most: int  # how often the most used record was used


def coverage(count: int, parts: Sequence[np.ndarray], draws: int | None = None) -> Coverage:
    """Measure what `draws` records, dealt evenly over `parts`, cover of `count`.

    By default one epoch: as many draws as records. For independent shuffles that is the price of
    needing no index and no agreement: of p ranks each uses 1/p of its own order, so that about
    1 - (1 - 1/p)^p of the records are seen, 63 % of them with many ranks.
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
