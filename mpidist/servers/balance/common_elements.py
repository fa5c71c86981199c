"""When a model gets a new layout, find which elements each server gets from each server.

    old   server 0 | 0 1 2 3 4 5 6 7 | server 1 | 8 9 10 11 |
    new   server 0 | 0 1 2 3 4 5 |     server 1 | 6 7 8 9 10 11 |      only 6 and 7 change owner

This module uses no MPI.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..layout.dealt_rows import dealt_to
from ..layout.placement import ServerLayout


class Common(NamedTuple):
    """Elements of one tensor that server A holds in the old layout and server B in the new layout.

    A and B may be the same server. `old` has the indices of these elements in A's array, and `new`
    has their indices in B's array. If `width` is 0, the indices are slices of a 1-D array.
    Otherwise they are row numbers of a 2-D array with rows of `width` elements.
    """

    old: Any
    new: Any
    width: int = 0

    def table(self, array: np.ndarray) -> np.ndarray:
        """Return the 1-D `array` of a server in a shape that `old` or `new` can index.

        If `width` is not 0, the result is 2-D and has rows of `width` elements. Otherwise it is
        `array` itself.
        """
        return array.reshape(-1, self.width) if self.width else array


class TensorMove:
    """The elements of one tensor that each server holds in the layouts `old` and `new`."""

    def __init__(self, old: Divided, new: Divided, tensor: int):
        # The piece (range of elements) of each server, or None.
        self.old, self.new = ([held.get(tensor) for held in one.pieces] for one in (old, new))
        self._before, self._after = (one.layout.tensors[tensor] for one in (old, new))
        self._same = self._before.dealt == self._after.dealt
        # Whether any server holds other elements in the new layout.
        self.changes = self.old != self.new or not self._same

    def stays(self, server: int) -> bool:
        """Whether server number `server` holds the same elements in the old and the new layout."""
        return self.old[server] == self.new[server] and self._same

    def common(self, i: int, j: int) -> Common | None:
        """Return the elements that server `i` has in the old and server `j` in the new layout.

        The result is None if there are no such elements.
        """
        a, b = self.old[i], self.new[j]
        if a is None or b is None:
            return None
        if turns := self._after.dealt:
            count, width = self._after.shape[0], max(1, self._after.width)
            given, taken = dealt_to(i, count, self._before.dealt), dealt_to(j, count, turns)
            here = np.intersect1d(given, taken, assume_unique=True, return_indices=True)
            return Common(here[1], here[2], width) if here[1].size else None
        low, high = max(a.start, b.start), min(a.stop, b.stop)
        if low >= high:
            return None
        return Common(slice(low - a.start, high - a.start), slice(low - b.start, high - b.start))


class Divided:
    """A layout that knows which piece (range of elements) of each tensor each server holds."""

    def __init__(self, layout: ServerLayout, servers: int):
        self.layout = layout
        pieces = [*layout.pieces, *((),) * (servers - len(layout.pieces))]
        self.pieces = [{piece.tensor: piece for piece in held} for held in pieces]
