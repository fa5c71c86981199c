"""Add the gradients of microbatches, for ``train(..., microbatches=V)``.

The global batch is cut into V pieces (microbatches), and the model computes the gradients of each
piece on its own. These gradients are multiplied by the fraction of the batch's samples that are in
the piece. The results of all V pieces are added in the fixed order of a tree
(``collectives/schedules/fixed_tree.py``), so the sum has the same bits on any number of ranks, of
which some may get no piece.

    global batch of 10, V = 4    0 1 2 | 3 4 5 | 6 7 | 8 9
    2 ranks                      rank 0         rank 1
    3 ranks                      rank 0         rank 1       rank 2 has none (``fixed_tree.cuts``)
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI

from ... import events, partition
from ...arrays import is_device, medians
from ...collectives.allreduce import allreduce
from ...collectives.engines.piecewise import PieceSum
from ...errors import ConfigError
from ...gradients.flat_views import flat_views
from ...partition import BlockPartition
from ..checks import check_loss
from ..feed import REJECTIONS, beside
from .allreduce_exchange import Replicas, check_in_place

#: How many exchanges in a fixed order, and how many plain allreduces, are timed for
#: `PieceReplicas.price`.
ROUNDS = 5
#: Bytes of gradients that one call of a model may fill. One call for several pieces saves time only
#: if the gradients are small; for large gradients it would only need more memory.
TOGETHER_BYTES = 4 << 20


class PieceReplicas(Replicas):
    """Add the gradients of microbatches in a fixed order; each rank has a copy of the model.

    Collective over `comm`.
    """

    equal_state = True

    def __init__(self, comm, model, optimizer, algorithm: str, pieces: int, optimizer_state=None):
        super().__init__(comm, model, optimizer, algorithm, optimizer_state=optimizer_state)
        self.pieces = pieces
        self._state = checked_state(model)
        self._together = together(model, -(-pieces // comm.size))
        # Memory for the gradients of `_together` pieces; the sum of all pieces is written into the
        # memory of the first one.
        self._rows, self._filled = flat_views(model.parameters, (self._together,))
        self.gradients = {name: rows[0] for name, rows in self._rows.items()}
        self.flat = [rows[0] for rows in self._filled]
        self._after, vectors = flat_views(self._state) if self._state else ({}, [])
        self._vectors = [*self.flat, *vectors]
        # A rank without pieces can request a stop too, so the request is a vote of each rank and
        # not a value of a piece.
        self._sums = [
            PieceSum(comm, vector.size, vector.dtype, pieces, votes=int(k == 0), like=vector)
            for k, vector in enumerate(self._vectors)
        ]

    def _allocate(self, **settings) -> None:
        """Allocate nothing, because `__init__` allocates the gradients of the microbatches."""

    def order(self) -> dict[str, int]:
        """Return {}: this strategy does not depend on the order of the gradients in memory."""
        return {}

    def hidden(self) -> None:
        """Return None: this rank sends nothing while it computes gradients."""

    def close(self) -> None:
        """Free the `PieceSum` objects, which add the gradients of the microbatches. Collective."""
        for sums in self._sums:
            sums.close()

    def _let_go(self) -> None:
        """Do nothing: this exchange has no thread that must be stopped."""

    def _bounds(self, count: int) -> list[int]:
        """Return the first sample of each microbatch of this rank, and the end of the last one."""
        mine = self._sums[0].mine
        return BlockPartition(count, self.pieces).bounds()[mine.start : mine.stop + 1]

    def part(self, count: int, step: int = 0) -> tuple[int, int]:
        """Return (start, stop) of this rank's samples in a global batch of `count` samples."""
        bounds = self._bounds(count)
        return bounds[0], bounds[-1]

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute and add the gradients of this rank's pieces (microbatches).

        Returns (what these pieces contribute to the global mean loss, their number of samples).
        """
        bounds = self._bounds(len(indices))
        mine = indices[bounds[0] : bounds[-1]]
        taken = feed.take(mine)
        if taken is None:
            self._add_zeros(len(bounds) - 1)
            return 0.0, 0
        batch, mine = beside(taken.batch, self.model), mine[taken.kept]
        # The bounds of the pieces among the good samples.
        bounds = np.searchsorted(taken.kept, np.array(bounds) - bounds[0]).tolist()
        self._before = {name: array.copy() for name, array in self._state.items()}
        total, start, used = 0.0, 0, 0
        for samples, count in equal_runs(bounds, self._together):
            stop = start + count * samples
            if not samples:
                self._add_zeros(count)
            else:
                part = tuple(array[start:stop] for array in batch)
                loss, good = self._add(feed, part, mine[start:stop], count, len(indices))
                total, used = total + loss, used + good
            start = stop
        return total, used

    def _add_zeros(self, count: int) -> None:
        """Add the zero gradients of `count` microbatches that have no samples."""
        for sums in self._sums * count:
            sums.add(None)

    def _add(self, feed, batch: tuple, indices, count: int, all_samples: int) -> tuple[float, int]:
        """Compute and add the gradients of `count` pieces (microbatches) of equal size.

        Returns what these pieces contribute to the global mean loss, and their number of samples.
        """
        each = len(indices) // count
        if self._together > 1:
            with contextlib.suppress(*REJECTIONS):
                return self._add_several(batch, count, each / all_samples), len(indices)
        total, used = 0.0, 0
        for start, stop in partition.pieces(0, len(indices), each):
            piece = tuple(array[start:stop] for array in batch)
            loss, samples = feed.tolerate(piece, indices[start:stop], self._compute_one)
            weight = samples / all_samples
            if samples:
                self.flat[0][-2] = loss
            for sums, vector in zip(self._sums, self._vectors, strict=True):
                sums.add(vector if samples else None, weight)
            total, used = total + loss * weight, used + samples
        return total, used

    def _compute_one(self, batch: tuple) -> float:
        views = dict(self.gradients)
        try:
            loss = self.model.loss_and_gradients(batch, self.gradients)
        finally:
            # Every piece starts from the model state before the step; the state after the piece is
            # stored in separate memory.
            for name, array in self._state.items():
                self._after[name][...] = array
                array[...] = self._before[name]
        check_in_place(self.gradients, views)
        return check_loss(loss)

    def _add_several(self, batch, count: int, weight: float) -> float:
        pieces = tuple(array.reshape(count, -1, *array.shape[1:]) for array in batch)
        gradients = {name: rows[:count] for name, rows in self._rows.items()}
        views = dict(gradients)
        losses = self.model.piece_gradients(pieces, gradients)
        check_in_place(gradients, views)
        self._filled[0][:count, -2] = losses
        for sums, filled in zip(self._sums, self._filled, strict=True):
            sums.add_all(filled[:count], weight)
        return float(sum(losses)) * weight

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Add the gradients of all ranks' microbatches; return (global mean loss, flag).

        Collective over `comm`. The flag is true if `stop` is true on any rank.
        """
        self._exchange(stop)
        first = self.flat[0]
        loss, flag = float(first[-2]), bool(first[-1] > 0)
        # If the flag is set, samples may be missing from the mean of the state: see `rescale`.
        if total and not flag:
            self._leave_state(1.0)
        return loss, flag

    def rescale(self, factor: float) -> None:
        """Multiply mean gradients and mean model state by `factor`, as samples were left out."""
        super().rescale(factor)
        self._leave_state(factor)

    def _leave_state(self, factor: float) -> None:
        for name, array in self._state.items():
            np.multiply(self._after[name], array.dtype.type(factor), out=array)

    def _exchange(self, stop: int) -> None:
        for k, (sums, vector) in enumerate(zip(self._sums, self._vectors, strict=True)):
            sums.finish(vector, [] if k else [stop])

    def begin(self) -> None:
        """Measure the time of a sum of gradients in fixed order, and of an allreduce. Collective.

        The attribute `price` gets the medians of both times, in microseconds, on the slowest rank.
        """
        if self.comm.size == 1:
            return
        seconds = np.empty((ROUNDS + 1, 2))
        for measured in seconds:
            self._add_zeros(len(self._sums[0].mine))
            self.comm.Barrier()
            start = time.perf_counter()
            self._exchange(0)
            measured[0] = time.perf_counter() - start
            self.comm.Barrier()
            start = time.perf_counter()
            for vector in self._vectors:
                allreduce(self.comm, vector, algorithm=self.algorithm)
            measured[1] = time.perf_counter() - start
        # The first round is left out, because it includes the time for new connections, page faults
        # and the choice of an algorithm.
        each = medians(seconds[1:])
        self.comm.Allreduce(MPI.IN_PLACE, each, MPI.MAX)
        ordered, plain = (round(float(median) * 1e6, 1) for median in each)
        self.price = {
            "microbatches": self.pieces,
            "ordered_us": ordered,
            "plain_us": plain,
            "ratio": round(ordered / plain, 3),
        }
        events.emit("microbatches", **self.price)


def together(model, most: int) -> int:
    """Return how many pieces (microbatches) one call of the model may compute, at most `most`."""
    parameters = list(model.parameters.values())
    stateful = bool(getattr(model, "state", {}))
    # A GPU may compute one product and several products with different kernels and last bits.
    if stateful or not hasattr(model, "piece_gradients") or is_device(parameters[0]):
        return 1
    return max(1, min(most, TOGETHER_BYTES // sum(array.nbytes for array in parameters)))


def equal_runs(bounds: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Group neighbouring microbatches of equal size, for one call of the model for each group.

    Yields (samples per microbatch, number of microbatches); the second number is at most `most`.
    """
    sizes = (stop - start for start, stop in itertools.pairwise(bounds))
    for samples, equal in itertools.groupby(sizes):
        for start, stop in partition.pieces(0, len(list(equal)), most):
            yield samples, stop - start


def checked_state(model) -> dict:
    """Return the model's state; raise ConfigError if an array in it is not floating point."""
    state = getattr(model, "state", {})
    for name, array in state.items():
        if array.dtype.kind != "f":
            raise ConfigError(
                f"microbatches: state[{name!r}] of the model is {array.dtype}, and a mean over "
                "microbatches needs fractions; make it floating point, or leave microbatches out"
            )
    return state
