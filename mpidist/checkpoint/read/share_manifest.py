"""Rank 0, which has read the whole manifest, sends each rank the part that this rank needs.

    all ranks  the regions of their shards  --gather-->  rank 0 finds the pieces that overlap them
    all ranks  <--bcast--    the pieces of all tensors that some rank wants whole
               <--scatter--  the other pieces that the rank wants, and the files of these pieces

A piece is a stored part of an array, and only rank 0 checks the list of all pieces.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence

import numpy as np

from ...arrays import unique_numbers
from ..control import run_on_all
from ..format import piece_table
from ..format.manifest import Layout, Manifest
from ..format.state import Fact, Shard

#: If the ranks together ask for more than this many times the number of a tensor's pieces, rank 0
#: broadcasts all its pieces, instead of sending each rank the pieces that this rank wants.
_ONE_BY_ONE = 4


def wanted(comm, leader, tensors: Sequence[Fact], items: list) -> Layout:
    """Return where the arrays in `items` are stored. Collective over `comm`.

    `items` has (path of dict keys, value) pairs of this rank's state. Rank 0 looks the arrays up in
    the manifest, which lists all stored parts.
    """
    number = {tensor.path: place for place, tensor in enumerate(tensors)}
    parts: list[list[Layout]] = []

    def local() -> tuple[bytes, np.ndarray]:
        shards = [(number[path], leaf.region) for path, leaf in items if isinstance(leaf, Shard)]
        arrays = {path for path, leaf in items if not isinstance(leaf, Shard)}
        whole = np.array([tensor.path in arrays for tensor in tensors], bool)
        return np.packbits(whole).tobytes(), piece_table.of_regions(shards)

    def shared(answers: list[tuple[bytes, np.ndarray]]) -> tuple[Layout, bool]:
        base, each = _looked_up(leader.manifest, answers)
        parts.extend(each)
        return base, any(each)

    base, more = run_on_all(comm, "restore", local, shared)
    base = base._replace(tensors=tensors)
    if not more:
        return base
    mine = run_on_all(comm, "restore", lambda: None, lambda _: parts, each=True)
    rows = piece_table.joined([base.rows, *(part.rows for part in mine)])
    rows = rows[np.argsort(rows[:, piece_table.TENSOR], kind="stable")]
    files = dict(ChainMap(base.files, *(part.files for part in mine)))
    return base._replace(files=files, rows=rows)


def _looked_up(
    found: Manifest, answers: Sequence[tuple[bytes, np.ndarray]]
) -> tuple[Layout, list[list[Layout]]]:
    """Return the parts that rank 0 broadcasts, and for each rank the parts sent to it only."""
    count, dims = len(found.tensors), piece_table.axes(found.rows)
    tensor = found.rows[:, piece_table.TENSOR]
    masks = [np.frombuffer(mask, np.uint8) for mask, _ in answers]
    whole = np.unpackbits(np.bitwise_or.reduce(masks), count=count).astype(bool)
    wants = piece_table.joined([rows for _, rows in answers], dims)
    rank = np.repeat(np.arange(len(answers)), [len(rows) for _, rows in answers])
    keep = ~whole[wants[:, piece_table.TENSOR]]
    grid = piece_table.Grid([tensor.shape for tensor in found.tensors], dims)
    want, piece = piece_table.overlapping(grid, wants[keep], found.rows)
    rank = rank[keep][want]
    asked = np.bincount(tensor[piece], minlength=count)
    whole |= asked > _ONE_BY_ONE * np.bincount(tensor, minlength=count)
    own = np.flatnonzero(~whole[tensor[piece]])
    # The pairs are sorted by rank, and for each rank in the order of the manifest.
    own = own[np.argsort(rank[own] * len(found.rows) + piece[own], kind="stable")]
    split = np.split(piece[own], np.searchsorted(rank[own], np.arange(1, len(answers))))
    each = [[layout_of(found, found.rows[some])] if len(some) else [] for some in split]
    return layout_of(found, found.rows[whole[tensor]]), each


def layout_of(found: Manifest, rows: np.ndarray) -> Layout:
    """Return a `Layout`: stored parts of arrays, and descriptions of the files that hold them.

    `rows` are the rows of the manifest's table that describe these parts.
    """
    numbers = unique_numbers(rows[:, piece_table.FILE]).tolist()
    return Layout(found.block, {number: found.files[number] for number in numbers}, (), rows)
