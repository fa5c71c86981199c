"""Images and labels in MNIST's IDX format, plain or gzip.

A file is: two zero bytes, a code of the type (8: unsigned byte), the number of dimensions, each
dimension as a big-endian 4-byte integer, then the values. Nothing else may follow, and nothing
may be missing: a file of any other length is refused, never read in part.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Mapping
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
    """Return (train, test): the first `train` samples and the others.

    Images are float32 (n, 1, height, width) from 0 to 1, labels int64. `distort` are keywords of
    `Distorted`, for the training images only.

    Raises
    ------
    ConfigError
        If a file is missing, is not IDX, or holds more or fewer bytes than its header says; if
        the files differ in their number of samples; if `train` leaves no test samples.

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
    """Return the unsigned bytes of an IDX file with that many dimensions, read-only."""
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
        raise ConfigError(f"no such file: {path} (from {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if not raw.startswith(_GZIP):
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        # What could be unpacked still says how much is missing.
        got = _partial(raw)
        raise ConfigError(
            f"{path}: damaged or truncated gzip ({error}): {_missing(got)}; fetch it again"
        ) from None


def _partial(raw: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(raw)
    except zlib.error:
        return b""


def _missing(got: bytes) -> str:
    """How many bytes an unpacked piece has and how many its own header promises."""
    count = got[3] if len(got) > 3 else 0
    header = 4 + 4 * count
    if not count or len(got) < header:
        return f"{len(got)} bytes could be unpacked, not even a header"
    expected = header + math.prod(struct.unpack(f">{count}I", got[4:header]))
    return f"{len(got)} bytes could be unpacked, expected {expected}"
