"""Gradients of some rows of a parameter, as tuples (rows, values), and updates of only these rows.

    parameter   0 . . .        rows    [1, 3]
                1 # # #   <-   values  # # #
                2 . . .                # # #
                3 # # #

The rows of the parameter and of the state that have a gradient are copied. The optimizer updates
the copies, which are then written back. The other rows are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import ConfigError


def checked_rows(where: str, gradient: tuple, parameter) -> tuple:
    """Check a gradient (rows, values) of a parameter, and return it.

    Raises
    ------
    ConfigError
        When the rows are not distinct, are outside the parameter, or do not fit the values.
    """
    form = len(gradient) == 2 and all(hasattr(array, "shape") for array in gradient)
    rows, values = gradient if form else (np.empty(0, np.int64), np.empty(()))
    if not form or rows.dtype.kind not in "iu" or rows.ndim != 1 or values.shape[:1] != rows.shape:
        raise ConfigError(
            f"{where}: a gradient of rows is a tuple (rows, values) of a 1-D integer array and an "
            "array with one entry per row"
        )
    flat = parameter.ndim == 1 and parameter.flags.c_contiguous
    width = max(1, values[:1].size if len(rows) else 1)
    if not flat and values.shape[1:] != parameter.shape[1:]:
        raise ConfigError(
            f"{where}: values of rows have shape {values.shape[1:]}, the parameter's rows have "
            f"{parameter.shape[1:]}"
        )
    count = parameter.size // width if flat else len(parameter)
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < count:
        raise ConfigError(
            f"{where}: rows {int(rows.min())} ... {int(rows.max())} are outside 0 ... {count - 1}"
        )
    ascending = bool((rows[1:] > rows[:-1]).all())
    if not ascending and np.unique(rows).size < rows.size:
        raise ConfigError(f"{where}: rows are not distinct; add the gradients of equal rows first")
    return gradient


def row_groups(group: tuple, most: int) -> Iterator[tuple]:
    """Yield copies of those rows of all arrays in `group` that have a gradient, some at a time.

    The caller changes the copies in place; they are then written back to the arrays. `group` is
    (parameter, (rows, values), state arrays). Each yielded tuple is (copied rows of the parameter,
    values of their gradient, copied rows of the state arrays, scratch). `scratch` is an
    uninitialised array of the shape of the copied rows. Each yielded array has at most `most`
    elements, or is a single row.
    """
    parameter, (rows, values), *slots = group
    width = max(1, values[:1].size)
    arrays = [
        array if array.ndim > 1 else array.reshape(-1, width) for array in (parameter, *slots)
    ]
    values = values.reshape(len(rows), *arrays[0].shape[1:])
    step = max(1, most // width)
    for start in range(0, len(rows), step):
        here = rows[start : start + step]
        copies = [array[here] for array in arrays]
        yield copies[0], values[start : start + step], *copies[1:], np.empty_like(copies[0])
        for array, copy in zip(arrays, copies, strict=True):
            array[here] = copy
