"""Choose the samples of each step; the choice depends on seed, epoch and position, not on ranks.

    epoch 3, 10 samples:   shuffled by (seed, 3)         7 2 9 0 | 4 1 8 3 | 6 5
    global batch 4:                                      step 0    step 1    step 2 (short)
    3 ranks in step 0:                                   7 2 | 9 | 0

The position of a run in the data is (epoch, offset), where the offset is the number of samples that
were used in this epoch. So the number of ranks and the batch size may change in the middle of an
epoch, and every sample is still used exactly once. The last batch of an epoch may be short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, shown
from ..partition import BlockPartition
from ..registry import checked_whole
from .shuffle import Bijection

#: The kinds of shuffles. A checkpoint saves the kind with the position.
SHUFFLES = ("permutation", "bijection", "none")
#: A data set of more samples is shuffled by a bijection, because a permutation would take more than
#: 32 MiB on every rank.
PERMUTED = 1 << 22
#: How many positions of a bijection are computed at once; so many take no longer than those of one
#: batch.
_WINDOW = 1 << 14


class Position(NamedTuple):
    """A position in the order of the data: `offset` samples of epoch `epoch` have been used."""

    epoch: int = 0
    offset: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the position as plain integers, for a checkpoint."""
        return {"epoch": int(self.epoch), "offset": int(self.offset)}

    @classmethod
    def from_dict(cls, saved: Mapping) -> Position:
        """Return the Position that a dict made by `as_dict` describes; values may be 0-d arrays."""
        return cls(int(saved["epoch"]), int(saved["offset"]))


class Sampler:
    """The order in which a training run uses its samples. All ranks must make equal samplers.

    Parameters
    ----------
    count : int
        Number of samples, at least 1.
    global_batch : int
        Samples per step on all ranks together, at least 1; if larger than `count`, a batch is an
        epoch.
    seed : int
        Seed of the shuffle, at least 0.
    shuffle : str or bool
        With "permutation", the order of epoch e is ``np.random.default_rng((seed,
        e)).permutation(count)``. With "bijection", it is ``Bijection(count, (seed, e))``, which
        takes no memory. With "none" or False, every epoch has the order of the source. True means
        "permutation" up to 4 Mi samples, and "bijection" for more.
    """

    def __init__(self, count: int, global_batch: int, seed: int = 0, shuffle: str | bool = True):
        self.count = checked_whole("count", count, 1, "; is the data set empty?")
        hint = "; it counts the samples of all ranks"
        self.global_batch = checked_whole("global_batch", global_batch, 1, hint)
        self.seed = checked_whole("seed", seed, 0, "; a negative seed is not valid")
        self._cached: tuple[tuple, np.ndarray] | None = None
        self.set_shuffle(shuffle)

    def __repr__(self):
        names = ("count", "global_batch", "seed", "shuffle")
        return f"Sampler({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def set_shuffle(self, shuffle: str | bool) -> None:
        """Change the kind of shuffle, for instance to the kind that a checkpoint has stored."""
        if isinstance(shuffle, bool):
            large = self.count > PERMUTED
            shuffle = ("bijection" if large else "permutation") if shuffle else "none"
        if not isinstance(shuffle, str) or shuffle not in SHUFFLES:
            known = ", ".join(map(repr, SHUFFLES))
            raise ConfigError(f"shuffle is {shown(shuffle)}, expected {known}, True or False")
        self.shuffle = shuffle

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of one epoch, including a short last step."""
        return -(-self.count // self.global_batch)

    def order(self, epoch: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the indices `start` to `stop` - 1 in the order of `epoch` (a read-only array)."""
        first, last = 0, self.count
        stop = last if stop is None else stop
        if self.shuffle != "permutation":
            # The window of computed indices begins at a multiple of its length.
            first = start - start % _WINDOW
            last = max(stop, min(first + _WINDOW, self.count))
        key = (self.shuffle, epoch, first, last)
        if self._cached is None or self._cached[0] != key:
            if self.shuffle == "permutation":
                order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
            else:
                order = np.arange(first, last)
                if self.shuffle == "bijection":
                    order = Bijection(self.count, (self.seed, epoch))(order)
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
        """Return the part of the global batch `indices` that `rank` of `size` ranks uses.

        The part may be empty. Raises ConfigError if there is no such rank.
        """
        if not 0 <= rank < size:
            raise ConfigError(f"Sampler.local: rank {shown(rank)} of {shown(size)} ranks; expected "
                              "a rank from 0 to the number of ranks minus 1")  # fmt: skip
        start, stop = BlockPartition(len(indices), size).range(rank)
        return indices[start:stop]

    def local_batch(self, rank: int, size: int) -> int:
        """Return how many samples of a full global batch `rank` of `size` ranks uses."""
        return BlockPartition(min(self.global_batch, self.count), size).size(rank)

    def position(self, step: int) -> Position:
        """Return the position at which `step` begins, if the global batch never changes."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return Position(epoch, within * self.global_batch)
