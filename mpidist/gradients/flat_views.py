"""Store all gradients of one dtype in a 1-D vector; the first vector also has two extra numbers.

[ conv1.w | conv1.b | ... | dense3.b | extras ]   [ gradients of another dtype ]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import numpy as np

from ..arrays import array_module

#: The name of the two extra numbers. `md.train` sums a loss and requests to stop.
EXTRAS = "(extras)"


def loss_dtype(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Return the dtype for a loss: the widest real dtype of the gradients, at least float32."""
    wide = {dtype for dtype in dtypes if dtype.kind == "f" and dtype.itemsize >= 4}
    return max(wide, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))


def with_extras(shapes: Mapping, loss: np.dtype | None = None) -> dict:
    """Return a dict name -> (shape, dtype) of gradients and extras, in their order in memory.

    The extras are two numbers, one of them a loss, that are summed together with the gradients.
    `loss` is the dtype of the extras; None means the dtype that `loss_dtype` returns.
    """
    first = loss or loss_dtype(dtype for _, dtype in shapes.values())
    return {
        **{name: entry for name, entry in shapes.items() if entry[1] == first},
        EXTRAS: ((2,), first),
        **{name: entry for name, entry in shapes.items() if entry[1] != first},
    }


def allocate(spec: Mapping, xp, rows: tuple[int, ...] = ()) -> tuple[dict, list]:
    """Allocate vectors of zeros with the array module `xp`; return (views by name, vectors).

    `spec` maps each name to (shape, dtype); the arrays of one dtype are views of one vector. With
    ``rows=(k,)`` each vector has the shape (k, n) instead of (n,), and each view (k, *shape).
    """
    views: dict = {}
    vectors: list = []
    for dtype in dict.fromkeys(dtype for _, dtype in spec.values()):
        mine = {name: shape for name, (shape, kind) in spec.items() if kind == dtype}
        vector = xp.zeros((*rows, sum(prod(shape) for shape in mine.values())), dtype)
        start = 0
        for name, shape in mine.items():
            views[name] = vector[..., start : start + prod(shape)].reshape((*rows, *shape))
            start += prod(shape)
        vectors.append(vector)
    return views, vectors


def flat_views(
    parameters: Mapping, rows: tuple[int, ...] = (), loss: np.dtype | None = None
) -> tuple[dict, list]:
    """Allocate one vector of zeros per dtype for gradients; return (views by name, vectors).

    With ``rows=(k,)`` each vector has the shape (k, n) instead of (n,).
    """
    shapes = {name: (array.shape, array.dtype) for name, array in parameters.items()}
    # A stage of a pipeline (a rank with some of the layers) may have a loss and no parameters.
    xp = array_module(next(iter(parameters.values()))) if parameters else np
    views, vectors = allocate(with_extras(shapes, loss), xp, rows)
    return {name: views[name] for name in parameters}, vectors
