"""A multi-layer perceptron with ReLU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ..errors import ConfigError
from .layers import Dense, Relu, Rows
from .logistic import checked_whole, sample_shape
from .network import Network


def mlp(sizes: Sequence, seed: int = 0) -> Network:
    """Dense layers of `sizes`, a ReLU between each two.

    Parameters
    ----------
    sizes : sequence of int
        Inputs, hidden layers, classes: ``[784, 128, 10]``. The first may be the shape of a
        sample that is to be flattened: ``[[1, 28, 28], 128, 10]``.
    seed : int
        Seeds the weights.
    """
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or len(sizes) < 2:
        raise ConfigError(f"mlp: sizes is {sizes!r}, expected [inputs, hidden..., classes]")
    shape = sample_shape("mlp", "sizes", sizes[0])
    widths = [math.prod(shape), *(checked_whole("mlp", "sizes", size, 1) for size in sizes[1:])]
    layers: list = [Rows()]
    for i, (inputs, outputs) in enumerate(pairwise(widths), 1):
        layers += [Dense(f"dense{i}", inputs, outputs), Relu()]
    return Network(layers[:-1], shape, seed)
