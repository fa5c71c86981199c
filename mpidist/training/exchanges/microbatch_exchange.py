"""The exchange of ``train(..., microbatches=V)``: the same bits on any number of ranks.

The global batch is cut into V pieces, by position alone. A rank computes its pieces so that every
matrix product has the same shape whoever holds the piece: each by a call of its own, or several
of equal size by one call of a model that can (`piece_gradients`). Gradients, loss and model state
of a piece, times its share of the samples, are added in the fixed tree over the V pieces
(``collectives/schedules/fixed_tree.py``).

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
from ...arrays import is_device
from ...collectives.allreduce import allreduce
from ...collectives.engines.piecewise import PieceSum
from ...errors import ConfigError
from ...gradients.flat_views import flat_views
from ...partition import BlockPartition
from ..checks import check_loss
from ..feed import REJECTIONS, beside
from .allreduce_exchange import Replicas, check_in_place

#: Exchanges of each kind that are timed for `PieceReplicas.price`.
ROUNDS = 5
#: Bytes of gradients that one call of a model may fill. Only where they are few, and products are
#: small, does a call for several pieces save time; large ones would only need the memory.
TOGETHER_BYTES = 4 << 20


class PieceReplicas(Replicas):
    """Replicas whose gradients are summed over pieces, not over ranks. Collective over `comm`."""

    equal_state = True

    def __init__(self, comm, model, optimizer, algorithm: str, pieces: int):
        super().__init__(comm, model, optimizer, algorithm)
        self.pieces = pieces
        self._state = checked_state(model)
        self._together = together(model, -(-pieces // comm.size))
        # Room for the gradients of that many pieces; the first one's takes the sum over all.
        self._rows, self._filled = flat_views(model.parameters, (self._together,))
        self.gradients = {name: rows[0] for name, rows in self._rows.items()}
        self.flat = [rows[0] for rows in self._filled]
        self._after, vectors = flat_views(self._state) if self._state else ({}, [])
        self._vectors = [*self.flat, *vectors]
        # The wish to stop is every rank's, also of one that has no piece: it is a vote.
        self._sums = [
            PieceSum(comm, vector.size, vector.dtype, pieces, votes=int(k == 0), like=vector)
            for k, vector in enumerate(self._vectors)
        ]

    def _allocate(self, **settings) -> None:
        """Nothing here: pieces are summed in memory of their own."""

    def order(self) -> dict[str, int]:
        """Return nothing: the tree over the pieces does not depend on where a gradient lies."""
        return {}

    def hidden(self) -> None:
        """Return None: nothing travels before all pieces are there."""

    def close(self) -> None:
        """Free what was made. Collective."""
        for sums in self._sums:
            sums.close()

    def _let_go(self) -> None:
        """Nothing here: no thread makes progress."""

    def _bounds(self, count: int) -> list[int]:
        """Return where this rank's pieces of a global batch begin, and where the last ends."""
        mine = self._sums[0].mine
        return BlockPartition(count, self.pieces).bounds()[mine.start : mine.stop + 1]

    def part(self, count: int) -> tuple[int, int]:
        """Return which samples of a global batch of `count` are this rank's."""
        bounds = self._bounds(count)
        return bounds[0], bounds[-1]

    def compute(self, feed, indices) -> tuple[float, int]:
        """Compute and add this rank's pieces; returns (its share of the loss, samples).

        The samples are taken at once and then cut: a source gives each of them as it is, whatever
        else is asked for. Pieces of no samples (a short last batch, bad records) are zero.
        """
        bounds = self._bounds(len(indices))
        mine = indices[bounds[0] : bounds[-1]]
        taken = feed.take(mine)
        if taken is None:
            for sums in self._sums * (len(bounds) - 1):
                sums.add(None)
            return 0.0, 0
        batch, mine = beside(taken.batch, self.model), mine[taken.kept]
        # Where the good samples of each piece lie among the good ones.
        bounds = np.searchsorted(taken.kept, np.array(bounds) - bounds[0]).tolist()
        self._before = {name: array.copy() for name, array in self._state.items()}
        total, start, used = 0.0, 0, 0
        for samples, count in equal_runs(bounds, self._together):
            stop = start + count * samples
            part, of = tuple(array[start:stop] for array in batch), mine[start:stop]
            if not samples:
                for sums in self._sums * count:
                    sums.add(None)
            else:
                loss, good = self._add(feed, part, of, count, len(indices))
                total, used = total + loss, used + good
            start = stop
        return total, used

    def _add(self, feed, batch: tuple, indices, count: int, all_samples: int) -> tuple[float, int]:
        """Add `count` pieces of equal size; returns (share of the loss, samples)."""
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
            # Every piece begins with the state that the step began with, and leaves its own.
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
        """Sum what `compute` has added; returns (global loss, flag). Collective.

        The losses lie beside the gradients; what is given of this rank's is not needed.
        """
        self._exchange(stop)
        first = self.flat[0]
        loss, flag = float(first[-2]), bool(first[-1] > 0)
        # Where the flag is up nobody knows yet whether the state is a whole mean: see `rescale`.
        if total and not flag:
            self._leave_state(1.0)
        return loss, flag

    def rescale(self, factor: float) -> None:
        """Multiply the reduced gradients, and the state that goes on."""
        super().rescale(factor)
        self._leave_state(factor)

    def _leave_state(self, factor: float) -> None:
        for name, array in self._state.items():
            np.multiply(self._after[name], array.dtype.type(factor), out=array)

    def _exchange(self, stop: int) -> None:
        for k, (sums, vector) in enumerate(zip(self._sums, self._vectors, strict=True)):
            sums.finish(vector, [] if k else [stop])

    def begin(self) -> None:
        """Measure what the order of additions costs against a plain exchange. Collective.

        `price` says it in microseconds: medians of a few exchanges, of the slowest rank.
        """
        if self.comm.size == 1:
            return
        seconds = np.empty((ROUNDS + 1, 2))
        for measured in seconds:
            for sums in self._sums:
                for _ in sums.mine:
                    sums.add(None)
            self.comm.Barrier()
            start = time.perf_counter()
            self._exchange(0)
            measured[0] = time.perf_counter() - start
            self.comm.Barrier()
            start = time.perf_counter()
            for vector in self._vectors:
                allreduce(self.comm, vector, algorithm=self.algorithm)
            measured[1] = time.perf_counter() - start
        # The first round pays for connections, page faults and the plain one's own measurement.
        medians = np.median(seconds[1:], axis=0)
        self.comm.Allreduce(MPI.IN_PLACE, medians, MPI.MAX)
        ordered, plain = (round(float(median) * 1e6, 1) for median in medians)
        self.price = {
            "microbatches": self.pieces,
            "ordered_us": ordered,
            "plain_us": plain,
            "ratio": round(ordered / plain, 3),
        }
        events.emit("microbatches", **self.price)


def together(model, most: int) -> int:
    """Return how many pieces one call computes, at most `most`.

    One where the model has no call for several, or has state, which every piece finds as the step
    began; and on a device, whose library may take another kernel for several products than for one.
    """
    parameters = list(model.parameters.values())
    if not hasattr(model, "piece_gradients") or getattr(model, "state", {}):
        return 1
    if is_device(parameters[0]):
        return 1
    return max(1, min(most, TOGETHER_BYTES // sum(array.nbytes for array in parameters)))


def equal_runs(bounds: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (samples, count) for neighbours of one size, at most `most` of them."""
    sizes = (stop - start for start, stop in itertools.pairwise(bounds))
    for samples, equal in itertools.groupby(sizes):
        for start, stop in partition.pieces(0, len(list(equal)), most):
            yield samples, stop - start


def checked_state(model) -> dict:
    """Return the model's state; ConfigError where it has no mean over pieces."""
    state = getattr(model, "state", {})
    for name, array in state.items():
        if array.dtype.kind != "f":
            raise ConfigError(
                f"microbatches: state[{name!r}] of the model is {array.dtype}, and its mean over "
                "the pieces of a step is none; make it floating point, or leave microbatches out"
            )
    return state
