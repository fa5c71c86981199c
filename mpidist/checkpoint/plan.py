"""Who writes what: every element once, evenly, parameters first. Pure: no MPI, no arrays.

Replicated tensors are laid end to end and cut in one range for each rank that holds them:

    w 0 1 2 3 4 5 6 7 8 9   b 0 1 2      3 ranks, 13 elements
      | rank 0  |  rank 1 |  rank 2 |    w[0:4]  w[4:8]  w[8:10] + b[0:3]

The parameters are cut on their own and come first in every file, then everything else (optimizer
state, data position): where only the beginning of a file can be saved, it is what matters most.
Shards are written by who holds them; a shard that several ranks hold alike, by the first of them.

Where fewer ranks write than hold (``writers``), replicated tensors are cut over the writers among
their holders, and everything else goes from its holder to the writer of that rank:

    writers = 2, 4 ranks    rank 0 writes for 0 and 1, rank 2 for 2 and 3
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from mpidist.checkpoint.hdf5 import Part
from mpidist.checkpoint.layout import Path, dtype_of, show
from mpidist.checkpoint.regions import Flat, Region, untiled, whole
from mpidist.errors import CheckpointError, MismatchError
from mpidist.partition import BlockPartition

#: Names of the top-level entry of a state that is written first.
FIRST = ("parameters", "params")


class Leaf(NamedTuple):
    """What one rank says of one tensor; `region` is None for replicated state."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    region: Region | None


class Description(NamedTuple):
    """What one rank wants to save. Extras as JSON-ready values."""

    leaves: tuple[Leaf, ...]
    extras: tuple[tuple[Path, object], ...]


def agree(all_ranks: Sequence[Description]) -> tuple[list[Leaf], list[tuple[Path, object]]]:
    """Return the tensors and extras that the ranks hold together. Local.

    A name may be missing on some ranks (a server has no data position), but where it is present
    it must be the same thing. Raises MismatchError that names ranks.
    """
    tensors: dict[Path, tuple[int, Leaf]] = {}
    extras: dict[Path, tuple[int, object]] = {}
    for rank, one in enumerate(all_ranks):
        for leaf in one.leaves:
            _same(rank, leaf.path, leaf, tensors, _facts)
        for path, value in one.extras:
            _same(rank, path, value, extras, repr)
    both = sorted(show(path) for path in tensors.keys() & extras.keys())
    if both:
        raise MismatchError(f"save: {both} are arrays on some ranks and plain values on others")
    ordered = sorted(tensors.values(), key=lambda item: item[1].path[0] not in FIRST)
    return [leaf for _, leaf in ordered], [(path, v) for path, (_, v) in extras.items()]


def _facts(leaf: Leaf) -> str:
    kind = "replicated" if leaf.region is None else "sharded"
    return f"{kind} {leaf.dtype} of global shape {leaf.shape}"


def _same(rank: int, path: Path, value, known: dict, tell) -> None:
    """Raise unless `value` is told like the one that is known under its path."""
    first, other = known.setdefault(path, (rank, value))
    here, there = tell(value), tell(other)
    if here != there:
        raise MismatchError(
            f"save: {show(path)} is {here[:200]} on rank {rank}, {there[:200]} on rank {first}"
        )


def writers_of(writers: str | int, nodes: Sequence[int]) -> list[int]:
    """Return the rank that writes for each rank; `nodes` says on which node each one is. Local.

    "all": each for itself. "node": the first of its node. A number: so many, evenly spread, each
    for the ranks behind it.
    """
    size = len(nodes)
    if writers == "all":
        return list(range(size))
    if writers == "node":
        return [nodes.index(node) for node in nodes]
    cut = BlockPartition(size, min(int(writers), size))
    return [cut.range(cut.owner(rank))[0] for rank in range(size)]


class Share(NamedTuple):
    """What one rank gives, and what it writes: parts with the rank that holds each."""

    gives: list[Part]
    to: int
    writes: list[tuple[int, Part]]


def shares(
    parts: Sequence[Sequence[Part]], writer_of: Sequence[int], first: Sequence
) -> list[Share]:
    """Return the share of each rank in a save; `first` is the order of the tensors. Local."""
    place = {path: k for k, path in enumerate(first)}
    writes: list[list[tuple[int, Part]]] = [[] for _ in parts]
    for holder, mine in enumerate(parts):
        writes[writer_of[holder]] += [(holder, part) for part in mine]
    # Within a tensor in the order of the holders, which is that of the regions.
    for one in writes:
        one.sort(key=lambda item: (place[item[1].path], item[0]))
    return [Share(list(mine), writer_of[rank], writes[rank]) for rank, mine in enumerate(parts)]


def assign(
    tensors: Sequence[Leaf],
    all_ranks: Sequence[Description],
    writer_of: Sequence[int] | None = None,
) -> list[list[Part]]:
    """Return the parts that each rank gives to its file, in the order of the tensors. Local.

    Raises CheckpointError where shards overlap or leave a hole.
    """
    writers = set(range(len(all_ranks)) if writer_of is None else writer_of)
    number = {leaf.path: i for i, leaf in enumerate(tensors)}
    chosen: list[list[tuple[int, Region]]] = [[] for _ in all_ranks]
    holders: dict[Path, list[int]] = {leaf.path: [] for leaf in tensors}
    shards: dict[Path, dict[Region, int]] = {leaf.path: {} for leaf in tensors}
    for rank, one in enumerate(all_ranks):
        for leaf in one.leaves:
            if leaf.region is None:
                holders[leaf.path].append(rank)
            elif leaf.region.size and leaf.region not in shards[leaf.path]:
                shards[leaf.path][leaf.region] = rank
                chosen[rank].append((number[leaf.path], leaf.region))
    for path, ranks in holders.items():
        leaf = tensors[number[path]]
        reason = None if ranks else untiled(leaf.shape, list(shards[path]))
        if reason:
            raise CheckpointError(f"save: the shards of {show(path)} do not fit: {reason}")
    for group, ranks in _groups(tensors, holders):
        able = [rank for rank in ranks if rank in writers] or ranks
        for i, rank, region in _cut(group, able, tensors):
            chosen[rank].append((i, region))
    return [
        [Part(tensors[i].path, tensors[i].dtype, tensors[i].shape, region) for i, region in mine]
        for mine in (sorted(one, key=lambda item: item[0]) for one in chosen)
    ]


def _groups(tensors: Sequence[Leaf], holders: dict[Path, list[int]]):
    """Yield (tensor numbers, ranks): replicated tensors of equal holders, parameters apart."""
    groups: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(tensors):
        if holders[leaf.path]:
            key = (leaf.path[0] in FIRST, tuple(holders[leaf.path]))
            groups.setdefault(key, []).append(i)
    for (_, ranks), group in groups.items():
        yield group, ranks


def _cut(group: Sequence[int], ranks: Sequence[int], tensors: Sequence[Leaf]):
    """Yield (tensor, rank, region) of one concatenation cut in equal ranges of bytes."""
    sizes = [dtype_of(tensors[i].dtype).itemsize for i in group]
    counts = [prod(tensors[i].shape) for i in group]
    total = sum(size * count for size, count in zip(sizes, counts, strict=True))
    bounds = BlockPartition(total, len(ranks)).bounds()
    begin = 0
    for i, size, count in zip(group, sizes, counts, strict=True):
        # A bound inside an element moves to its beginning, the same for both neighbours.
        cuts = [min(count, max(0, (bound - begin) // size)) for bound in bounds]
        cuts[-1] = count
        for rank, start, stop in zip(ranks, cuts, cuts[1:], strict=False):
            if start < stop:
                full = stop - start == count
                shape = tensors[i].shape
                yield i, rank, whole(shape) if full else Flat(start, stop - start)
        begin += size * count
