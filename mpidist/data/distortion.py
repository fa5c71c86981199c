"""A data source of distorted copies of images, which are the same for any number of ranks.

    index of a sample      0 ... n-1   n ... 2n-1   2n ... 3n-1
    sample                 copy 0      copy 1       copy 2        (n images in the source)

Each index stands for one image, turned, scaled and shifted by amounts that depend only on (seed,
index).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..registry import build, checked_whole
from .sources import Source


@dataclass(eq=False, repr=False)
class Distorted:
    """A source that has several distorted versions of every image of another source.

    Parameters
    ----------
    source : Source
        The first array of its samples must be images: a NumPy array (n, channels, height, width) of
        a floating-point dtype. The other arrays, for instance labels, are not changed.
    copies : int
        Number of versions of every image, at least 1.
    shift : float
        Largest shift in pixels, in each direction.
    turn : float
        Largest rotation in degrees, in each direction.
    scale : float
        Largest relative change of the height and of the width: 0.1 means 0.9 to 1.1.
    seed : int
        Seed for the random amounts of shift, turn and scale.
    """

    source: Source
    copies: int
    shift: float = 0.0
    turn: float = 0.0
    scale: float = 0.0
    seed: int = 0

    def __post_init__(self):
        checked_whole("distortion: copies", self.copies, 1)
        for name, limit in (("shift", 1e3), ("turn", 180), ("scale", 1)):
            value = getattr(self, name)
            if not 0 <= value < limit:
                raise ConfigError(f"distortion: {name} is {value}, expected 0 <= {name} < {limit}")
        turn = np.deg2rad(self.turn)
        largest = np.array([self.shift, self.shift, turn, self.scale, self.scale], np.float32)
        rng = np.random.default_rng(self.seed)
        self._amounts = rng.uniform(-1, 1, (len(self), 5)).astype(np.float32) * largest

    def __len__(self) -> int:
        return self.copies * len(self.source)

    def take(self, indices) -> tuple:
        """Return the distorted samples at `indices`."""
        indices = np.asarray(indices)
        images, *others = self.source.take(indices % len(self.source))
        return distort(images, self._amounts[indices]), *others


def distorted(source: Source, settings: Mapping | None) -> Source:
    """Return a source of distorted copies of the images of `source`, or `source` itself.

    `settings` has the arguments of `Distorted`, or is None for no distortion.
    """
    if not settings:
        return source
    return build({"distort": Distorted}, "distort", {"source": source, **settings}, "data option")


def distort(images: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Return each image shifted, turned and scaled by its row of `amounts`.

    A row has the shift down and right in pixels, the turn in radians, and the relative change of
    height and width.
    """
    samples, channels, height, width = images.shape
    down, right, turn, tall, broad = (column[:, None, None] for column in amounts.T)
    # Coordinates of the result's pixels, counted from its middle. In float32 they are exact enough
    # for images of less than 2^20 pixels a side.
    y = np.arange(height, dtype=np.float32)[:, None] - (height - 1) / 2 - down
    x = np.arange(width, dtype=np.float32)[None, :] - (width - 1) / 2 - right
    cos, sin = np.cos(turn), np.sin(turn)
    # The image gets a border of zeros: one row above and one column on the left, and two each below
    # and on the right, because the last pixel reads its neighbours.
    top = np.clip((cos * y - sin * x) / (1 + tall) + (height + 1) / 2, 0, height + 1)
    left = np.clip((sin * y + cos * x) / (1 + broad) + (width + 1) / 2, 0, width + 1)
    framed = np.zeros((samples, channels, height + 3, width + 3), images.dtype)
    framed[:, :, 1 : height + 1, 1 : width + 1] = images
    count = height * width
    flat = framed.reshape(samples, channels, (height + 3) * (width + 3))
    row, col = top.astype(np.int64), left.astype(np.int64)
    low, side = (top - row).reshape(samples, 1, count), (left - col).reshape(samples, 1, count)
    corner = (row * (width + 3) + col).reshape(samples, 1, count)

    def pixels(offset: int) -> np.ndarray:
        return np.take_along_axis(flat, corner + offset, axis=2)

    upper = pixels(0) * (1 - side) + pixels(1) * side
    lower = pixels(width + 3) * (1 - side) + pixels(width + 4) * side
    return (upper * (1 - low) + lower * low).astype(images.dtype).reshape(images.shape)
