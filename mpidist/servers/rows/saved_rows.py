"""Fill the arrays of a server from arrays that any number of servers have saved.

A piece is a part of a tensor: (tensor, first element, 1-D array), or (tensor, rows, 2-D array) if
the rows of the tensor are dealt to the servers one by one. A piece of one kind can also be filled
from pieces of the other kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...errors import ConfigError


def fill_pieces(targets: Sequence, sources: Iterable, what: str) -> None:
    """Copy saved elements of tensors into the arrays of `targets`, from any of the `sources`.

    Both are sequences of (tensor, first element, 1-D array) or (tensor, rows, 2-D array). Raises
    ConfigError if elements of a target are in no source.
    """
    sources = list(sources)
    for tensor, where, array in targets:
        missing = array.size
        for name, place, source in sources:
            if name == tensor:
                missing -= _copy(where, array, place, source)
        if missing:
            begin = where if np.ndim(where) == 0 else f"row {where[0]}"
            raise ConfigError(
                f"load_shards: {what} of {tensor!r}: {missing} of {array.size} elements from "
                f"{begin} on are in none of the pieces given"
            )


def _copy(where, array: np.ndarray, place, source: np.ndarray) -> int:
    """Copy the common elements of two pieces of one tensor; return their number."""
    if np.ndim(where) == 0 and np.ndim(place) == 0:
        low, high = max(where, place), min(where + array.size, place + source.size)
        if low < high:
            array[low - where : high - where] = source[low - place : high - place]
        return max(0, high - low)
    if np.ndim(where) and np.ndim(place):
        _, mine, given = np.intersect1d(where, place, assume_unique=True, return_indices=True)
        array[mine] = source[given]
        return len(mine) * array.shape[1]
    if np.ndim(where):
        return _rows_of_range(where, array, place, source, False)
    return _rows_of_range(place, source, where, array, True)


def _rows_of_range(rows, table: np.ndarray, start: int, flat: np.ndarray, back: bool) -> int:
    """Copy the rows in a range of elements (`flat`) to `table`; with `back`, from `table`."""
    width, stop = table.shape[1], start + flat.size
    first, last = -(-start // width), stop // width  # the rows that are completely in the range
    copied = 0
    if first < last:
        whole = flat[first * width - start : last * width - start].reshape(-1, width)
        here = (rows >= first) & (rows < last)
        if back:
            whole[rows[here] - first] = table[here]
        else:
            table[here] = whole[rows[here] - first]
        copied = int(here.sum()) * width
    for row in {start // width, stop // width}:  # the rows that are only partly in the range
        low, high = max(start, row * width), min(stop, (row + 1) * width)
        for at in np.flatnonzero(rows == row) if 0 < high - low < width else ():
            mine, given = table[at, low - row * width :][: high - low], flat[low - start :]
            if back:
                given[: high - low] = mine
            else:
                mine[...] = given[: high - low]
            copied += high - low
    return copied
