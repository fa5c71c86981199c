"""A multi-layer perceptron with ReLU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ..errors import ConfigError
from .layers import Dense, Relu, Rows
from .logistic import sample_shape
from .network import Network


def mlp(sizes: Sequence, seed: int = 0) -> Network:
    """Make dense layers of the widths `sizes`, with a ReLU after each layer but the last.

    Parameters
    ----------
    sizes : sequence of int
        Numbers of inputs, of units in each hidden layer, and of classes, as in ``[784, 128, 10]``.
        The first entry may be the shape of a sample, which is then flattened, as in ``[[1, 28, 28],
        128, 10]``.
    seed : int
        Seed of the weights.
    """
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) < 2:
        raise ConfigError(f"mlp: sizes is {sizes!r}, expected [inputs, hidden..., classes]")
    shape = sample_shape("mlp: sizes", sizes[0])
    widths = [math.prod(shape), *sample_shape("mlp: sizes", list(sizes[1:]))]
    layers: list = [Rows()]
    for i, (inputs, outputs) in enumerate(pairwise(widths), 1):
        layers += [Dense(f"dense{i}", inputs, outputs), Relu()]
    return Network(layers[:-1], shape, seed)
