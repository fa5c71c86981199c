"""A shuffle that computes each index on demand, as a keyed bijection of [0, count).

A stored permutation of 10^9 records takes 8 GB on every rank. A bijection stores only its count and
key: the record at position k of an epoch is ``Bijection(count, key)(k)``.

    a number of 2b bits    left | right    8 rounds: left, right = right, left ^ hash(right, key)

Here b is the smallest number of 1 or more for which 4^b >= count. A position is a number of 2b
bits: `left` is its upper half, and `right` its lower half. Each of the 8 Feistel rounds can be
inverted, so together they are a bijection of [0, 4^b). A result outside [0, count) goes through all
rounds again (cycle walking), on average at most 4 times.

References: Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom
functions", SIAM Journal on Computing 17(2), 1988 (the rounds, from Feistel); Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle walking); Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014 (the hash function).
"""

from __future__ import annotations

import numpy as np

#: Four rounds make a strong pseudorandom permutation of large halves; small halves need more.
_ROUNDS = 8
#: The two multipliers of SplitMix64's mixing function.
_MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Bijection:
    """A one-to-one map of [0, count) onto itself, which depends only on `count` and `key`.

    `count` is from 1 to 2^62, and `key` a sequence of integers of 0 or more, such as (seed, epoch).
    """

    def __init__(self, count: int, key):
        self.count = count
        half = max(1, -(-(count - 1).bit_length() // 2))
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __call__(self, places) -> np.ndarray:
        """Map each integer of `places`, all in [0, count), and return the results as int64."""
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
    """Mix the 64 bits of each element of `x` in place, with arithmetic modulo 2^64."""
    x ^= x >> np.uint64(30)
    x *= _MIX[0]
    x ^= x >> np.uint64(27)
    x *= _MIX[1]
    x ^= x >> np.uint64(31)
    return x
