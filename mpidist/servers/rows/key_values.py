"""Compute from a key which server has its row, and the row's initial values. Without MPI.

The keys belong to an open table, which is a table whose rows are made by pushes. Both results are
computed from hashes of the key. So a row has the same initial values on any number of servers, and
a pull gets the same values before the row is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from .key_slots import mixed

_STEP = 0x9E3779B97F4A7C15  # odd, so the words of a row have different numbers to hash


def owners(keys: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return an array: for each key, the number of the server that has its row."""
    if len(shares) == 1:
        return np.zeros(len(keys), np.int64)
    ends = np.cumsum(shares)[:-1] * 2.0**32
    # The upper bits are used here, because the hash tables of the servers use the lower bits.
    return np.searchsorted(ends, mixed(keys) >> np.uint64(32), side="right")


def initial_rows(
    keys: np.ndarray, width: int, dtype: np.dtype, name: str, init: tuple[str, float], seed: int
) -> np.ndarray:
    """Return an array with the initial values of the rows of `keys`, one row per key.

    The values depend only on the seed, the name of the table and the key.
    """
    kind, scale = init
    if kind in ("zeros", "constant"):
        return np.full((len(keys), width), scale, dtype)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    salt = np.frombuffer(digest, np.uint64)
    steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_STEP)
    words = mixed((mixed(keys) ^ salt)[:, None] + steps)
    if kind == "uniform":
        return ((2 * _fractions(words) - 1) * scale).astype(dtype)
    # The method of Box and Muller makes a normal value from two hashes.
    angle, length = (
        _fractions(mixed(words)),
        1 - _fractions(words),
    )  # because 0 has no logarithm
    return (np.sqrt(-2 * np.log(length)) * np.cos(2 * np.pi * angle) * scale).astype(dtype)


def _fractions(words: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each 64-bit word."""
    return (words >> np.uint64(11)) * 2.0**-53
