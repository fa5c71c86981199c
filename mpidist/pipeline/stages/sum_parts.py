"""The sums of gradients over the replicas of a stage, in parts that are sent while others compute.

    last backward pass of a chunk    | layer 3 | layer 2 | layer 1 | layer 0 |
    parts that are sent                        | part 1: layers 3, 2 .. | part 0: layers 1, 0 ..

If the replicas are on several hosts, the gradients of a chunk are cut into parts of whole layers. A
part is sent as soon as the last microbatch of this rank has added its gradients. All replicas begin
their parts in one order, whoever is ready first. On one host nothing is sent, and a chunk has one
part for each dtype. The bits do not depend on the parts: each element is added in the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...collectives.engines.node_barrier import faked_nodes
from ...collectives.engines.piecewise import PieceSum
from ...runtime.topology import topology_of
from .piece_order import AnyOrderSum

#: The least bytes of a part: below them, a message costs more than it hides.
LEAST = 1 << 18


class SumPart:
    """Some gradients of a chunk that lie one after the other in a vector. Collective.

    Parameters
    ----------
    comm : MPI.Comm
        The replicas of the stage.
    vector : array
        A part of the vector of gradients.
    pieces : int
        The microbatches of all replicas.
    names : set of str
        The gradients in it.
    in_order : bool
        Whether the microbatches come in the order of their numbers.
    """

    def __init__(self, comm, vector, pieces: int, names: set[str], in_order: bool):
        self.vector, self.names, self._in_order = vector, names, in_order
        self.sums = PieceSum(comm, vector.size, vector.dtype, pieces, like=vector)
        self._adding: Any = self.sums if in_order else AnyOrderSum(self.sums)
        self._left = len(self.sums.mine)
        self.sums.prepare()  # while all replicas are here: one that waits in a pass stops others

    @property
    def complete(self) -> bool:
        """Whether this rank has added all its microbatches."""
        return self._left == 0

    def add(self, microbatch: int, weight: float | None) -> None:
        """Add the gradients of a microbatch, times `weight`; None for one without samples."""
        number = () if self._in_order else (microbatch,)
        vector, factor = (None, 1.0) if weight is None else (self.vector, weight)
        self._adding.add(*number, vector, factor)
        self._left -= 1

    def finish(self) -> None:
        """Put the sum into the vector. Collective over the replicas of the stage."""
        self._adding.finish(self.vector)
        self._left = len(self.sums.mine)


class SumQueue:
    """The parts of all chunks of a rank, which the replicas begin in the order of the queue."""

    def __init__(self, parts: Sequence[SumPart]):
        self.parts = list(parts)
        self._begun = 0

    def progress(self) -> None:
        """Begin the sums of the complete parts, and make progress for those under way."""
        while self._begun < len(self.parts) and self.parts[self._begun].complete:
            self.parts[self._begun].sums.begin()
            self._begun += 1
        for part in self.parts[: self._begun]:
            part.sums.test()

    def finish(self) -> None:
        """Finish all sums. Collective over the replicas of the stage."""
        self.progress()
        for part in self.parts:
            part.finish()
        self._begun = 0


def is_sent(comm) -> bool:
    """Return whether the sums over `comm` are sent in messages. Collective on first use."""
    return comm.size > 1 and topology_of(comm, faked_nodes(comm)).nodes > 1


def parts_of_vector(
    names: Sequence[str], sizes: Sequence[int], itemsize: int
) -> list[tuple[int, int, set[str]]]:
    """Return (start, stop, names) of the parts of a vector; the last one has its free numbers, too.

    `names` and `sizes` are those of the arrays in the vector, in their order. A part has at least
    `LEAST` bytes, but for the first one.
    """
    parts: list[tuple[int, int, set[str]]] = []
    stop = end = sum(sizes)
    inside: set[str] = set()
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        stop -= size
        inside.add(name)
        if (end - stop) * itemsize >= LEAST:
            parts.append((stop, end, inside))
            end, inside = stop, set()
    if inside or not parts:
        parts.append((0, end, inside))
    return parts
