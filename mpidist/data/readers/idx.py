"""Read images and labels in MNIST's IDX format, plain or compressed by gzip.

A file has two zero bytes, a code for the type (8: unsigned byte), the number of dimensions, the
length of each dimension as a big-endian integer of 4 bytes, and the values.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from ...errors import ConfigError
from ..distortion import distorted
from ..sources import ArraySource, Source, check_split

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTE = 8


def idx(
    images_path: str | os.PathLike,
    labels_path: str | os.PathLike,
    train: int = 8000,
    distort: Mapping | None = None,
) -> tuple[Source, ArraySource]:
    """Return (train, test) sources: the first `train` samples, and all others.

    Images are float32 (n, 1, height, width) from 0 to 1, and labels are int64. `distort` has
    keyword arguments for `Distorted`, which makes distorted copies of the training images.

    Raises
    ------
    ConfigError
        When a file is missing, damaged or not IDX, when the two files have different numbers of
        samples, or when no sample is left for the test set.

    References
    ----------
    Y. LeCun, C. Cortes, C. J. C. Burges, The MNIST database of handwritten digits.
    """
    images = read_idx(images_path, dimensions=3)
    labels = read_idx(labels_path, dimensions=1)
    if len(images) != len(labels):
        raise ConfigError(
            f"idx: {len(images)} images in {images_path} but {len(labels)} labels in {labels_path}"
        )
    check_split("idx", train, len(images), images_path)
    pixels = images[:, None].astype(np.float32)
    pixels /= 255
    classes = labels.astype(np.int64)
    return (
        distorted(ArraySource(pixels[:train], classes[:train]), distort),
        ArraySource(pixels[train:], classes[train:]),
    )


def read_idx(path: str | os.PathLike, dimensions: int) -> np.ndarray:
    """Return the bytes that an IDX file holds, as a read-only uint8 array of `dimensions` axes."""
    data = _content(Path(path))
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise ConfigError(f"{path}: {len(data)} bytes, expected at least the {header} of a header")
    zeros, code, found = struct.unpack(">HBB", data[:4])
    if zeros or code != _UNSIGNED_BYTE or found != dimensions:
        magic = int.from_bytes(data[:4], "big")
        raise ConfigError(
            f"{path}: begins with 0x{magic:08x}, expected 0x{_UNSIGNED_BYTE:06x}{dimensions:02x}: "
            f"an IDX file of unsigned bytes in {dimensions} dimension{'s'[: dimensions > 1]}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected = header + math.prod(shape)
    if len(data) != expected:
        state = "truncated" if len(data) < expected else "longer than its header says"
        raise ConfigError(
            f"{path}: {state}: {len(data)} bytes, expected {expected} for {shape}; fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"no such file: {path} (from {Path.cwd()}); in a job file give the paths of "
            "MNIST's files with --set data.images_path=... --set data.labels_path=..."
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not raw.startswith(_GZIP):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise ConfigError(
            f"{path}: damaged or truncated gzip ({error}): {_missing(raw)}; fetch it again"
        ) from None


def _missing(raw: bytes) -> str:
    """Return a text with the numbers of decompressed and of expected bytes of a damaged file."""
    got = b""
    with suppress(zlib.error):
        got = zlib.decompressobj(wbits=31).decompress(raw)
    count = got[3] if len(got) > 3 else 0
    header = 4 + 4 * count
    if not count or len(got) < header:
        return f"{len(got)} bytes could be unpacked, not even a header"
    expected = header + math.prod(struct.unpack(f">{count}I", got[4:header]))
    return f"{len(got)} bytes could be unpacked, expected {expected}"
