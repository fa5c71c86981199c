"""A multi-label model: any number of entities may be true of a sample, each decided by itself.

    x (n, inputs) [ -> hidden, ReLU ] -> one score per entity -> sigmoid cross entropy, summed

The loss of a sample is the sum over entities, so that the gradient of an entity does not fade with
their number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from ..arrays import array_module
from ..errors import ConfigError
from .logistic import checked_whole


class Tagger:
    """Logistic regression per entity, or with one hidden layer that they share.

    Parameters
    ----------
    inputs, classes : int
        Features of a sample; entities.
    hidden : int
        Units of the hidden layer; 0 is none.
    seed : int
        Seeds the weights (He et al., 2015). The biases of the scores begin at -4, since few
        entities are true of a sample.

    Attributes
    ----------
    parameters : dict of str to array
        float32, in forward order.
    """

    def __init__(self, inputs: int, classes: int, hidden: int = 0, seed: int = 0):
        self.inputs, self.classes, self.hidden = inputs, classes, hidden
        rng = np.random.default_rng(seed)
        sizes = [inputs, *([hidden] if hidden else []), classes]
        self.parameters: dict = {}
        for k, (rows, columns) in enumerate(itertools.pairwise(sizes), start=1):
            last = k == len(sizes) - 1
            spread = 0.0 if last else math.sqrt(2 / rows)
            weight = (rng.standard_normal((rows, columns)) * spread).astype(np.float32)
            self.parameters[f"dense{k}.w"] = weight
            self.parameters[f"dense{k}.b"] = np.full(columns, -4.0 if last else 0.0, np.float32)

    def predict(self, inputs):
        """Return the scores, (samples, classes); above 0 is more likely than not."""
        return self._forward(self._input(inputs))[-1]

    def loss_and_gradients(
        self, batch, gradients, ready: Callable[[str], None] | None = None
    ) -> float:
        """Write the gradient of the mean loss over `batch`, return that mean.

        `batch` is (inputs, labels), labels (samples, classes) of 0 and 1.
        """
        inputs, labels = batch
        if tuple(labels.shape) != (len(inputs), self.classes):
            raise ConfigError(
                f"labels have shape {labels.shape}, expected ({len(inputs)}, {self.classes}): 0 or "
                "1 for every entity"
            )
        layers = self._forward(self._input(inputs))
        scores = layers[-1]
        xp = array_module(scores)
        truth = xp.asarray(labels, dtype=scores.dtype)
        count = max(len(scores), 1)
        # log(1 + exp(s)) - t s, without overflow.
        losses = xp.maximum(scores, 0) - scores * truth + xp.log1p(xp.exp(-xp.abs(scores)))
        dy = (_sigmoid(xp, scores) - truth) / count
        for k in range(len(layers) - 1, 0, -1):
            x, name = layers[k - 1], f"dense{k}"
            dy.sum(axis=0, out=gradients[f"{name}.b"])
            _tell(ready, f"{name}.b")
            xp.matmul(x.T, dy, out=gradients[f"{name}.w"])
            _tell(ready, f"{name}.w")
            if k > 1:
                dy = (dy @ self.parameters[f"{name}.w"].T) * (x > 0)
        return float(losses.sum(dtype=np.float64)) / count

    def _input(self, inputs):
        if tuple(inputs.shape[1:]) != (self.inputs,):
            raise ConfigError(f"model input has shape {inputs.shape}, expected (n, {self.inputs})")
        like = next(iter(self.parameters.values()))
        return array_module(like).asarray(inputs, dtype=like.dtype)

    def _forward(self, x) -> list:
        """Return the inputs of every layer, and the scores."""
        layers = [x]
        for k in range(1, len(self.parameters) // 2 + 1):
            y = layers[-1] @ self.parameters[f"dense{k}.w"] + self.parameters[f"dense{k}.b"]
            last = 2 * k == len(self.parameters)
            layers.append(y if last else array_module(y).maximum(y, 0))
        return layers


def _sigmoid(xp, scores):
    e = xp.exp(-xp.abs(scores))
    return xp.where(scores >= 0, 1 / (1 + e), e / (1 + e))


def _tell(ready, name: str) -> None:
    if ready is not None:
        ready(name)


def tagger(inputs: int = 1152, classes: int = 3862, hidden: int = 0, seed: int = 0) -> Tagger:
    """Make a `Tagger`; the defaults are those of YouTube-8M's videos."""
    return Tagger(
        checked_whole("tagger", "inputs", inputs, 1),
        checked_whole("tagger", "classes", classes, 1),
        checked_whole("tagger", "hidden", hidden, 0),
        seed,
    )


def hit_at_one(scores, labels) -> float:
    """Return the share of samples of which the entity with the largest score is true."""
    best = np.asarray(scores).argmax(axis=1)
    return float(np.asarray(labels)[np.arange(len(best)), best].astype(bool).mean())


def gap(scores, labels, top: int = 20) -> float:
    """Return the global average precision over the `top` scores of every sample.

    All of them are ranked together; the precision at each true one is summed, over the number of
    all that are true (at most `top` of a sample). Abu-El-Haija et al., 2016, arXiv:1609.08675.
    """
    scores, labels = np.asarray(scores), np.asarray(labels).astype(bool)
    top = min(top, scores.shape[1])
    best = np.argpartition(-scores, top - 1, axis=1)[:, :top]
    rows = np.arange(len(scores))[:, None]
    order = np.argsort(-scores[rows, best], axis=None, kind="stable")
    hits = labels[rows, best].reshape(-1)[order]
    positives = np.minimum(labels.sum(axis=1), top).sum()
    if not positives:
        return 0.0
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return float((precision * hits).sum() / positives)
