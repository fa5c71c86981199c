"""The layers that one rank has of a pipeline without a gap, their gradients and their sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...collectives.engines.piecewise import PieceSum
from .piece_order import AnyOrderSum


class Chunk:
    """Some layers of a model in a row.

    Parameters
    ----------
    number : int
    layers : sequence
        The layers, as in `mpidist.models.layers`.
    parameters : dict
        The arrays of these layers by name.
    first : int or None
        The layer at which the backward pass ends, because no layer before it has parameters;
        counted in these layers. None if it goes on into the chunk before.
    views, vectors
        The gradients of a microbatch by name, and the vectors over which they lie; the last two
        numbers of the first vector are free, and the last chunk puts the loss there.
    """

    def __init__(self, number: int, layers: Sequence, parameters: dict, first, views, vectors):
        self.number, self.layers, self.parameters = number, list(layers), parameters
        self.first = first
        self.gradients, self.vectors = views, vectors
        # The first axis of what a layer writes has an entry for each microbatch, here for one.
        self._written = {name: view[None] for name, view in views.items()}
        self._tapes: dict[int, list] = {}
        self._later: dict[int, list] = {}  # what `backward_weights` needs
        self._old: dict[int, dict] = {}  # parameters of microbatches that are older than an update
        self.versions = 1  # the most versions of the parameters at a time
        self._sums: list[PieceSum] = []
        self._adding: list[Any] = []

    @property
    def kept(self) -> int:
        """How many microbatches have had their forward pass here, but not their backward pass."""
        return len(self._tapes) + len(self._later)

    @property
    def learns(self) -> bool:
        """Whether a layer here or before has parameters, so a backward pass is needed."""
        return self.first is None or self.first < len(self.layers)

    def open_sums(self, comm, pieces: int, in_order: bool) -> None:
        """Make the sums over the replicas of this stage. Collective over `comm`.

        `in_order` says whether the microbatches come in the order of their numbers.
        """
        self._sums = [PieceSum(comm, v.size, v.dtype, pieces, like=v) for v in self.vectors]
        self._adding = self._sums if in_order else [AnyOrderSum(one) for one in self._sums]
        self._in_order = in_order

    def forward(self, microbatch: int, x, keep: bool):
        """Return the output for an input; with `keep`, keep what `backward` needs."""
        tape = []
        for layer in self.layers:
            x, saved = layer.forward(self.parameters, x)
            if keep:
                tape.append(saved)
        if keep:
            self._tapes[microbatch] = tape
        return x

    def backward(self, microbatch: int, dy):
        """Write the gradients of a microbatch; return the gradient of the input.

        The result is None if no layer before needs it.
        """
        tape = self._tapes.pop(microbatch)
        parameters = self._old.pop(microbatch, self.parameters)
        last = 0 if self.first is None else self.first
        for i in range(len(self.layers) - 1, last - 1, -1):
            first = i == self.first
            dy = self.layers[i].backward(
                parameters, tape.pop(), dy, self._written, _nothing, first=first
            )
        return dy if self.first is None else None

    def keep_version(self) -> None:
        """Copy the parameters that microbatches still need, because an update follows.

        Those that began before an earlier update keep the version that they have.
        """
        newest = [i for i in self._tapes if i not in self._old]
        if newest and self.parameters:
            copies = {name: array.copy() for name, array in self.parameters.items()}
            self._old.update(dict.fromkeys(newest, copies))
        self.versions = max(self.versions, 1 + len({id(one) for one in self._old.values()}))

    def backward_input(self, microbatch: int, dy):
        """Return the gradient of the input as `backward` does; `backward_weights` comes later.

        A layer without the two halves is run whole, and its gradients are kept until then.
        """
        tape, later = self._tapes.pop(microbatch), []
        last = 0 if self.first is None else self.first
        for i in range(len(self.layers) - 1, last - 1, -1):
            layer, saved, first = self.layers[i], tape.pop(), i == self.first
            if not _has_halves(layer):
                whole = {name: self._written[name].copy() for name in layer.shapes()}
                dy = layer.backward(self.parameters, saved, dy, whole, _nothing, first=first)
                later.append((None, whole, None))
                continue
            if layer.shapes():
                later.append((layer, saved, dy))
            dy = None if first else layer.backward_input(self.parameters, saved, dy)
        self._later[microbatch] = later
        return dy if self.first is None else None

    def backward_weights(self, microbatch: int) -> None:
        """Write the gradients of a microbatch, after its `backward_input`."""
        for layer, saved, dy in self._later.pop(microbatch):
            if layer is None:
                for name, gradient in saved.items():
                    self._written[name][...] = gradient
            else:
                layer.backward_weights(self.parameters, saved, dy, self._written, _nothing)

    def add(self, microbatch: int, weight: float | None, loss: float = 0.0) -> None:
        """Add the gradients of a microbatch, times `weight`; None for one without samples."""
        if self.vectors:
            self.vectors[0][-2] = loss
        for adding, vector in zip(self._adding, self.vectors, strict=True):
            number = () if self._in_order else (microbatch,)
            if weight is None:
                adding.add(*number, None)
            else:
                adding.add(*number, vector, weight)

    def finish(self) -> float:
        """Put the sums over all microbatches into the gradients; return that of the losses.

        Collective over the replicas of the stage.
        """
        for adding, vector in zip(self._adding, self.vectors, strict=True):
            adding.finish(vector)
        return float(self.vectors[0][-2]) if self.vectors else 0.0

    def forget(self) -> None:
        """Drop the data of microbatches whose backward pass has not come yet."""
        self._tapes.clear()
        self._later.clear()
        self._old.clear()

    def close(self) -> None:
        """Free the sums. Collective over the replicas of the stage, but without a message."""
        for sums in self._sums:
            sums.close()


def _has_halves(layer) -> bool:
    halves = ("backward_input", "backward_weights")
    return all(callable(getattr(layer, half, None)) for half in halves)


def _nothing(name: str) -> None:
    pass
