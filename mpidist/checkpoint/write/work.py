"""What one rank does in the saves of a plan: what it gives of which array, what it writes where.

Made once for a plan and used by each save, so that a save of many small arrays costs little more
than a look at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..format import hdf5_layout, manifest, piece_table
from ..format.state import Fact
from .write_plan import Share, itemsizes

#: Where a given piece comes from: the place of its leaf, and the range of a replicated array.
Source = tuple[int, tuple[int, int] | None]


class Work:
    """The share of a rank, as it is used. All is made when it is first asked for.

    Parameters
    ----------
    share : Share
    facts : list of Fact
        All tensors, in their order.
    marks : list
        What the rank's arrays are, as in a `Survey`.
    """

    def __init__(self, share: Share, facts: Sequence[Fact], marks: Sequence[tuple]):
        self.to = share.to
        self._share, self._facts, self._marks = share, facts, marks

    @property
    def writes(self) -> int:
        """Number of pieces that this rank writes."""
        return len(self._share.writes)

    @cached_property
    def sources(self) -> list[Source]:
        """Where each piece comes from that this rank gives."""
        places = {mark[0]: place for place, mark in enumerate(self._marks)}
        place_of = [places.get(fact.path, -1) for fact in self._facts]
        rows = self._share.gives
        start = rows[:, piece_table.START]
        stop = start + rows[:, piece_table.START + piece_table.axes(rows)]
        columns = (rows[:, piece_table.TENSOR], rows[:, piece_table.FLAT], start, stop)
        found: list[Source] = []
        for tensor, flat, low, high in zip(*(c.tolist() for c in columns), strict=True):
            place = place_of[tensor]
            cut = bool(flat) and self._marks[place][3] is None  # a shard is its region
            found.append((place, (low, high) if cut else None))
        return found

    @cached_property
    def given_bytes(self) -> list[int]:
        """Bytes of each piece that this rank gives."""
        return self._nbytes(self._share.gives).tolist()

    @cached_property
    def holders(self) -> list[int]:
        """Who gives each piece that this rank writes."""
        return self._share.writes[:, piece_table.FILE].tolist()

    @cached_property
    def written_bytes(self) -> list[int]:
        """Bytes of each piece that this rank writes."""
        return self._nbytes(self._share.writes).tolist()

    @cached_property
    def gaps(self) -> list[int]:
        """Bytes of nothing behind each piece in the file."""
        sizes = self._nbytes(self._share.writes)
        offsets, end = hdf5_layout.place(sizes)
        return (np.diff(np.append(offsets, end)) - sizes).tolist()

    @cached_property
    def around(self) -> tuple[bytes, bytes]:
        """What stands before and behind the pieces in the file."""
        rows = self._share.writes
        return hdf5_layout.around(self._facts, rows, hdf5_layout.place(self._nbytes(rows))[1])

    @cached_property
    def numbers(self) -> bytes:
        """The pieces as they stand in the table."""
        return manifest.numbers(self._share.writes)

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(map(len, self.around)) + sum(self.written_bytes) + sum(self.gaps)

    def _nbytes(self, rows: np.ndarray) -> np.ndarray:
        return piece_table.sizes(rows) * itemsizes(self._facts)[rows[:, piece_table.TENSOR]]
