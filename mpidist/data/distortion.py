"""Distorted copies of images, as a source: augmentation that no change of ranks can change.

    index of a sample      0 ... n-1   n ... 2n-1   2n ... 3n-1
    what it is             copy 0      copy 1       copy 2        (n images in the source)

Each index stands for one image turned, scaled and shifted by amounts that follow from (seed,
index) alone. So the data order stays what the sampler promises, and an epoch is one pass over
all copies: training 5 epochs on 8 copies costs what 40 epochs on the images would.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import ConfigError
from ..registry import build
from .sources import Source


class Distorted:
    """`copies` distorted versions of every image of a source.

    Parameters
    ----------
    source : Source
        The first array of its samples is images (n, channels, height, width), NumPy, floating
        point; the others, labels for instance, are passed on as they are.
    copies : int
        How many versions of every image, at least 1.
    shift : float
        Largest shift in pixels, each way.
    turn : float
        Largest turn in degrees, each way.
    scale : float
        Largest change of height and width, each by itself, as a share: 0.1 is 0.9 to 1.1.
    seed : int
        Seeds the amounts; no seed of a training run changes them.
    """

    def __init__(
        self,
        source: Source,
        copies: int,
        shift: float = 0.0,
        turn: float = 0.0,
        scale: float = 0.0,
        seed: int = 0,
    ):
        if isinstance(copies, bool) or not hasattr(copies, "__index__") or copies < 1:
            raise ConfigError(f"distortion: copies is {copies!r}, expected a whole number from 1")
        for name, value, limit in (("shift", shift, 1e3), ("turn", turn, 180), ("scale", scale, 1)):
            if not 0 <= value < limit:
                raise ConfigError(f"distortion: {name} is {value}, expected 0 <= {name} < {limit}")
        self.source, self.copies = source, int(copies)
        largest = np.array([shift, shift, np.deg2rad(turn), scale, scale], np.float32)
        rng = np.random.default_rng(seed)
        self._amounts = rng.uniform(-1, 1, (len(self), 5)).astype(np.float32) * largest

    def __len__(self) -> int:
        return self.copies * len(self.source)

    def take(self, indices) -> tuple:
        """Return the distorted samples at `indices`."""
        indices = np.asarray(indices)
        images, *others = self.source.take(indices % len(self.source))
        return distort(images, self._amounts[indices]), *others


def distorted(source: Source, settings: Mapping | None) -> Source:
    """Return `source`, or its distorted copies where `settings` has their keywords."""
    if not settings:
        return source
    return build({"distort": Distorted}, "distort", {"source": source, **settings}, "data option")


def distort(images: np.ndarray, amounts: np.ndarray) -> np.ndarray:
    """Return each image shifted (down, right), turned and scaled (height, width).

    A pixel of the result is read at its origin in the image, between the four pixels around it
    in proportion (bilinear), with zeros outside. Amounts of zero give the image back.
    """
    samples, channels, height, width = images.shape
    down, right, turn, tall, broad = (column[:, None, None] for column in amounts.T)
    # Coordinates of the result, from its middle; float32 is exact enough below 2^20 pixels.
    y = np.arange(height, dtype=np.float32)[:, None] - (height - 1) / 2 - down
    x = np.arange(width, dtype=np.float32)[None, :] - (width - 1) / 2 - right
    cos, sin = np.cos(turn), np.sin(turn)
    # One frame of zeros around, two on the far sides, for the neighbours of the last pixel.
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
