"""Choose which rank writes each element of a state, so that all ranks write about equally much.

Replicated tensors are laid end to end, and cut into one range for each rank that holds them:

    w 0 1 2 3 4 5 6 7 8 9   b 0 1 2      3 ranks, 13 elements
      | rank 0  |  rank 1 |  rank 2 |    w[0:4]  w[4:8]  w[8:10] + b[0:3]

The parameters are divided separately from all other tensors, and come first in every file. A shard
of an array is written by a rank that holds it.

With the option ``writers`` only some of the ranks write, also for the others:

    writers = 2, 4 ranks    rank 0 writes for 0 and 1, rank 2 for 2 and 3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from ...arrays import unique_numbers
from ...errors import CheckpointError, MismatchError
from ...partition import BlockPartition
from ..format import hdf5_layout, piece_table
from ..format.state import Fact, Path, named_dtype, show, tree

#: The names that the top-level entry with the parameters may have. The tensors of this entry are
#: written first.
FIRST = ("parameters", "params")

#: The leaves of a state that are not arrays: a dict from path to a value that JSON can hold.
Extras = tuple[tuple[Path, object], ...]


class Description(NamedTuple):
    """The arrays of one rank, without their data.

    `facts` describes the rank's tensors (global arrays). For each of them, `sharded` says whether
    the rank holds only a shard. `shards` is a table (see `piece_table`) of the index ranges of the
    shards.
    """

    facts: tuple[Fact, ...]
    sharded: tuple[bool, ...]
    shards: np.ndarray


class Tensors(NamedTuple):
    """The tensors of all ranks, and which ranks hold which tensors.

    `facts` is a list that describes all tensors. Ranks that hold the same tensors are of one kind.
    For each kind, `kinds` has the indices of its tensors in `facts`, and says which of these
    tensors are sharded. `kind_of` has the number of the kind of each rank.
    """

    facts: list[Fact]
    kinds: list[tuple[np.ndarray, np.ndarray]]
    kind_of: np.ndarray


def agree(all_ranks: Sequence[Description]) -> Tensors:
    """Merge the descriptions that all ranks give of their arrays; return the tensors of all ranks.

    Raises MismatchError if two ranks describe a tensor differently.
    """
    tensors: dict[Path, tuple[int, tuple]] = {}
    kinds: dict[tuple, int] = {}
    kind_of: list[int] = []
    for rank, one in enumerate(all_ranks):
        known, first = len(kinds), all_ranks[0]
        same = rank and one.facts is first.facts and one.sharded is first.sharded
        kind_of.append(0 if same else kinds.setdefault((one.facts, one.sharded), known))
        if kind_of[rank] == known:
            for held in zip(one.facts, one.sharded, strict=True):
                _same(rank, held[0].path, held, tensors, _described)
    facts = in_order(fact for _, (fact, _) in tensors.values())
    number = {fact.path: i for i, fact in enumerate(facts)}
    numbered = [
        (np.array([number[fact.path] for fact in kind], np.int64), np.array(sharded, bool))
        for kind, sharded in kinds
    ]
    return Tensors(facts, numbered, np.array(kind_of, np.int64))


def agree_on_extras(all_ranks: Sequence[Extras]) -> Extras:
    """Return the extras (all values except arrays) from the states of all ranks.

    Raises MismatchError if two ranks have different values for an extra.
    """
    extras: dict[Path, tuple[int, object]] = {}
    for rank, one in enumerate(all_ranks):
        for path, value in one:
            _same(rank, path, value, extras, repr)
    return tuple((path, value) for path, (_, value) in extras.items())


def check_names(facts: Sequence[Fact], extras: Sequence[Path]) -> None:
    """Raise an error if the same keys lead to an array on one rank and a plain value on another."""
    both = sorted(show(path) for path in {fact.path for fact in facts}.intersection(extras))
    if both:
        raise MismatchError(f"save: {both} are arrays on some ranks and plain values on others")
    tree((path, None) for path in [*(fact.path for fact in facts), *extras])


def in_order(facts: Iterable[Fact]) -> list[Fact]:
    """Return the tensors in the order in which all files hold them: parameters first."""
    return sorted(facts, key=lambda fact: fact.path[0] not in FIRST)


def _described(held: tuple[Fact, bool]) -> str:
    fact, sharded = held
    kind = "sharded" if sharded else "replicated"
    return f"{kind} {fact.dtype} of global shape {fact.shape}"


def _same(rank: int, path: Path, value, known: dict, tell) -> None:
    """Record that `rank` has this `value`; raise MismatchError if another rank differs."""
    first, other = known.setdefault(path, (rank, value))
    here, there = tell(value), tell(other)
    if here != there:
        raise MismatchError(
            f"save: {show(path)} is {here[:200]} on rank {rank}, {there[:200]} on rank {first}"
        )


def writers_of(writers: str | int, nodes: Sequence[int]) -> list[int]:
    """Return, for each rank, the rank that writes its data; `nodes` has the node of each rank.

    If `writers` is "all", each rank writes. If it is "node", the first rank of each node writes. If
    it is a number, this number of evenly spaced ranks write.
    """
    size = len(nodes)
    if writers == "all":
        return list(range(size))
    if writers == "node":
        return [nodes.index(node) for node in nodes]
    cut = BlockPartition(size, min(int(writers), size))
    return [cut.range(cut.owner(rank))[0] for rank in range(size)]


class Share(NamedTuple):
    """Which parts of arrays a rank gives to the rank that writes them, and which parts it writes.

    `gives` are the rank's own parts, which the rank `to` writes. `writes` are the parts that the
    rank itself writes. Both are tables (see `piece_table`) whose column `FILE` has the number of
    the rank that holds the part.
    """

    gives: np.ndarray
    to: int
    writes: np.ndarray


def itemsizes(facts: Sequence[Fact]) -> np.ndarray:
    """Return, for each tensor, the number of bytes of one element."""
    known = {name: named_dtype(name).itemsize for name in {fact.dtype for fact in facts}}
    return np.array([known[fact.dtype] for fact in facts], np.int64)


def shares(
    tensors: Tensors, all_ranks: Sequence[Description], writer_of: Sequence[int]
) -> list[Share]:
    """Return, for each rank, which parts of arrays it sends and which it writes in a save.

    Raises CheckpointError if the shards of an array overlap or leave a hole.
    """
    rows = assign(tensors, all_ranks, writer_of)
    holder, tensor = rows[:, piece_table.FILE], rows[:, piece_table.TENSOR]
    writer = np.array(writer_of, np.int64)[holder]
    size, count = len(all_ranks), len(tensors.facts)
    # Pieces of one tensor are in the order of their holders, which is the order of the regions.
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
    """Return the table of all parts of arrays in a save, with the rank that holds each."""
    shapes = [fact.shape for fact in tensors.facts]
    tables, seen = [], set()
    for rank, one in enumerate(all_ranks):
        if len(one.shards) and id(one.shards) not in seen:  # ranks with the same table count once
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
    """Yield a table of parts for each group of tensors that the same ranks hold whole."""
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
    """Lay tensors end to end, and cut them into one range of about equal bytes for each rank."""
    size = itemsizes(facts)
    count = np.array([prod(fact.shape) for fact in facts], np.int64)
    ends, byte_ends = np.add.accumulate(count), np.add.accumulate(size * count)
    bounds = np.array(BlockPartition(int(byte_ends[-1]), len(ranks)).bounds()[1:-1], np.int64)
    # A bound that lies inside an element is moved to the beginning of the element.
    at = np.searchsorted(byte_ends, bounds, "right").clip(max=len(group) - 1)
    cuts = (ends - count)[at] + (bounds - (byte_ends - size * count)[at]) // size[at]
    points = unique_numbers(np.concatenate([[0], ends, cuts]))
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
