"""How gradients lie: one flat vector per dtype, two further numbers at the end of the first. Pure.

[ conv1.w | conv1.b | ... | dense3.b | extras ]   [ those of another dtype ]
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from ..arrays import array_module

#: Name of the two further numbers: a loss and a vote ride with the gradients.
EXTRAS = "(extras)"


def with_extras(shapes: Mapping) -> dict:
    """Return name -> (shape, dtype) in order of place, extras among them.

    They lie with the widest real numbers, and in float32 at least, if need be alone: a loss in
    float16 would overflow. That vector is the first.
    """
    kinds = {dtype for _, dtype in shapes.values() if dtype.kind == "f" and dtype.itemsize >= 4}
    first = max(kinds, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))
    return {
        **{name: entry for name, entry in shapes.items() if entry[1] == first},
        EXTRAS: ((2,), first),
        **{name: entry for name, entry in shapes.items() if entry[1] != first},
    }


def allocate(spec: Mapping, xp, rows: tuple[int, ...] = ()) -> tuple[dict, list]:
    """Return (views by name, vectors) of zeros in private memory, on the device of `xp`.

    With ``rows=(k,)`` there are k of each: vectors (k, n), views (k, *shape).
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


def flat_views(parameters: Mapping, rows: tuple[int, ...] = ()) -> tuple[dict, list]:
    """Return (gradients, vectors) for `parameters`, in private memory beside them.

    `rows` as for `allocate`.
    """
    shapes = {name: (array.shape, array.dtype) for name, array in parameters.items()}
    xp = array_module(next(iter(parameters.values())))
    views, vectors = allocate(with_extras(shapes), xp, rows)
    return {name: views[name] for name in parameters}, vectors
