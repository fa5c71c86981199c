"""A shuffle that is computed where it is looked at: a keyed bijection of [0, count).

A permutation of a thousand million records takes 8 GB on every rank, before the first step. A
bijection takes two numbers: place k of an epoch's order is ``Bijection(count, key)(k)``.

    a number of 2b bits    left | right    8 rounds: left, right = right, left ^ hash(right, key)

A round can be undone whatever the hash is, so the rounds together are a bijection of [0, 4^b), for
the least 4^b >= count. What falls outside [0, count) goes through again until it falls inside
(cycle walking): still a bijection, at 4 passes or less on average.

M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM
J. Comput. 17(2), 1988 (the rounds, from H. Feistel); J. Black, P. Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002 (the walk); G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014 (the hash).
"""

from __future__ import annotations

import numpy as np

#: Four make a strong pseudorandom permutation of large halves; more, since halves may be small.
_ROUNDS = 8
#: The two multipliers of SplitMix64's mixing function.
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Bijection:
    """A one-to-one map of [0, count) onto itself, a pure function of `key`.

    Parameters
    ----------
    count : int
        From 1 to 2^62.
    key : sequence of int
        Whole numbers from 0, such as (seed, epoch).
    """

    def __init__(self, count: int, key):
        self.count = count
        half = max(1, -(-(count - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places) -> np.ndarray:
        """Return the images of `places`, integers in [0, count), as int64."""
        values = self._rounds(np.asarray(places).astype(np.uint64))
        outside = np.flatnonzero(values >= self.count)
        while len(outside):
            values[outside] = self._rounds(values[outside])
            outside = outside[values[outside] >= self.count]
        return values.astype(np.int64)

    def _rounds(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_hash(right + key) & self._mask)
        return left << self._half | right


def _hash(x: np.ndarray) -> np.ndarray:
    """Mix 64 bits (modulo 2^64); `x` is scratch."""
    x ^= x >> np.uint64(30)
    x *= _MIX[0]
    x ^= x >> np.uint64(27)
    x *= _MIX[1]
    x ^= x >> np.uint64(31)
    return x
