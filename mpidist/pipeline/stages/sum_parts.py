"""The sums of gradients over the replicas of a stage, in parts that are sent during computation.

    last backward pass of a chunk    | layer 3 | layer 2 | layer 1 | layer 0 |
    parts that are sent                        | part 1: layers 3, 2 .. | part 0: layers 1, 0 ..

If the replicas are on several hosts, the gradients of a chunk (a group of layers) are cut into
parts of whole layers. A rank begins to send a part as soon as it has added its last microbatch's
gradients to the part. If all replicas are on one host, they add in shared memory, and there is one
part for each dtype. The bits of the sums do not depend on the parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...collectives.engines.node_barrier import faked_nodes
from ...collectives.engines.piecewise import PieceSum
from ...runtime.topology import topology_of
from .piece_order import AnyOrderSum

#: The smallest number of bytes of a part. `tests/benchmarks/pipeline_overlap.py` ("parts") measured
#: how long two ranks need to sum a MiB. Compared with parts of 4 MiB, parts of 256 KiB took 0.9 to
#: 1.4 times as long, parts of 64 KiB 1.6 to 3.1 times, and parts of 16 KiB 4.3 to 7.4 times.
LEAST = 1 << 18


class SumPart:
    """The sum, over microbatches and the ranks of a stage, of some gradients. Collective.

    Parameters
    ----------
    comm : MPI.Comm
        The replicas of the stage.
    vector : array
        The part of the vector of gradients that this object sums; it also gets the result.
    pieces : int
        The number of microbatches of all replicas.
    shapes : dict of str to tuple
        The shapes of the gradients in `vector`, in the order of memory.
    in_order : bool
        Whether this rank adds its microbatches in the order of their numbers.
    """

    def __init__(
        self, comm, vector, pieces: int, shapes: dict[str, tuple[int, ...]], in_order: bool
    ):  # fmt: skip
        self.vector, self.names, self._in_order = vector, set(shapes), in_order
        self._shapes = shapes
        self.sums = PieceSum(comm, vector.size, vector.dtype, pieces, like=vector)
        self._adding: Any = self.sums if in_order else AnyOrderSum(self.sums)
        self._left = len(self.sums.mine)
        self._row: Any = None  # where the next microbatch is written, if it is not `vector`
        self._views: dict[int, dict] = {}  # address of a vector -> the arrays that `aim` returns
        self._bounds: dict[str, tuple[int, int]] = {}  # where the gradients are in `vector`
        stop = 0
        for name, shape in shapes.items():
            start, stop = stop, stop + math.prod(shape)
            self._bounds[name] = start, stop
        self._one_layer: dict[str, Any] = {}  # the gradients in the memory that all layers share
        self._add_part: Any = None  # a function that adds a part of the present microbatch
        # This call is collective, so it is made here and not during a step, in which a replica may
        # be waiting for another stage.
        self.sums.prepare()

    @property
    def complete(self) -> bool:
        """Whether this rank has added the gradients of all its microbatches."""
        return self._left == 0

    def share_memory(self, layers: Sequence[Sequence[str]]) -> None:
        """Let all layers write their gradients into one small memory, which each layer overwrites.

        Call `take` for each layer's gradients before the next layer overwrites them.
        """
        mine = [[name for name in names if name in self._bounds] for names in layers]
        sizes = [sum(math.prod(self._shapes[name]) for name in names) for names in mine]
        if not self._fits or 2 * max(sizes) > self.vector.size:
            return
        memory = np.empty(max(sizes), self.vector.dtype)
        for names in mine:
            stop = 0
            for name in names:
                start, stop = stop, stop + math.prod(self._shapes[name])
                self._one_layer[name] = memory[start:stop].reshape((1, *self._shapes[name]))

    @property
    def _fits(self) -> bool:
        """Whether layers may write into memory of the sum, or gradients be added layer by layer."""
        ours = isinstance(self.sums.rows, np.ndarray) and self.sums.dtype == self.vector.dtype
        return self._in_order and ours

    def aim(self, weight: float | None) -> tuple[Any, dict]:
        """Return where layers must write the next microbatch's gradients: a vector, and arrays.

        The arrays are in a dict, by the names of the gradients. They are views of the vector, or of
        memory that all layers share (see `share_memory`). After the backward pass of each layer,
        call `take`.
        """
        self._row = self.sums.next_row() if self._fits else None
        if self._row is None and self._one_layer and weight is not None:
            self._add_part = self.sums.begin_piece(weight, out=self.vector)
            return self.vector, self._one_layer
        memory = self.vector if self._row is None else self._row
        key = memory.ctypes.data if self._row is not None else 0
        if key not in self._views:
            self._views[key] = {
                name: memory[start:stop].reshape((1, *self._shapes[name]))
                for name, (start, stop) in self._bounds.items()
            }
        return memory, self._views[key]

    def take(self, names: Sequence[str]) -> None:
        """Add the gradients `names` of a layer to the sums, if layers share memory.

        The next layer overwrites them in the memory that `share_memory` has made.
        """
        if self._add_part is not None:
            for name in names:
                if name in self._bounds:
                    self._add_part(self._bounds[name][0], self._one_layer[name].reshape(-1))

    def add(self, microbatch: int, weight: float | None) -> None:
        """Add a microbatch's gradients, multiplied by `weight`.

        `weight` is None for a microbatch without samples.
        """
        row, self._row = self._row, None
        vector, factor = (None, 1.0) if weight is None else (self.vector, weight)
        if self._add_part is not None:  # `take` has added all that belongs to a layer
            done = max((stop for _, stop in self._bounds.values()), default=0)
            self._add_part(done, self.vector[done:])
            self._add_part = None
        elif row is not None and weight is not None:
            self.sums.add_row(weight)
        elif self._in_order:
            self.sums.add(vector, factor, last=True)
        else:
            self._adding.add(microbatch, vector, factor)
        self._left -= 1

    def close(self) -> None:
        """Free the memory in which gradients are summed. Collective over the replicas."""
        self._row = self._add_part = None  # these and the views are in the memory of the sum
        self._views.clear()
        self._one_layer.clear()
        self._adding = self.sums  # without the sums of nodes that `AnyOrderSum` has kept
        self.sums.close()

    def finish(self) -> None:
        """Finish the sum of the gradients; write it into `vector`. Collective over the replicas."""
        self._adding.finish(self.vector)
        self._left = len(self.sums.mine)


class SumQueue:
    """The sums of gradients of a rank, in the order in which all replicas begin them."""

    def __init__(self, parts: Sequence[SumPart]):
        self.parts = list(parts)
        self._begun = 0

    def progress(self) -> None:
        """Begin the next sums whose gradients are complete; continue the sums that have begun."""
        while self._begun < len(self.parts) and self.parts[self._begun].complete:
            self.parts[self._begun].sums.begin()
            self._begun += 1
        for part in self.parts[: self._begun]:
            part.sums.test()

    def finish(self) -> None:
        """Wait until all sums are finished and written. Collective over the stage's replicas."""
        self.progress()
        for part in self.parts:
            part.finish()
        self._begun = 0


def is_sent(comm) -> bool:
    """Return whether sums over `comm` need messages between hosts.

    The first call for a communicator is collective over its ranks.
    """
    return comm.size > 1 and topology_of(comm, faked_nodes(comm)).nodes > 1


def parts_of_vector(
    names: Sequence[str], sizes: Sequence[int], itemsize: int
) -> list[tuple[int, int, set[str]]]:
    """Cut a vector of gradients into parts to be summed one by one; return (start, stop, names).

    The part at the end of the vector comes first, because its gradients are the first to be final.
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
