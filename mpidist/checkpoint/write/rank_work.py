"""The work of a rank in a save: the pieces of arrays that it holds and that it writes.

A piece is a part of an array that is stored as one HDF5 dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..format import hdf5_layout, manifest, piece_table
from ..format.state import Fact
from .write_plan import Share, itemsizes

#: Where the data of a piece come from: the index of an array, and a range in this array if the
#: array is replicated.
Source = tuple[int, tuple[int, int] | None]


class Work:
    """The parts of arrays that a rank saves, and those that it writes to its shard file."""

    def __init__(self, share: Share, facts: Sequence[Fact], marks: Sequence[tuple]):
        self.to = share.to
        self._share, self._facts, self._marks = share, facts, marks

    @property
    def writes(self) -> int:
        """Number of parts of arrays that this rank writes."""
        return len(self._share.writes)

    @cached_property
    def sources(self) -> list[Source]:
        """For each part that this rank saves, its array's index, and its range (None: all)."""
        places = {mark[0]: place for place, mark in enumerate(self._marks)}
        rows = self._share.gives
        count = piece_table.START + piece_table.axes(rows)
        columns = [piece_table.TENSOR, piece_table.FLAT, piece_table.START, count]
        found: list[Source] = []
        for tensor, flat, start, size in rows[:, columns].tolist():
            place = places[self._facts[tensor].path]
            cut = flat and self._marks[place][3] is None  # a shard is not cut
            found.append((place, (start, start + size) if cut else None))
        return found

    @cached_property
    def given_bytes(self) -> list[int]:
        """Number of bytes of each part of an array that this rank holds and saves."""
        return self._nbytes(self._share.gives).tolist()

    @cached_property
    def holders(self) -> list[int]:
        """For each part of an array that this rank writes, the number of the rank that holds it."""
        return self._share.writes[:, piece_table.FILE].tolist()

    @cached_property
    def written_bytes(self) -> list[int]:
        """Number of bytes of each part of an array that this rank writes."""
        return self._nbytes(self._share.writes).tolist()

    @cached_property
    def gaps(self) -> list[int]:
        """Number of zero bytes after each part of an array in the shard file."""
        sizes = self._nbytes(self._share.writes)
        offsets, end = hdf5_layout.place(sizes)
        return (np.diff(np.append(offsets, end)) - sizes).tolist()

    @cached_property
    def around(self) -> tuple[bytes, bytes]:
        """The bytes of the shard file before the data of the arrays, and those after the data."""
        rows = self._share.writes
        return hdf5_layout.around(self._facts, rows, hdf5_layout.place(self._nbytes(rows))[1])

    @cached_property
    def numbers(self) -> bytes:
        """The list of the parts of arrays that this rank writes, encoded as bytes."""
        return manifest.numbers(self._share.writes)

    @cached_property
    def size(self) -> int:
        """Number of bytes of the shard file."""
        return sum(map(len, self.around)) + sum(self.written_bytes) + sum(self.gaps)

    def _nbytes(self, rows: np.ndarray) -> np.ndarray:
        return piece_table.sizes(rows) * itemsizes(self._facts)[rows[:, piece_table.TENSOR]]
