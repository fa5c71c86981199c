"""A chain of layers as a model that `mpidist.train` and parameter servers can use.

    model.parameters                      dict name -> array, in forward order
    model.loss_and_gradients(batch, gradients, ready)
    model.predict(inputs)

A stage of a pipeline computes only some of the layers. It uses:

    model.layers                          as in `mpidist.models.layers`
    model.initial_parameters(start, stop) of layers[start:stop]
    model.loss(scores, labels)            losses, and the gradient that goes back

A model does not communicate with other ranks. Training code may replace any array in `parameters`
by another array of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ..arrays import array_module, keep_freed_memory
from ..errors import ConfigError
from ..registry import checked_whole
from .layers import softmax_cross_entropy

#: How many random numbers are drawn at once. Drawing few at once needs little memory besides the
#: weights.
DRAWN = 1 << 16

#: How many samples `predict` computes at once, so that it needs no more memory than a training
#: step.
CHUNK = 128


class Network:
    """A classifier made of layers, with softmax cross entropy as its loss.

    Parameters
    ----------
    layers : sequence
        Objects with the methods of the layers in `mpidist.models.layers`; the last one returns one
        score per class.
    sample_shape : tuple of int
        Shape of one input.
    seed : int
        Seed of the weights, which are drawn from normal distributions. In a layer with n inputs the
        variance is 2 / n if a ReLU follows, and 1 / n in the last layer (He et al., 2015,
        arXiv:1502.01852). Biases are zero.

    Attributes
    ----------
    classes : int
        Number of scores per sample.
    seed : int
    state : dict of str to array
        Empty, because these models keep no statistics such as running means.
    """

    def __init__(self, layers: Sequence, sample_shape: Sequence[int], seed: int = 0):
        self.layers = list(layers)
        self.sample_shape = tuple(sample_shape)
        self.state: dict = {}
        self.seed = checked_whole("seed of the model", seed, 0)
        sized = [i for i, layer in enumerate(self.layers) if layer.shapes()]
        if not sized:
            raise ConfigError(f"Network: none of the {len(self.layers)} layers has parameters")
        self._first, self._last = sized[0], sized[-1]
        self.classes = math.prod(list(_whole_shapes(self.layers[self._last]).values())[-1])

    @cached_property
    def parameters(self) -> dict:
        """The parameters of all layers, by name: float32 arrays in the order of the forward pass.

        Training code may replace them. They are made when they are first used.
        """
        return self.initial_parameters()

    def initial_parameters(self, start: int = 0, stop: int | None = None) -> dict:
        """Return new parameters for ``layers[start:stop]``, with the values of a new model.

        If a layer is split over ranks, only this rank's part is returned. No memory is used for the
        parameters of other layers.
        """
        stop = len(self.layers) if stop is None else stop
        if not 0 <= start <= stop <= len(self.layers):
            raise ConfigError(
                f"initial_parameters: layers {start} to {stop}, expected 0 <= start <= stop <= "
                f"{len(self.layers)}, the number of layers"
            )
        keep_freed_memory()  # for the arrays of the steps
        rng = np.random.default_rng(self.seed)
        parameters = {}
        for i, layer in enumerate(self.layers[:stop]):
            own = layer.shapes()
            for name, shape in _whole_shapes(layer).items():
                if i >= start:
                    parameters[name] = np.zeros(own[name], np.float32)
                if len(shape) > 1:
                    # Dense weights are (inputs, outputs), kernels (outputs, inputs, k, k).
                    inputs = shape[0] if len(shape) == 2 else math.prod(shape[1:])
                    spread = math.sqrt((1 if i == self._last else 2) / inputs)
                    if own[name] != shape and i >= start:
                        _draw_part(rng, shape, spread, parameters[name], layer.window(name))
                    else:
                        _draw(rng, math.prod(shape), spread, parameters.get(name))
        return parameters

    def loss_and_gradients(
        self, batch, gradients, ready: Callable[[str], None] | None = None
    ) -> float:
        """Write the gradient of the mean loss over `batch` into `gradients`; return that loss.

        `batch` is (inputs, labels); labels are integers from 0. ``ready(name)`` is called as soon
        as the gradient called `name` is final, beginning with the last layer. An empty batch has
        gradients of zero and loss 0.0.
        """
        inputs, labels = batch
        if len(inputs) != len(labels):
            raise ConfigError(f"batch: {len(inputs)} inputs but {len(labels)} labels")
        one = {name: array[None] for name, array in gradients.items()}
        x = checked_input(self, inputs)[None]
        if not isinstance(labels, np.ndarray):
            labels = array_module(x).asarray(labels)
        return float(self._losses(x, labels[None], one, ready)[0])

    def piece_gradients(self, batch, gradients):
        """Write the gradients of several batches (pieces) of equal size; return their mean losses.

        Inputs, labels and all arrays in `gradients` have an additional first axis, whose index is
        the number of the piece. The results of a piece have the same bits as those of
        `loss_and_gradients`.
        """
        inputs, labels = batch
        if inputs.shape[:2] != labels.shape[:2]:
            raise ConfigError(
                f"batch: {len(inputs)} pieces of {inputs.shape[1]} inputs, but labels of shape "
                f"{labels.shape}"
            )
        x = checked_input(self, inputs.reshape(-1, *inputs.shape[2:])).reshape(inputs.shape)
        return self._losses(x, labels, gradients)

    def _losses(self, x, labels, gradients, ready=None):
        """Run all layers forward and backward on several batches (pieces); return their losses."""
        ready = ready or (lambda name: None)
        if labels.size == 0:
            for name in reversed(self.parameters):
                gradients[name][...] = 0
                ready(name)
            return np.zeros(len(labels))
        tape = []
        for layer in self.layers:
            x, saved = layer.forward(self.parameters, x)
            tape.append(saved)
        losses, dy = self.loss(x, labels)
        # Layers before the first layer with parameters compute no gradient.
        for i in range(len(self.layers) - 1, self._first - 1, -1):
            first, back = i == self._first, self.layers[i].backward
            dy = back(self.parameters, tape.pop(), dy, gradients, ready, first=first)
        return losses

    def loss(self, scores, labels):
        """Return (mean loss of each piece (batch), gradient with respect to the scores).

        `scores` are the outputs of the last layer, of shape (pieces, samples, classes). `labels`
        are integers from 0, of shape (pieces, samples). A piece without samples has loss 0.

        Raises ConfigError for labels of another shape, and for NumPy labels that are no class
        number: outside 0 to classes - 1. The values of labels on a GPU are not checked.
        """
        if labels.ndim != 2 or tuple(scores.shape) != (*labels.shape, self.classes):
            raise ConfigError(
                f"loss: scores of shape {scores.shape} and labels of shape {labels.shape}, "
                f"expected (pieces, samples, {self.classes}) and (pieces, samples)"
            )
        if not labels.size:
            return np.zeros(len(labels)), scores
        # NumPy would count a negative label from the end.
        if isinstance(labels, np.ndarray):
            low, high = labels.min(), labels.max()
            if not 0 <= low <= high < self.classes:
                raise ConfigError(
                    f"labels run from {low} to {high}, expected 0 to {self.classes - 1}: "
                    f"the model has {self.classes} classes"
                )
        return softmax_cross_entropy(scores, array_module(scores).asarray(labels))

    def predict(self, inputs):
        """Return one row of scores per sample; the largest score marks the predicted class."""
        chunks = [inputs[i : i + CHUNK] for i in range(0, max(len(inputs), 1), CHUNK)]
        scores = [self._scores(chunk) for chunk in chunks]
        return array_module(scores[0]).concatenate(scores)

    def _scores(self, inputs):
        x = checked_input(self, inputs)[None]
        for layer in self.layers:
            x, _ = layer.forward(self.parameters, x)
        return x[0]


def checked_input(model, inputs, like=None):
    """Return `inputs` with the dtype and on the device of `like`.

    Raises ConfigError if `inputs` have a wrong shape.
    """
    check_input_shape(model, inputs)
    like = next(iter(model.parameters.values())) if like is None else like
    return array_module(like).asarray(inputs, dtype=like.dtype)


def check_input_shape(model, inputs) -> None:
    """Raise ConfigError unless `inputs` has samples of the shape that the model takes."""
    if tuple(inputs.shape[1:]) != model.sample_shape:
        expected = ", ".join(map(str, ("n", *model.sample_shape)))
        raise ConfigError(f"model input has shape {inputs.shape}, expected ({expected})")


def _draw(rng, count: int, spread: float, array) -> None:
    """Draw `count` normal numbers of deviation `spread` into `array`, or only draw them."""
    flat = None if array is None else array.reshape(-1)
    for i in range(0, count, DRAWN):
        drawn = rng.standard_normal(min(DRAWN, count - i))
        if flat is not None:
            flat[i : i + DRAWN] = drawn * spread


def _draw_part(rng, shape: tuple[int, ...], spread: float, array, window) -> None:
    """Draw the normal numbers of a matrix, and write the numbers of one window into `array`."""
    rows, columns = window
    start, stop, _ = rows.indices(shape[0])
    step = max(1, DRAWN // shape[1])
    for first in range(0, shape[0], step):
        drawn = rng.standard_normal((min(step, shape[0] - first), shape[1]))
        a, b = max(first, start), min(first + len(drawn), stop)
        if a < b:
            array[a - start : b - start] = drawn[a - first : b - first, columns] * spread


def _whole_shapes(layer) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of the whole layer, even if the layer is split."""
    return layer.whole_shapes() if hasattr(layer, "whole_shapes") else layer.shapes()
