"""The layers that one rank has of a pipeline without a gap, their gradients and their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .sum_parts import SumPart, is_sent, parts_of_vector


def _nothing(name: str) -> None:
    pass


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

    #: The most versions of the parameters at a time; see `VersionedChunk`, also for the others.
    versions = 1
    gradients_used = stalest = staleness = 0

    def __init__(self, number: int, layers: Sequence, parameters: dict, first, views, vectors):
        self.number, self.layers, self.parameters = number, list(layers), parameters
        self.first = first
        self.gradients, self.vectors = views, vectors
        self._write_into(views)
        self._tapes: dict[int, list] = {}
        self._later: dict[int, list] = {}  # what `backward_weights` needs
        self._bytes: dict[int, int] = {}  # of what microbatches keep for their backward pass
        self._kept_bytes: dict[tuple, int] = {}  # by the shape of the input
        self.parts: list[SumPart] = []  # the last layers first
        self._added: set[int] = set()  # the parts that have the gradients of the newest microbatch

    def _write_into(self, views: dict) -> None:
        # The first axis of what a layer writes has an entry for each microbatch, here for one.
        self._written = {name: view[None] for name, view in views.items()}

    @property
    def kept(self) -> int:
        """How many microbatches have had their forward pass here, but not their backward pass."""
        return len(self._tapes) + len(self._later)

    @property
    def stash_bytes(self) -> int:
        """The bytes that are kept for microbatches under way."""
        return sum(self._bytes.values())

    @property
    def learns(self) -> bool:
        """Whether a layer here or before has parameters, so a backward pass is needed."""
        return self.first is None or self.first < len(self.layers)

    def open_sums(self, comm, pieces: int, in_order: bool) -> None:
        """Make the sums over the replicas of this stage. Collective over `comm`.

        `in_order` says whether the microbatches come in the order of their numbers.
        """
        in_parts = is_sent(comm)
        for k, vector in enumerate(self.vectors):
            names = [name for name, view in self.gradients.items() if view.dtype == vector.dtype]
            free = vector.size - sum(self.gradients[name].size for name in names)
            cuts = [(0, vector.size - free, set(names))]
            if in_parts:
                sizes = [self.gradients[name].size for name in names]
                cuts = parts_of_vector(names, sizes, vector.dtype.itemsize)
            for number, (start, stop, inside) in enumerate(cuts):
                end = vector.size if number == 0 and k == 0 else stop
                self.parts.append(SumPart(comm, vector[start:end], pieces, inside, in_order))

    def forward(self, microbatch: int, x, keep: bool):
        """Return the output for an input; with `keep`, keep what `backward` needs."""
        tape, entered = [], x
        for layer in self.layers:
            x, saved = layer.forward(self.parameters, x)
            if keep:
                tape.append(saved)
        if keep:
            self._tapes[microbatch] = tape
            key = entered.shape
            if key not in self._kept_bytes:
                self._kept_bytes[key] = array_bytes(tape)
            self._bytes[microbatch] = self._kept_bytes[key]
        return x

    def used_by(self, microbatch: int) -> dict:
        """Return the parameters with which a microbatch had its forward pass."""
        return self.parameters

    def backward(self, microbatch: int, dy, ready: Callable[[str], None] = _nothing):
        """Write the gradients of a microbatch; return the gradient of the input.

        The result is None if no layer before needs it. ``ready(name)`` is called as soon as a
        gradient is final.
        """
        tape, parameters = self._tapes.pop(microbatch), self.used_by(microbatch)
        del self._bytes[microbatch]
        last = 0 if self.first is None else self.first
        for i in range(len(self.layers) - 1, last - 1, -1):
            first = i == self.first
            dy = self.layers[i].backward(
                parameters, tape.pop(), dy, self._written, ready, first=first
            )
        return dy if self.first is None else None

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

    def backward_weights(self, microbatch: int, ready: Callable[[str], None] = _nothing) -> None:
        """Write the gradients of a microbatch, after its `backward_input`."""
        del self._bytes[microbatch]
        for layer, saved, dy in self._later.pop(microbatch):
            if layer is None:
                for name, gradient in saved.items():
                    self._written[name][...] = gradient
                    ready(name)
            else:
                layer.backward_weights(self.parameters, saved, dy, self._written, ready)

    def note_loss(self, loss: float) -> None:
        """Put the loss of a microbatch beside its gradients, before they are added."""
        if self.vectors:
            self.vectors[0][-2] = loss

    def add_ready(self, microbatch: int, weight: float, ready: set[str]) -> None:
        """Add the gradients of those parts whose gradients are all among the names in `ready`."""
        for k, part in enumerate(self.parts):
            if k not in self._added and part.names and part.names <= ready:
                part.add(microbatch, weight)
                self._added.add(k)

    def add(self, microbatch: int, weight: float | None) -> None:
        """Add the gradients of a microbatch, times `weight`; None for one without samples.

        Those parts that `add_ready` has added are left out.
        """
        for k, part in enumerate(self.parts):
            if k not in self._added:
                part.add(microbatch, weight)
        self._added.clear()

    @property
    def loss(self) -> float:
        """The sum of the losses, after the sums are finished."""
        return float(self.vectors[0][-2]) if self.vectors else 0.0

    def close(self) -> None:
        """Free the sums. Collective over the replicas of the stage, but without a message."""
        for part in self.parts:
            part.sums.close()


def array_bytes(saved: Any) -> int:
    """Return the bytes of the arrays in nested sequences, those of one memory once."""
    found: dict[int, int] = {}

    def visit(one: Any) -> None:
        if isinstance(one, list | tuple):
            for each in one:
                visit(each)
        elif hasattr(one, "nbytes"):
            base = one
            while getattr(base, "base", None) is not None and hasattr(base.base, "nbytes"):
                base = base.base
            # A view may be a part of a batch, or have each element several times.
            size = min(one.nbytes, base.nbytes)
            found[id(base)] = max(found.get(id(base), 0), size)

    visit(saved)
    return sum(found.values())


def _has_halves(layer) -> bool:
    halves = ("backward_input", "backward_weights")
    return all(callable(getattr(layer, half, None)) for half in halves)
