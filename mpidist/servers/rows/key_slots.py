"""A hash table from 64-bit keys to places (indices) of rows in arrays, without Python loops.

    key 9041 -> cell 5: taken by another key -> cell 6: key 9041, place 12 -> row 12 of the arrays

The table uses open addressing: a key with the hash h is in the first free of the cells h, h + 1, h
+ 3, h + 6, ... modulo the number of cells, of which at most half are used. All keys of a call are
looked up together, so a call takes as many NumPy operations as the longest search has steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_FREE, _REMOVED = -1, -2  # cells without a place; a search goes on after a removed cell

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def mixed(keys: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of each key, as uint64.

    It is the number that the random number generator SplitMix64 makes from the key as its state:
    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    bits = keys.view(np.uint64) + _GOLDEN
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        bits ^= bits >> shift
        bits *= factor
    bits ^= bits >> _SHIFTS[2]
    return bits


class KeySlots:
    """A mapping of distinct int64 keys to places, which are whole numbers from 0 on."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Remove all keys from the mapping."""
        self.count = self._taken = 0
        self._make(64)

    def _make(self, cells: int) -> None:
        self._keys = np.zeros(cells, np.int64)
        self._places = np.full(cells, _FREE, np.int32)
        self._mask = cells - 1

    @property
    def nbytes(self) -> int:
        """The bytes of memory of the hash table."""
        return self._keys.nbytes + self._places.nbytes

    def _first(self, keys: np.ndarray) -> np.ndarray:
        return (mixed(keys) & np.uint64(self._mask)).view(np.int64)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the place of each key as an int32 array; -1 for a key that is not there."""
        cells = self._first(keys)
        found = self._places[cells]
        wrong = (found != _FREE) & (self._keys[cells] != keys)
        other = np.flatnonzero(wrong | (found == _REMOVED))
        step = 0
        while other.size:
            step += 1
            at = (cells[other] + step) & self._mask
            cells[other], places = at, self._places[at]
            found[other] = places
            wrong = (places != _FREE) & (self._keys[at] != keys[other])
            other = other[wrong | (places == _REMOVED)]
        return found

    def add(self, keys: np.ndarray, places: np.ndarray) -> None:
        """Add distinct new keys; each key gets the place with the same index in `places`."""
        if 2 * (self._taken + len(keys)) > self._mask:
            self._rebuild(self.count + len(keys))
        self._insert(keys, places.astype(np.int32, copy=False))
        self.count += len(keys)

    def _rebuild(self, count: int) -> None:
        """Make new cells for at least twice `count` keys, and insert all keys again."""
        here = self._places >= 0
        keys, places = self._keys[here], self._places[here]
        self._make(1 << max(6, (3 * count).bit_length()))
        self._taken = 0
        self._insert(keys, places)

    def _insert(self, keys: np.ndarray, places: np.ndarray) -> None:
        cells, left, step = self._first(keys), np.arange(len(keys)), 0
        while left.size:
            at = cells[left]
            before = self._places[at]
            free = before < 0
            trying, cell = left[free], at[free]
            self._places[cell] = places[trying]
            # If several keys write into one cell, the key that is read back has got the cell.
            won = self._places[cell] == places[trying]
            self._keys[cell[won]] = keys[trying[won]]
            self._taken += int((before[free][won] == _FREE).sum())
            left = np.concatenate([left[~free], trying[~won]])
            step += 1
            cells[left] = (cells[left] + step) & self._mask

    def remove(self, keys: np.ndarray) -> None:
        """Remove distinct keys, which must all be in the mapping."""
        cells = self._first(keys)
        left, step = np.arange(len(keys)), 0
        while left.size:
            at = cells[left]
            here = (self._places[at] >= 0) & (self._keys[at] == keys[left])
            self._places[at[here]] = _REMOVED
            left = left[~here]
            step += 1
            cells[left] = (cells[left] + step) & self._mask
        self.count -= len(keys)


class KeyRows:
    """Rows of arrays, found by 64-bit keys: each key has a place, an index of the arrays."""

    def __init__(self, **columns: tuple[tuple[int, ...], Any]):
        self._kinds = columns
        self.clear()

    def clear(self) -> None:
        """Remove all keys, and free the memory of the arrays."""
        self._slots, self._free, self._next = KeySlots(), np.empty(0, np.int64), 0
        # The key of each place, and which places have a key.
        self.keys, self.live = np.empty(0, np.int64), np.empty(0, bool)
        self.columns = {name: np.zeros((0, *s), t) for name, (s, t) in self._kinds.items()}

    def __len__(self) -> int:
        return self._slots.count

    @property
    def capacity(self) -> int:
        """How many keys fit into the arrays without more memory."""
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """The bytes of memory of the keys, the hash table and all arrays."""
        arrays = (self.keys, self.live, *self.columns.values())
        return self._slots.nbytes + sum(array.nbytes for array in arrays)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Return the place (index in the arrays) of each key; -1 for an unknown key."""
        return self._slots.find(keys)

    def short_of(self, more: int) -> int:
        """Return the capacity that the arrays need for `more` new keys; 0 if they have room."""
        need = len(self) + more
        return max(64, need, min(2 * self.capacity, need + need // 2)) * (need > self.capacity)

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Add distinct new keys, and return their places (indices in the arrays).

        The entries of the arrays at these places are not set: they may have values of removed keys.
        """
        if capacity := self.short_of(len(keys)):
            self.resize(capacity)
        old = min(len(keys), len(self._free))
        places = np.concatenate(
            [self._free[len(self._free) - old :], np.arange(len(keys) - old) + self._next]
        )
        self._free = self._free[: len(self._free) - old]
        self._next += len(keys) - old
        self.keys[places], self.live[places] = keys, True
        self._slots.add(keys, places)
        return places

    def resize(self, capacity: int) -> None:
        """Give the arrays room for `capacity` keys; new entries are zero."""
        self.keys, self.live = lengthened(self.keys, capacity), lengthened(self.live, capacity)
        self.columns = {name: lengthened(array, capacity) for name, array in self.columns.items()}

    def remove(self, places: np.ndarray) -> None:
        """Forget the keys at `places` (indices in the arrays). New keys may get these places."""
        self._slots.remove(self.keys[places])
        self.live[places] = False
        self._free = np.concatenate([self._free, places])

    def compacted(self) -> np.ndarray:
        """Move all keys to the front of the arrays, and return their old places.

        Entry i of the result is the old place of the key that is now at place i.
        """
        places = np.flatnonzero(self.live)
        keys, columns = self.keys[places], {n: a[places] for n, a in self.columns.items()}
        self.clear()
        self.add(keys)
        for name, array in columns.items():
            self.columns[name][: len(places)] = array
        return places


def lengthened(array: np.ndarray, length: int) -> np.ndarray:
    """Return a longer array with the entries of `array`, and then zeros."""
    larger = np.zeros((length, *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
