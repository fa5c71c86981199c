"""The places at which a model may be cut, as downward closed sets of layers.

A set of layers is *downward closed* if each layer that feeds a layer of the set is in the set, too.
Each cut has such a set of layers before it, so that no layer needs the output of a later stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .layer_profile import LayerProfile

#: If a model has more sets than this, its layers are put into one order, and only the sets of the
#: first k layers of this order are used.
MOST_SETS = 20_000


def cut_sets(profile: LayerProfile, most: int = MOST_SETS) -> tuple[np.ndarray, bool]:
    """Return, for each place at which a model may be cut, the set of all layers before the cut.

    Returns
    -------
    sets : array (sets, layers) of bool
        Each row says which layers are before one cut, from no layer to all layers.
    exact : bool
        False if there are more than `most` such sets, and `sets` has only some of them.
    """
    n = len(profile.layers)
    needs = [0] * n
    for a, b in profile.edges:
        needs[b] |= 1 << a
    level, found = [0], [0]
    while level:
        grown = dict.fromkeys(
            mask | 1 << k
            for mask in level
            for k in range(n)
            if not mask >> k & 1 and needs[k] & mask == needs[k]
        )
        level = [*grown]
        found += level
        if len(found) > most:
            return np.tri(n + 1, n, -1, dtype=bool), False
    return bit_rows(found, n), True


def bit_rows(masks: Sequence[int], n: int) -> np.ndarray:
    """Return the lowest n bits of each integer in `masks`, bit 0 first: a bool array (masks, n)."""
    packed = b"".join(mask.to_bytes(-(-n // 8), "little") for mask in masks)
    bits = np.frombuffer(packed, np.uint8).reshape(len(masks), -1)
    return np.unpackbits(bits, axis=1, count=n, bitorder="little").astype(bool)


def crossing_bytes(profile: LayerProfile, sets: np.ndarray) -> np.ndarray:
    """Return, for each set of layers, the bytes that are sent if the model is cut after the set."""
    last = np.zeros(sets.shape, bool)
    for a, b in profile.edges:
        last[:, a] |= sets[:, a] & ~sets[:, b]
    return last @ np.array([layer.output_bytes for layer in profile.layers])
