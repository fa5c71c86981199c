"""Which samples each step uses: a pure function of (seed, epoch, position), never of the ranks.

    epoch 3, 10 samples:   shuffled by (seed, 3)         7 2 9 0 | 4 1 8 3 | 6 5
    global batch 4:                                      step 0    step 1    step 2 (short)
    3 ranks in step 0:                                   7 2 | 9 | 0

The position (epoch, offset) says how many samples of an epoch are used up. It knows nothing of
ranks or of the batch size, so either may change in the middle of an epoch and every sample is
still used exactly once. No batch reaches over the end of an epoch; the last may be short.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, shown
from ..partition import BlockPartition
from .shuffle import Bijection

#: How an epoch is shuffled; which of them is part of what a checkpoint's position means.
SHUFFLES = ("permutation", "bijection", "none")
#: A larger data set is shuffled by a bijection: its permutation would take 32 MiB of every rank.
PERMUTED = 1 << 22
#: Places of a bijection that are computed at once, since a call for a single batch costs as much.
_WINDOW = 1 << 14


class Position(NamedTuple):
    """Where the data order stands: `offset` samples of epoch `epoch` are used up."""

    epoch: int = 0
    offset: int = 0

    def as_dict(self) -> dict[str, int]:
        """Plain integers, for a checkpoint."""
        return {"epoch": int(self.epoch), "offset": int(self.offset)}

    @classmethod
    def from_dict(cls, saved: Mapping) -> Position:
        """The inverse of `as_dict`; 0-d arrays will do."""
        return cls(int(saved["epoch"]), int(saved["offset"]))


class Sampler:
    """The data order of a training run. All ranks hold equal ones.

    Parameters
    ----------
    count : int
        Number of samples, at least 1.
    global_batch : int
        Samples per step over all ranks together, at least 1. A batch larger than `count` is one
        whole epoch. It is never changed silently when the number of ranks changes.
    seed : int
        At least 0.
    shuffle : str or bool
        "permutation": epoch e is ``np.random.default_rng((seed, e)).permutation(count)``.
        "bijection": it is ``Bijection(count, (seed, e))``, which takes no memory. "none" or False:
        the order of the source in every epoch. True: permutation up to 4 Mi samples, else
        bijection.
    """

    def __init__(self, count: int, global_batch: int, seed: int = 0, shuffle: str | bool = True):
        self.count = _whole("count", count, 1, "is the data set empty?")
        self.global_batch = _whole("global_batch", global_batch, 1, "it counts all ranks' samples")
        self.seed = _whole("seed", seed, 0, "a negative one cannot seed the generator")
        self._cached: tuple[tuple, np.ndarray] | None = None
        self.set_shuffle(shuffle)

    def __repr__(self):
        return (
            f"Sampler(count={self.count}, global_batch={self.global_batch}, seed={self.seed}, "
            f"shuffle={self.shuffle!r})"
        )

    def set_shuffle(self, shuffle: str | bool) -> None:
        """Choose another shuffle: the one that a checkpoint was made with."""
        if isinstance(shuffle, bool):
            large = self.count > PERMUTED
            shuffle = ("bijection" if large else "permutation") if shuffle else "none"
        if not isinstance(shuffle, str) or shuffle not in SHUFFLES:
            known = ", ".join(map(repr, SHUFFLES))
            raise ConfigError(f"shuffle is {shown(shuffle)}, expected {known}, True or False")
        self.shuffle = shuffle

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch at this global batch, the short one included."""
        return -(-self.count // self.global_batch)

    def order(self, epoch: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return places `start` to `stop` of the order of `epoch`, read-only.

        A permutation is remembered whole, of a bijection the last few thousand places.
        """
        stop = self.count if stop is None else stop
        if self.shuffle == "bijection":
            return self._window(epoch, start, stop)
        if self.shuffle == "none":
            order = np.arange(start, stop)
            order.flags.writeable = False
            return order
        if self._cached is None or self._cached[0] != ("permutation", epoch):
            order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            order.flags.writeable = False
            self._cached = ("permutation", epoch), order
        return self._cached[1][start:stop]

    def _window(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Return places of a bijection, in windows that begin at multiples of their length."""
        first = start - start % _WINDOW
        key = ("bijection", epoch, first, max(stop, min(first + _WINDOW, self.count)))
        if self._cached is None or self._cached[0] != key:
            order = Bijection(self.count, (self.seed, epoch))(np.arange(first, key[3]))
            order.flags.writeable = False
            self._cached = key, order
        return self._cached[1][start - first : stop - first]

    def batch(self, position: Position) -> tuple[np.ndarray, Position]:
        """Return the global batch at `position` and the position after it."""
        epoch, offset = position
        if epoch < 0 or not 0 <= offset < self.count:
            raise ConfigError(
                f"data position is epoch {epoch}, offset {offset}; expected an epoch from 0 and "
                f"an offset below the {self.count} samples: is this another data set?"
            )
        stop = min(offset + self.global_batch, self.count)
        after = Position(epoch, stop) if stop < self.count else Position(epoch + 1, 0)
        return self.order(epoch, offset, stop), after

    def local(self, indices: np.ndarray, rank: int, size: int) -> np.ndarray:
        """The contiguous part of a global batch that `rank` of `size` works on; maybe empty."""
        start, stop = BlockPartition(len(indices), size).range(rank)
        return indices[start:stop]

    def local_batch(self, rank: int, size: int) -> int:
        """Samples of a full global batch that `rank` of `size` works on."""
        return BlockPartition(min(self.global_batch, self.count), size).size(rank)

    def position(self, step: int) -> Position:
        """Where step number `step` begins, if the global batch was this one all along."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return Position(epoch, within * self.global_batch)


def _whole(name: str, value: int, low: int, hint: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} is {shown(value)}, expected a whole number") from None
    if number < low or isinstance(value, bool):
        raise ConfigError(
            f"{name} is {shown(value)}, expected a whole number of at least {low}; {hint}"
        )
    return number
