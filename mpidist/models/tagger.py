"""A multi-label model: a sample may have any number of labels (entities), predicted separately.

    x (n, inputs) [ -> hidden, ReLU ] -> one score per entity -> sigmoid cross entropy, summed

The loss of a sample is the sum, not the mean, over all entities, so that the gradient of one entity
does not shrink when there are many entities.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from ..arrays import array_module, is_device
from ..errors import ConfigError
from ..registry import checked_whole
from .network import checked_input


class Tagger:
    """Logistic regression for each entity (label), with an optional hidden layer shared by all.

    Parameters
    ----------
    inputs, classes : int
        Number of features of a sample, and of entities.
    hidden : int
        Units of the hidden layer; 0 means no hidden layer.
    seed : int
        Seed of the weights (He et al., 2015).

    Attributes
    ----------
    parameters : dict of str to array
        float32, in forward order.
    """

    def __init__(self, inputs: int, classes: int, hidden: int = 0, seed: int = 0):
        self.sample_shape, self.classes = (inputs,), classes
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
        """Return scores of shape (samples, classes); a positive score means a likely label."""
        return self._forward(inputs)[-1]

    def loss_and_gradients(
        self, batch, gradients, ready: Callable[[str], None] | None = None
    ) -> float:
        """Write the gradient of the mean loss over `batch` and return the mean loss.

        `batch` is (inputs, labels). Labels are zeros and ones of shape (samples, classes).
        """
        inputs, labels = batch
        if tuple(labels.shape) != (len(inputs), self.classes):
            raise ConfigError(
                f"labels have shape {labels.shape}, expected ({len(inputs)}, {self.classes}): 0 or "
                "1 for every entity"
            )
        ready = ready or (lambda name: None)
        layers = self._forward(inputs)
        scores = layers[-1]
        xp = array_module(scores)
        truth = xp.asarray(labels, dtype=scores.dtype)
        count = max(len(scores), 1)
        # log(1 + exp(s)) - t s, and its derivative sigmoid(s) - t, both without overflow.
        e = xp.exp(-xp.abs(scores))
        losses = xp.maximum(scores, 0) - scores * truth + xp.log1p(e)
        dy = (xp.where(scores >= 0, 1 / (1 + e), e / (1 + e)) - truth) / count
        for k in range(len(layers) - 1, 0, -1):
            x, name = layers[k - 1], f"dense{k}"
            dy.sum(axis=0, out=gradients[f"{name}.b"])
            ready(f"{name}.b")
            xp.matmul(x.T, dy, out=gradients[f"{name}.w"])
            ready(f"{name}.w")
            if k > 1:
                dy = (dy @ self.parameters[f"{name}.w"].T) * (x > 0)
        return float(losses.sum(dtype=np.float64)) / count

    def _forward(self, inputs) -> list:
        """Return the input of every layer, and the scores that the last layer computes."""
        layers = [checked_input(self, inputs)]
        for k in range(1, len(self.parameters) // 2 + 1):
            y = layers[-1] @ self.parameters[f"dense{k}.w"] + self.parameters[f"dense{k}.b"]
            last = 2 * k == len(self.parameters)
            layers.append(y if last else array_module(y).maximum(y, 0))
        return layers


def tagger(inputs: int = 1152, classes: int = 3862, hidden: int = 0, seed: int = 0) -> Tagger:
    """Make a `Tagger`; the default sizes fit the video features of YouTube-8M."""
    return Tagger(
        checked_whole("tagger: inputs", inputs, 1),
        checked_whole("tagger: classes", classes, 1),
        checked_whole("tagger: hidden", hidden, 0),
        seed,
    )


def hit_at_one(scores, labels) -> float:
    """Return the fraction of samples whose class with the highest score is one of their labels."""
    best = _on_host(scores).argmax(axis=1)
    return float(_on_host(labels)[np.arange(len(best)), best].astype(bool).mean())


def gap(scores, labels, top: int = 20) -> float:
    """Return the global average precision over the `top` scores of every sample.

    The `top` highest scores of every sample are ranked together, the highest first. The precision
    at a position of this ranking is the fraction of scores up to there that belong to true entities
    (labels that the sample has). The result is the sum of the precisions at the positions of the
    true entities, divided by the number of all true entities. A sample with more than `top` true
    entities adds only `top` to this number. Abu-El-Haija et al., 2016, arXiv:1609.08675.
    """
    scores, labels = _on_host(scores), _on_host(labels).astype(bool)
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


def _on_host(x) -> np.ndarray:
    return x.get() if is_device(x) else np.asarray(x)
