"""Add gradients of microbatches ("pieces"); the bits of the sum are the same for any order.

If stages have different numbers of replicas, a rank may get its pieces in any order. All pieces are
added in a fixed binary tree, so the bits of the sum do not depend on the order in which the pieces
arrive.
"""

from __future__ import annotations

from typing import Any

from ...arrays import array_module
from ...collectives.engines.piecewise import PieceSum
from ...collectives.schedules import fixed_tree


class AnyOrderSum:
    """Takes one rank's gradients of microbatches ("pieces") in any order, and adds them."""

    def __init__(self, sums: PieceSum):
        self.sums = sums
        mine = sums.mine
        self._nodes = fixed_tree.partials(mine.start, mine.stop, sums.pieces)
        self._held: dict[tuple[int, int], Any] = {}  # (level, index) of a node -> its sum
        self._done: dict[tuple[int, int], Any] = {}
        self._free: list = []
        self._next = 0

    def add(self, piece: int, vector, weight: float = 1.0) -> None:
        """Add ``weight * vector`` as the gradients of microbatch number `piece`."""
        dtype, row = self.sums.dtype, self.sums.rows[0]
        total = self._free.pop() if self._free else array_module(row).empty(row.shape, dtype)
        if vector is None:
            total[...] = 0
        else:
            array_module(row).multiply(vector, dtype.type(weight), out=total, dtype=dtype)
        level, index, pieces = 0, piece, self.sums.pieces
        while True:
            node = index << level, min((index + 1) << level, pieces)
            if node in self._nodes:
                self._done[node] = total
                break
            if (index ^ 1) << level < pieces:  # otherwise the parent node has only this half
                other = self._held.pop((level, index ^ 1), None)
                if other is None:
                    self._held[level, index] = total
                    break
                left, right = (other, total) if index & 1 else (total, other)
                left += right
                total = left
                self._free.append(right)
            level, index = level + 1, index >> 1
        self._hand_over()

    def _hand_over(self) -> None:
        while self._next < len(self._nodes) and self._nodes[self._next] in self._done:
            node = self._nodes[self._next]
            total = self._done.pop(node)
            self.sums.add_node(node, total)
            self._free.append(total)
            self._next += 1

    def finish(self, out) -> None:
        """Write the sum over all ranks' microbatches into `out`: the same bits on all ranks."""
        self.sums.finish(out)
        self._next = 0
