"""A chain of layers as a model: what `mpidist.train` and the servers call.

    model.parameters                      dict name -> array, in forward order
    model.loss_and_gradients(batch, gradients, ready)
    model.predict(inputs)

Nothing here knows about ranks. Training code may replace any entry of `parameters` by another
array of the same shape: it is looked up at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..arrays import array_module
from ..errors import ConfigError
from .layers import softmax_cross_entropy

#: Samples per pass of `predict`: an evaluation then needs no more memory than a training step.
CHUNK = 128


class Network:
    """A classifier: layers, then softmax cross entropy.

    Parameters
    ----------
    layers : sequence
        Layers as in `mpidist.models.layers`; the last gives one score per class.
    sample_shape : tuple of int
        Shape of one input; a dimension of None takes any.
    seed : int
        Seeds the weights: normal, of variance 2 / inputs before a ReLU and 1 / inputs in the
        last layer (He et al., 2015, arXiv:1502.01852); biases are zero.

    Attributes
    ----------
    parameters : dict of str to array
        float32, in forward order; gradients become ready in the reverse order.
    state : dict of str to array
        Empty: these models keep no statistics.
    """

    def __init__(self, layers: Sequence, sample_shape: Sequence[int], seed: int = 0):
        self.layers = list(layers)
        self.sample_shape = tuple(sample_shape)
        self.state: dict = {}
        self.parameters = _initial(self.layers, seed)
        self.classes = list(self.parameters.values())[-1].size
        self._first = next(i for i, layer in enumerate(self.layers) if layer.shapes())

    def loss_and_gradients(
        self, batch, gradients, ready: Callable[[str], None] | None = None
    ) -> float:
        """Write the gradient of the mean loss over `batch` into `gradients`, return that mean.

        `batch` is (inputs, labels), labels being integers from 0. ``ready(name)`` is
        called as soon as that gradient is final, last layer first. An empty batch has zero
        gradients and loss 0.0, so that a rank without samples can take part in a sum.
        """
        inputs, labels = batch
        if len(inputs) != len(labels):
            raise ConfigError(f"batch: {len(inputs)} inputs but {len(labels)} labels")
        one = {name: array[None] for name, array in gradients.items()}
        x, labels = self._input(inputs)[None], self._labels(labels)[None]
        return float(self._losses(x, labels, one, ready or (lambda name: None))[0])

    def piece_gradients(self, batch, gradients):
        """The same for several pieces of equal size in one call; returns their mean losses.

        All arrays have a further first axis, that of the pieces: inputs and labels, and those of
        `gradients`. Each piece gets the bits that `loss_and_gradients` gives it alone.
        """
        inputs, labels = batch
        if inputs.shape[:2] != labels.shape[:2]:
            raise ConfigError(
                f"batch: {len(inputs)} pieces of {inputs.shape[1]} inputs, but labels of shape "
                f"{labels.shape}"
            )
        x = self._input(inputs.reshape(-1, *inputs.shape[2:])).reshape(inputs.shape)
        return self._losses(x, self._labels(labels), gradients, lambda name: None)

    def _losses(self, x, labels, gradients, ready):
        """Go forward and backward through the layers, on pieces."""
        if labels.size == 0:
            for name in reversed(self.parameters):
                gradients[name][...] = 0
                ready(name)
            return np.zeros(len(labels))
        tape = []
        for layer in self.layers:
            x, saved = layer.forward(self.parameters, x)
            tape.append(saved)
        losses, dy = softmax_cross_entropy(x, labels)
        # What lies before the first layer with parameters needs no gradient.
        for i in range(len(self.layers) - 1, self._first - 1, -1):
            first = i == self._first
            dy = self.layers[i].backward(
                self.parameters, tape.pop(), dy, gradients, ready, first=first
            )
        return losses

    def predict(self, inputs):
        """Return the scores, (samples, classes); the largest of a row is the answer."""
        chunks = [inputs[i : i + CHUNK] for i in range(0, max(len(inputs), 1), CHUNK)]
        scores = [self._scores(chunk) for chunk in chunks]
        return array_module(scores[0]).concatenate(scores)

    def _scores(self, inputs):
        x = self._input(inputs)[None]
        for layer in self.layers:
            x, _ = layer.forward(self.parameters, x)
        return x[0]

    def _input(self, inputs):
        if tuple(inputs.shape[1:]) != self.sample_shape:
            expected = ", ".join(map(str, ("n", *self.sample_shape)))
            raise ConfigError(f"model input has shape {inputs.shape}, expected ({expected})")
        like = self._like()
        return array_module(like).asarray(inputs, dtype=like.dtype)

    def _labels(self, labels):
        # NumPy would take a negative label as one counted from the end.
        if isinstance(labels, np.ndarray) and labels.size:
            low, high = labels.min(), labels.max()
            if not 0 <= low <= high < self.classes:
                raise ConfigError(
                    f"labels run from {low} to {high}, expected 0 to {self.classes - 1}: "
                    f"the model has {self.classes} classes"
                )
        return array_module(self._like()).asarray(labels)

    def _like(self):
        """One of the parameters: batches go where they are, in their dtype."""
        return next(iter(self.parameters.values()))


def _initial(layers: Sequence, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    parameters = {}
    last = [layer for layer in layers if layer.shapes()][-1]
    for layer in layers:
        for name, shape in layer.shapes().items():
            if len(shape) == 1:
                parameters[name] = np.zeros(shape, np.float32)
                continue
            # Dense weights are (inputs, outputs), kernels (outputs, inputs, k, k).
            inputs = shape[0] if len(shape) == 2 else math.prod(shape[1:])
            spread = math.sqrt((1 if layer is last else 2) / inputs)
            parameters[name] = (rng.standard_normal(shape) * spread).astype(np.float32)
    return parameters
