"""Add up gradients of equal rows, so that each row occurs once, in ascending order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def is_ascending(rows: np.ndarray) -> bool:
    """Whether each row number is larger than the row number before."""
    return bool((rows[1:] > rows[:-1]).all())


def sum_equal_rows(rows: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows in ascending order, and the sum of the values of each row."""
    if is_ascending(rows):
        return rows, values
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    first = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    if len(first) == len(rows):
        return rows, values[order]
    # Half precision is added in single precision.
    wide = values[order].astype(np.promote_types(values.dtype, np.float32), copy=False)
    return rows[first], np.add.reduceat(wide, first, axis=0)


def last_of_equal_rows(rows: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows in ascending order, and the last value of each row."""
    if is_ascending(rows):
        return rows, values
    distinct, first = np.unique(rows[::-1], return_index=True)
    return distinct, values[len(rows) - 1 - first]


def merge_rows(
    parts: Sequence[tuple[float, np.ndarray, np.ndarray]], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weighted sum of gradients of rows, as (rows, values) with distinct rows.

    Each of `parts` is (weight, rows, values); the values are multiplied by the weight in place.
    """
    wide = np.promote_types(dtype, np.float32)  # half precision is rounded once, at the end
    scaled = []
    for share, _, values in parts:
        values = values.astype(wide if share != 1 or len(parts) > 1 else dtype, copy=False)
        scaled.append(values if share == 1 else np.multiply(values, share, out=values))
    if len(parts) == 1:
        rows, total = sum_equal_rows(parts[0][1], scaled[0])
    else:
        rows = np.concatenate([rows for _, rows, _ in parts])
        rows, total = sum_equal_rows(rows, np.concatenate(scaled))
    return rows, total.astype(dtype, copy=False)
