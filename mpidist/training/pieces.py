"""The exchange of ``train(..., microbatches=V)``: the same bits on any number of ranks.

The global batch is cut into V pieces, by position alone. A rank computes its pieces one after the
other, each by a call of its own, so that every matrix product has the same shape whoever holds
the piece; gradients, loss and model state of a piece, times its share of the samples, are added
in the fixed tree over the V pieces (``collectives/ordered.py``).

    global batch of 10, V = 4    0 1 2 | 3 4 5 | 6 7 | 8 9
    2 ranks                      rank 0         rank 1
    3 ranks                      rank 0         rank 1       rank 2 has none (``ordered.cuts``)
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from .. import events
from ..collectives.allreduce import allreduce
from ..collectives.piecewise import PieceSum
from ..errors import ConfigError
from ..gradients.vectors import flat_views
from ..partition import BlockPartition
from .progress import beside
from .replicas import Replicas, check_in_place

#: Exchanges of each kind that are timed for `PieceReplicas.price`.
ROUNDS = 5


class PieceReplicas(Replicas):
    """Replicas whose gradients are summed over pieces, not over ranks. Collective over `comm`."""

    equal_state = True

    def __init__(self, comm, model, optimizer, algorithm: str, pieces: int):
        super().__init__(comm, model, optimizer, algorithm)
        self.gradients, self.flat = flat_views(model.parameters)
        self._views = dict(self.gradients)
        self.pieces = pieces
        self._state = checked_state(model)
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
        """Nothing to free."""

    def compute(self, source, indices) -> tuple[float, int]:
        """Compute and add this rank's pieces; returns (its share of the loss, samples). Local.

        The samples are taken at once and then cut: a source gives each of them as it is, whatever
        else is asked for. Pieces of no samples (a short last batch) are zero.
        """
        bounds = BlockPartition(len(indices), self.pieces).bounds()
        mine = self._sums[0].mine
        first, last = bounds[mine.start], bounds[mine.stop]
        batch = beside(source.take(indices[first:last]), self.model)
        before = {name: array.copy() for name, array in self._state.items()}
        total = 0.0
        for piece in mine:
            start, stop = bounds[piece], bounds[piece + 1]
            if start == stop:
                for sums in self._sums:
                    sums.add(None)
                continue
            part = tuple(array[start - first : stop - first] for array in batch)
            loss = self.model.loss_and_gradients(part, self.gradients)
            check_in_place(self.gradients, self._views)
            self.flat[0][-2] = loss
            # Every piece begins with the state that the step began with, and leaves its own.
            for name, array in self._state.items():
                self._after[name][...] = array
                array[...] = before[name]
            for sums, vector in zip(self._sums, self._vectors, strict=True):
                sums.add(vector, (stop - start) / len(indices))
            total += loss * (stop - start) / len(indices)
        return total, last - first

    def reduce(self, loss: float, samples: int, total: int, stop: int) -> tuple[float, bool]:
        """Sum what `compute` has added; returns (global loss, stop). Collective.

        The losses lie beside the gradients; what is given of this rank's is not needed.
        """
        self._exchange(stop)
        for name, array in self._state.items():
            array[...] = self._after[name]
        first = self.flat[0]
        return float(first[-2]), bool(first[-1] > 0)

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


def checked_state(model) -> dict:
    """Return the model's state; ConfigError where it has no mean over pieces. Local."""
    state = getattr(model, "state", {})
    for name, array in state.items():
        if array.dtype.kind != "f":
            raise ConfigError(
                f"microbatches: state[{name!r}] of the model is {array.dtype}, and its mean over "
                "the pieces of a step is none; make it floating point, or leave microbatches out"
            )
    return state
