"""Who writes what: every element once, evenly, parameters first. Pure: no MPI, none of the numbers.

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

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from ...errors import CheckpointError, MismatchError
from ...partition import BlockPartition
from ..format import hdf5_layout, piece_table
from ..format.state import Fact, Path, dtype_of, show, tree

#: Names of the top-level entry of a state that is written first.
FIRST = ("parameters", "params")


#: Values that are no arrays, ready for JSON.
Extras = tuple[tuple[Path, object], ...]


class Description(NamedTuple):
    """What one rank wants to save.

    facts : of the tensors of which it holds something.
    sharded : whether it holds a shard of each, or all of it.
    shards : table of `piece_table`: the region of each shard; its tensor is the place in `facts`.
    """

    facts: tuple[Fact, ...]
    sharded: tuple[bool, ...]
    shards: np.ndarray


class Tensors(NamedTuple):
    """The tensors of all ranks.

    facts : parameters first.
    kinds : ranks that hold the same tensors are of one kind. For each kind the places of its
        tensors in `facts`, and which of them are sharded.
    kind_of : the kind of each rank.
    """

    facts: list[Fact]
    kinds: list[tuple[np.ndarray, np.ndarray]]
    kind_of: np.ndarray


def agree(all_ranks: Sequence[Description]) -> Tensors:
    """Return the tensors that the ranks hold together.

    A name may be missing on some ranks, but where it is present it must be the same thing. Raises
    MismatchError that names ranks.
    """
    tensors: dict[Path, tuple[int, tuple]] = {}
    kinds: dict[tuple, int] = {}
    kind_of: list[int] = []
    for rank, one in enumerate(all_ranks):
        if rank and one.facts is all_ranks[0].facts and one.sharded is all_ranks[0].sharded:
            kind_of.append(0)
            continue
        known = len(kinds)
        kind_of.append(kinds.setdefault((one.facts, one.sharded), known))
        if kind_of[rank] == known:
            for held in zip(one.facts, one.sharded, strict=True):
                _same(rank, held[0].path, held, tensors, _told)
    facts = in_order(fact for _, (fact, _) in tensors.values())
    number = {fact.path: i for i, fact in enumerate(facts)}
    numbered = [
        (np.array([number[fact.path] for fact in kind], np.int64), np.array(sharded, bool))
        for kind, sharded in kinds
    ]
    return Tensors(facts, numbered, np.array(kind_of, np.int64))


def agree_on_extras(all_ranks: Sequence[Extras]) -> Extras:
    """Return the extras that the ranks hold together. Raises MismatchError as `agree`.

    A server has no data position; who has one must have the same.
    """
    extras: dict[Path, tuple[int, object]] = {}
    for rank, one in enumerate(all_ranks):
        for path, value in one:
            _same(rank, path, value, extras, repr)
    return tuple((path, value) for path, (_, value) in extras.items())


def check_names(facts: Sequence[Fact], extras: Sequence[Path]) -> None:
    """Raise where tensors and extras cannot stand in one tree of names."""
    both = sorted(show(path) for path in {fact.path for fact in facts}.intersection(extras))
    if both:
        raise MismatchError(f"save: {both} are arrays on some ranks and plain values on others")
    tree((path, None) for path in [*(fact.path for fact in facts), *extras])


def in_order(facts: Iterable[Fact]) -> list[Fact]:
    """Return tensors in the order of all files: parameters first."""
    return sorted(facts, key=lambda fact: fact.path[0] not in FIRST)


def _told(held: tuple[Fact, bool]) -> str:
    fact, sharded = held
    kind = "sharded" if sharded else "replicated"
    return f"{kind} {fact.dtype} of global shape {fact.shape}"


def _same(rank: int, path: Path, value, known: dict, tell) -> None:
    """Raise unless `value` is told like the one that is known under its path."""
    first, other = known.setdefault(path, (rank, value))
    here, there = tell(value), tell(other)
    if here != there:
        raise MismatchError(
            f"save: {show(path)} is {here[:200]} on rank {rank}, {there[:200]} on rank {first}"
        )


def writers_of(writers: str | int, nodes: Sequence[int]) -> list[int]:
    """Return the rank that writes for each rank; `nodes` says on which node each one is.

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
    """What one rank gives and writes: tables of `piece_table`, in the order of the tensors.

    The file of a piece is the rank that holds it, its offset that in the file of the writer.
    """

    gives: np.ndarray
    to: int
    writes: np.ndarray


def itemsizes(facts: Sequence[Fact]) -> np.ndarray:
    """Return the bytes of an element of each tensor."""
    known = {name: dtype_of(name).itemsize for name in {fact.dtype for fact in facts}}
    return np.array([known[fact.dtype] for fact in facts], np.int64)


def shares(
    tensors: Tensors, all_ranks: Sequence[Description], writer_of: Sequence[int]
) -> list[Share]:
    """Return the share of each rank in a save.

    Raises CheckpointError where shards overlap or leave a hole.
    """
    rows = assign(tensors, all_ranks, writer_of)
    holder, tensor = rows[:, piece_table.FILE], rows[:, piece_table.TENSOR]
    writer = np.array(writer_of, np.int64)[holder]
    size, count = len(all_ranks), len(tensors.facts)
    # Within a tensor in the order of the holders, which is that of the regions.
    order = np.argsort((writer * count + tensor) * size + holder, kind="stable")
    rows, writer = rows[order], writer[order]
    nbytes = piece_table.sizes(rows) * itemsizes(tensors.facts)[rows[:, piece_table.TENSOR]]
    ends = np.searchsorted(writer, np.arange(size + 1))
    for start, stop in pairwise(ends.tolist()):
        rows[start:stop, piece_table.OFFSET] = hdf5_layout.place(nbytes[start:stop])[0]
    written = given = np.split(rows, ends[1:-1])
    if any(writer != rank for rank, writer in enumerate(writer_of)):
        holder, tensor = rows[:, piece_table.FILE], rows[:, piece_table.TENSOR]
        order = np.argsort(holder * count + tensor, kind="stable")
        given = np.split(rows[order], np.searchsorted(holder[order], np.arange(1, size)))
    return [Share(*share) for share in zip(given, writer_of, written, strict=True)]


def assign(
    tensors: Tensors, all_ranks: Sequence[Description], writer_of: Sequence[int]
) -> np.ndarray:
    """Return all pieces; the file of each is the rank that gives it. Raises as `shares`."""
    shapes = [fact.shape for fact in tensors.facts]
    tables, seen = [], set()
    for rank, one in enumerate(all_ranks):
        if len(one.shards) and id(one.shards) not in seen:  # else it is the first one's to write
            seen.add(id(one.shards))
            table = one.shards.copy()
            table[:, piece_table.FILE] = rank
            number, _ = tensors.kinds[tensors.kind_of[rank]]
            table[:, piece_table.TENSOR] = number[table[:, piece_table.TENSOR]]
            tables.append(table)
    rows = piece_table.joined(tables, max([1, *map(len, shapes)]))
    rows = piece_table.distinct(piece_table.Grid(shapes, piece_table.axes(rows)), rows)
    whole = list(_replicated(tensors, set(writer_of), piece_table.axes(rows)))
    rows = piece_table.joined([rows, *whole]) if whole else rows
    fault = piece_table.untiled_tensor(shapes, rows)
    if fault:
        name = show(tensors.facts[fault[0]].path)
        raise CheckpointError(f"save: the shards of {name} do not fit: {fault[1]}")
    return rows


def _replicated(tensors: Tensors, writers: set[int], dims: int) -> Iterator[np.ndarray]:
    """Yield the pieces of replicated tensors: those of equal holders together, parameters apart."""
    held: list[list[int]] = [[] for _ in tensors.facts]
    for kind, (number, sharded) in enumerate(tensors.kinds):
        for tensor in number[~sharded].tolist():
            held[tensor].append(kind)
    groups: dict[tuple, list[int]] = {}
    for tensor, kinds in enumerate(held):
        if kinds:
            key = (tensors.facts[tensor].path[0] in FIRST, tuple(kinds))
            groups.setdefault(key, []).append(tensor)
    for (_, kinds), group in groups.items():
        ranks = np.flatnonzero(np.isin(tensors.kind_of, kinds)).tolist()
        able = [rank for rank in ranks if rank in writers] or ranks
        yield _cut(np.array(group), able, [tensors.facts[i] for i in group], dims)


def _cut(group: np.ndarray, ranks: Sequence[int], facts: Sequence[Fact], dims: int) -> np.ndarray:
    """Return the pieces of one concatenation cut in equal ranges of bytes."""
    size = itemsizes(facts)
    count = np.array([prod(fact.shape) for fact in facts], np.int64)
    ends, byte_ends = np.add.accumulate(count), np.add.accumulate(size * count)
    bounds = np.array(BlockPartition(int(byte_ends[-1]), len(ranks)).bounds()[1:-1], np.int64)
    # A bound inside an element moves to its beginning, the same for both neighbours.
    at = np.searchsorted(byte_ends, bounds, "right").clip(max=len(group) - 1)
    cuts = (ends - count)[at] + (bounds - (byte_ends - size * count)[at]) // size[at]
    points = np.unique(np.concatenate([[0], ends, cuts]))
    rows = piece_table.blank(len(points) - 1, dims)
    if not len(rows):
        return rows
    start, length = points[:-1], np.diff(points)
    nth = np.searchsorted(ends, start, "right")
    rows[:, piece_table.TENSOR] = group[nth]
    rows[:, piece_table.FILE] = np.array(ranks, np.int64)[np.searchsorted(cuts, start, "right")]
    full = length == count[nth]
    shapes = piece_table.Grid([fact.shape for fact in facts], dims).shape
    rows[full, piece_table.START + dims :] = shapes[nth[full]]
    rows[~full, piece_table.FLAT] = 1
    rows[~full, piece_table.START] = (start - (ends - count)[nth])[~full]
    rows[~full, piece_table.START + dims] = length[~full]
    return rows
