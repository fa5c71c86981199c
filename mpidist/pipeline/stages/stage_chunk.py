"""A chunk: consecutive layers of one rank, with the sums of their gradients over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...arrays import array_module
from .sum_parts import SumPart, is_sent, parts_of_vector
from .unwritten import Checked


def _nothing(name: str) -> None:
    pass


class Chunk:
    """Consecutive layers of a model (a chunk), which one rank computes, and their gradients.

    Parameters
    ----------
    number : int
        The number of the chunk in the model.
    layers : sequence
        The layers: objects with the methods of the layers in `mpidist.models.layers`.
    parameters : dict
        The arrays of these layers by name.
    first : int or None
        The index in `layers` at which the backward pass ends, because no earlier layer has
        parameters. None if the backward pass continues in the previous chunk.
    views, vectors
        `views` has, by name, the arrays into which the gradients of a microbatch are written. They
        are views of `vectors`, which are summed over microbatches and replicas. The last chunk of
        the model puts the loss at the end of the first vector.
    """

    #: The largest number of versions of the parameters at the same time. `VersionedChunk` explains
    #: this attribute and the next three, which never change here.
    versions = 1
    gradients_used = stalest = staleness = 0

    def __init__(self, number: int, layers: Sequence, parameters: dict, first, views, vectors):
        self.number, self.layers, self.parameters = number, list(layers), parameters
        self._names = [list(layer.shapes()) for layer in self.layers]
        self.first = first
        self.gradients, self.vectors = views, vectors
        self._write_into(views)
        self._tapes: dict[int, list] = {}
        self._later: dict[int, list] = {}  # microbatch -> what `backward_weights` needs
        self._bytes: dict[int, int] = {}  # microbatch -> bytes kept for its backward pass
        self._kept_bytes: dict[tuple, int] = {}  # shape of a microbatch's input -> bytes kept
        self.parts: list[SumPart] = []  # the part with the last layers comes first
        self.in_parts = False  # whether the parts are sent to other hosts
        self._added: set[int] = set()  # the parts to which the newest microbatch has been added
        self._uncalled = {"backward", "backward_input", "backward_weights"}

    def _write_into(self, views: dict) -> None:
        # Layers write gradients with an additional first axis over microbatches. Here it has length
        # 1, because this chunk computes one microbatch at a time.
        self._written = {name: view[None] for name, view in views.items()}

    @property
    def kept(self) -> int:
        """The number of microbatches with a forward pass and without a complete backward pass."""
        return len(self._tapes) + len(self._later)

    @property
    def stash_bytes(self) -> int:
        """The bytes that are kept for microbatches whose backward pass is still to come."""
        return sum(self._bytes.values())

    @property
    def learns(self) -> bool:
        """Whether a backward pass is needed: these or earlier layers have parameters."""
        return self.first is None or self.first < len(self.layers)

    @property
    def sends_early(self) -> bool:
        """Whether the gradient of the input is computed and sent before those of the weights."""
        return self.first is None and all(
            _has_halves(layer) for layer in self.layers if layer.shapes()
        )

    def open_sums(self, comm, pieces: int, in_order: bool) -> None:
        """Prepare to sum the gradients over microbatches and ranks. Collective over `comm`."""
        self.in_parts = is_sent(comm)
        for k, vector in enumerate(self.vectors):
            names = [name for name, view in self.gradients.items() if view.dtype == vector.dtype]
            free = vector.size - sum(self.gradients[name].size for name in names)
            cuts = [(0, vector.size - free, set(names))]
            if self.in_parts:
                sizes = [self.gradients[name].size for name in names]
                cuts = parts_of_vector(names, sizes, vector.dtype.itemsize)
            for number, (start, stop, inside) in enumerate(cuts):
                end = vector.size if number == 0 and k == 0 else stop
                shapes = {name: self.gradients[name].shape for name in names if name in inside}
                self.parts.append(SumPart(comm, vector[start:end], pieces, shapes, in_order))
                if not self.in_parts:
                    self.parts[-1].share_memory(self._names)

    def _aim(self, weight: float | None) -> None:
        """Choose where the layers write the gradients of the microbatch that is next in the sum."""
        for k, part in enumerate(self.parts):
            memory, views = part.aim(weight)
            self._written |= views
            if k == 0 and memory is not part.vector:
                memory[-2:] = part.vector[-2:]  # the loss

    def forward(self, microbatch: int, x, keep: bool):
        """Return the layers' output for the input `x` of a microbatch."""
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
        """Return the parameters that the forward pass of a microbatch has used."""
        return self.parameters

    def _take(self, layer: int) -> None:
        """Add a layer's gradients to the sums of gradients, if the next layer overwrites them."""
        for part in self.parts:
            part.take(self._names[layer])

    def backward(
        self,
        microbatch: int,
        dy,
        ready: Callable[[str], None] = _nothing,
        weight: float | None = None,
    ):
        """Write the gradients of a microbatch; return the gradient of the input.

        The result is None if no earlier layer of the model has parameters. ``ready(name)`` is
        called as soon as the gradient of the parameter `name` is final.
        """
        tape, parameters = self._tapes.pop(microbatch), self.used_by(microbatch)
        del self._bytes[microbatch]
        self._aim(weight)
        layers, last = self._layers("backward"), 0 if self.first is None else self.first
        for i in range(len(layers) - 1, last - 1, -1):
            first = i == self.first
            dy = layers[i].backward(parameters, tape.pop(), dy, self._written, ready, first=first)
            self._take(i)
        return dy if self.first is None else None

    def backward_input(self, microbatch: int, dy):
        """Return only the gradient of the input. Call `backward_weights` later for the others."""
        tape, later = self._tapes.pop(microbatch), []
        layers, last = self._layers("backward_input"), 0 if self.first is None else self.first
        for i in range(len(self.layers) - 1, last - 1, -1):
            layer, saved, first = self.layers[i], tape.pop(), i == self.first
            if not _has_halves(layer):
                whole = {name: self._written[name].copy() for name in layer.shapes()}
                dy = layers[i].backward(self.parameters, saved, dy, whole, _nothing, first=first)
                later.append((i, None, whole, None))
                continue
            if layer.shapes():
                later.append((i, layer, saved, dy))
            dy = None if first else self._input_of(layer, saved, dy)
        self._later[microbatch] = later
        return dy if self.first is None else None

    def _input_of(self, layer, saved, dy):
        """Return the gradient of a layer's input; the caller may change it, but not `dy`."""
        dx = layer.backward_input(self.parameters, saved, dy)
        # The previous layers may change, in place, the gradient that they get.
        if layer.shapes() and array_module(dx).may_share_memory(dx, dy):
            return dx.copy()
        return dx

    def backward_weights(
        self,
        microbatch: int,
        ready: Callable[[str], None] = _nothing,
        weight: float | None = None,
    ) -> None:
        """Write the gradients of the parameters for a microbatch, after `backward_input`."""
        del self._bytes[microbatch]
        self._aim(weight)
        layers = self._layers("backward_weights")
        for i, layer, saved, dy in self._later.pop(microbatch):
            if layer is None:
                for name, gradient in saved.items():
                    self._written[name][...] = gradient
                    ready(name)
            else:
                layers[i].backward_weights(self.parameters, saved, dy, self._written, ready)
            self._take(i)

    def _layers(self, method: str) -> list:
        """Return the layers; for the first call of `method`, layers that check what they write."""
        if method not in self._uncalled:
            return self.layers
        self._uncalled.remove(method)
        return [Checked(layer) for layer in self.layers]

    def note_loss(self, loss: float) -> None:
        """Store the loss of a microbatch beside its gradients, so that `add` also adds the loss."""
        if self.vectors:
            self.vectors[0][-2] = loss

    def add_ready(self, microbatch: int, weight: float, ready: set[str]) -> None:
        """Add the final parts of a microbatch's gradients to the sums over all microbatches.

        A part is final if all its gradients are named in `ready`: the backward pass does not change
        them any more.
        """
        for k, part in enumerate(self.parts):
            if k not in self._added and part.names and part.names <= ready:
                part.add(microbatch, weight)
                self._added.add(k)

    def add(self, microbatch: int, weight: float | None) -> None:
        """Add the gradients of a microbatch, multiplied by `weight`, to the sums of gradients.

        `weight` is None for a microbatch without samples.
        """
        for k, part in enumerate(self.parts):
            if k not in self._added:
                part.add(microbatch, weight)
        self._added.clear()

    @property
    def loss(self) -> float:
        """A step's loss, a weighted sum over its microbatches, once its gradients are summed."""
        return float(self.vectors[0][-2]) if self.vectors else 0.0

    def close(self) -> None:
        """Free the memory in which gradients are summed. Collective over the replicas."""
        self._write_into(self.gradients)  # and not into the memory of the sums, which is freed
        for part in self.parts:
            part.close()


def array_bytes(saved: Any) -> int:
    """Return the bytes of all arrays in nested sequences; memory that arrays share counts once."""
    found: dict[int, int] = {}

    def visit(one: Any) -> None:
        if isinstance(one, list | tuple):
            for each in one:
                visit(each)
        elif hasattr(one, "nbytes"):
            base = one
            while getattr(base, "base", None) is not None and hasattr(base.base, "nbytes"):
                base = base.base
            # A view may be smaller than its base (a part of a batch) or larger (by broadcasting).
            size = min(one.nbytes, base.nbytes)
            found[id(base)] = max(found.get(id(base), 0), size)

    visit(saved)
    return sum(found.values())


def _has_halves(layer) -> bool:
    """Return whether `backward_input` and `backward_weights` of a layer may replace `backward`."""
    kinds = type(layer).__mro__

    def depth(name: str) -> int:
        return next((k for k, kind in enumerate(kinds) if name in vars(kind)), -1)

    halves = depth("backward_input"), depth("backward_weights")
    return min(halves) >= 0 and depth("backward") >= max(halves)
