"""Which samples each step uses: a pure function of (seed, epoch, position), never of the ranks.

    epoch 3, 10 samples:   permutation of (seed, 3)      7 2 9 0 | 4 1 8 3 | 6 5
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

from mpidist.errors import ConfigError
from mpidist.partition import BlockPartition


class Position(NamedTuple):
    """Where the data order stands: `offset` samples of epoch `epoch` are used up. Local."""

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
    """The data order of a training run. Local; all ranks hold equal ones.

    Parameters
    ----------
    count : int
        Number of samples, at least 1.
    global_batch : int
        Samples per step over all ranks together, at least 1. A batch larger than `count` is one
        whole epoch. It is never changed silently when the number of ranks changes.
    seed : int
        At least 0. Epoch e is ``np.random.default_rng((seed, e)).permutation(count)``.
    shuffle : bool
        False keeps the order of the source in every epoch.
    """

    def __init__(self, count: int, global_batch: int, seed: int = 0, shuffle: bool = True):
        self.count = _whole("count", count, 1, "is the data set empty?")
        self.global_batch = _whole("global_batch", global_batch, 1, "it counts all ranks' samples")
        self.seed = _whole("seed", seed, 0, "a negative one cannot seed the generator")
        self.shuffle = bool(shuffle)
        self._cached: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch at this global batch, the short one included."""
        return -(-self.count // self.global_batch)

    def order(self, epoch: int) -> np.ndarray:
        """All indices of `epoch` in the order of use, read-only. One epoch is remembered."""
        if self._cached is None or self._cached[0] != epoch:
            if self.shuffle:
                order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            else:
                order = np.arange(self.count)
            order.flags.writeable = False
            self._cached = (epoch, order)
        return self._cached[1]

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
        return self.order(epoch)[offset:stop], after

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
        raise ConfigError(f"{name} is {value!r}, expected a whole number") from None
    if number < low or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected a whole number of at least {low}; {hint}")
    return number
