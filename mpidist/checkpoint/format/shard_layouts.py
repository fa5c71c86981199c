"""Who learns where what lies: of what rank 0 has read, each rank the pieces that it wants.

    all ranks  the regions of their shards  --gather-->  rank 0 looks up the pieces they touch
    all ranks  <--bcast--    the pieces of what somebody wants whole
               <--scatter--  each the others that it wants, with the files they are in

So nobody decodes, proves or holds what only others read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..control import run_on_all
from . import piece_table
from .manifest import Layout, Manifest
from .state import Fact, Shard

#: Times as many pieces as a tensor has that all ranks together may want one by one.
_ONE_BY_ONE = 4


def wanted(comm, leader, tensors: Sequence[Fact], items: list) -> Layout:
    """Return of the manifest that rank 0's `leader` holds what fills the leaves of `items`.

    Collective over `comm`.
    """
    number = {tensor.path: place for place, tensor in enumerate(tensors)}
    parts: list[list[Layout]] = []

    def tell() -> tuple[bytes, np.ndarray]:
        whole = np.zeros(len(tensors), bool)
        regions = []
        for path, leaf in items:
            if isinstance(leaf, Shard):
                regions.append((number[path], leaf.region))
            elif path in number:
                whole[number[path]] = True
        return np.packbits(whole).tobytes(), piece_table.of_regions(regions)

    def shared(answers: list[tuple[bytes, np.ndarray]]) -> tuple[Layout, bool]:
        base, each = _looked_up(leader.manifest, answers)
        parts.extend(each)
        return base, any(each)

    base, more = run_on_all(comm, "restore", tell, shared)
    base = base._replace(tensors=tensors)
    if not more:
        return base
    mine = run_on_all(comm, "restore", lambda: None, lambda _: parts, each=True)
    rows = piece_table.joined([base.rows, *(part.rows for part in mine)])
    rows = rows[np.argsort(rows[:, piece_table.TENSOR], kind="stable")]
    files = dict(base.files)
    for part in mine:
        files |= part.files
    return base._replace(files=files, rows=rows)


def _looked_up(
    found: Manifest, answers: Sequence[tuple[bytes, np.ndarray]]
) -> tuple[Layout, list[list[Layout]]]:
    """Rank 0: return what all ranks are told, and what each one besides.

    A rank's answer is which tensors it wants whole, as bits, and the regions of its shards.
    """
    count, dims = len(found.tensors), piece_table.axes(found.rows)
    masks = [np.frombuffer(mask, np.uint8) for mask, _ in answers]
    whole = np.unpackbits(np.bitwise_or.reduce(masks), count=count).astype(bool)
    wants = piece_table.joined([rows for _, rows in answers], dims)
    rank = np.repeat(np.arange(len(answers)), [len(rows) for _, rows in answers])
    keep = ~whole[wants[:, piece_table.TENSOR]]
    wants, rank = wants[keep], rank[keep]
    grid = piece_table.Grid([tensor.shape for tensor in found.tensors], dims)
    want, piece = piece_table.overlapping(grid, wants, found.rows)
    asked = np.bincount(found.rows[piece, piece_table.TENSOR], minlength=count)
    there = np.bincount(found.rows[:, piece_table.TENSOR], minlength=count)
    whole |= asked > _ONE_BY_ONE * there
    own = np.flatnonzero(~whole[found.rows[piece, piece_table.TENSOR]])
    # By rank, each in the order of the pieces.
    own = own[np.argsort(rank[want[own]] * len(found.rows) + piece[own], kind="stable")]
    ends = np.searchsorted(rank[want[own]], np.arange(1, len(answers)))
    each = [
        [layout_of(found, found.rows[some])] if len(some) else []
        for some in np.split(piece[own], ends)
    ]
    return layout_of(found, found.rows[whole[found.rows[:, piece_table.TENSOR]]]), each


def layout_of(found: Manifest, rows: np.ndarray) -> Layout:
    """Return what a rank is told: these pieces, and the files that they are in."""
    numbers = np.unique(rows[:, piece_table.FILE]).tolist()
    return Layout(found.block, {number: found.files[number] for number in numbers}, (), rows)
