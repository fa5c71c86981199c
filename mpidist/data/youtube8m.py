"""Video-level features of YouTube-8M: what a video looks and sounds like, and its entities.

    TFRecord files   Example {id, labels, mean_rgb, mean_audio}   ->   (n, 1024 + 128), (n, 3862)

Most records are laid out like an earlier one of the same length: where the bytes between the
values are the same, the values lie at the same places, and nothing is decoded again.

S. Abu-El-Haija et al., "YouTube-8M: a large-scale video classification benchmark", 2016,
arXiv:1609.08675.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpidist.data import example
from mpidist.data.sources import Source
from mpidist.data.tfrecord import TFRecords
from mpidist.errors import BadRecord, ConfigError

#: Names and lengths of the features, in the order of a sample.
FEATURES = {"mean_rgb": 1024, "mean_audio": 128}
CLASSES = 3862


class _Layout(NamedTuple):
    """Where the values of a record lie, and what lies between them: (start, stop, bytes)."""

    features: list[example.Span]
    labels: example.Span
    frame: tuple[tuple[int, int, bytes], ...]


class YouTube8M:
    """Samples (features float32, entities uint8 of 0 and 1) of TFRecord files. Local.

    Parameters
    ----------
    paths : path-like, or sequence of them
    classes : int
        Entities; a record with a larger one is bad.
    features : mapping of name -> length
        Which float features a sample is made of, one after the other.
    """

    reads = True

    def __init__(self, paths, classes: int = CLASSES, features: Mapping[str, int] | None = None):
        self.records = TFRecords(paths)
        self.classes, self.features = classes, dict(FEATURES if features is None else features)
        # Where each feature begins in the bytes of a sample.
        widths = list(self.features.values())
        self._columns = [4 * sum(widths[:k]) for k in range(len(widths))]
        self._layouts: dict[int, _Layout] = {}
        more = f" and {len(self.records.paths) - 1} more" if len(self.records.paths) > 1 else ""
        self.name = self.records.paths[0] + more

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices) -> tuple:
        """Return the samples at `indices`; BadRecord for one that cannot be decoded."""
        indices = np.asarray(indices, np.int64)
        records = self.records.read(indices)
        inputs = np.empty((len(records), sum(self.features.values())), "<f4")
        # Copied as bytes: they need not lie at multiples of four in a record.
        room = inputs.view(np.uint8)
        labels = np.zeros((len(records), self.classes), np.uint8)
        texts = []
        for k, data in enumerate(records):
            try:
                layout = self._layout(data)
            except ValueError as error:
                raise BadRecord(int(indices[k]), f"no video: {error}") from None
            for (low, high), start in zip(layout.features, self._columns, strict=True):
                room[k, start : start + high - low] = np.frombuffer(data, np.uint8, high - low, low)
            texts.append(data[slice(*layout.labels)])
        self._entities(texts, indices, labels)
        with np.errstate(invalid="ignore", over="ignore"):
            broken = np.flatnonzero(~np.isfinite(inputs.sum(axis=1)))
        if len(broken):
            raise BadRecord(int(indices[broken[0]]), "a feature is not finite")
        return inputs, labels

    def _entities(self, texts: list[bytes], indices: np.ndarray, labels: np.ndarray) -> None:
        """Set the entities of all records, whose varints are `texts`."""
        lengths = np.array([len(text) for text in texts], np.int64)
        flat = np.frombuffer(b"".join(texts), np.uint8)
        open_ended = [k for k, text in enumerate(texts) if text and text[-1] > 127]
        if open_ended:
            raise BadRecord(int(indices[open_ended[0]]), "no video: a number has no end")
        numbers, starts = example.varints(flat)
        owners = np.repeat(np.arange(len(texts)), lengths)[starts]
        wrong = (numbers < 0) | (numbers >= self.classes)
        if wrong.any():
            index, number = int(indices[owners[wrong][0]]), numbers[wrong][0]
            raise BadRecord(index, f"entity {number} of {self.classes}")
        labels[owners, numbers] = 1

    def _layout(self, data: bytes) -> _Layout:
        """Return where the values of a record lie: as in an earlier one, or decoded."""
        known = self._layouts.get(len(data))
        if known is not None and all(data[a:b] == text for a, b, text in known.frame):
            return known
        found = example.layout(data)
        spans = []
        for name, width in self.features.items():
            span = _packed(found, name, 2)
            if span[1] - span[0] != 4 * width:
                raise ValueError(f"{name} has {(span[1] - span[0]) // 4} numbers, not {width}")
            spans.append(span)
        labels = _packed(found, "labels", 3)
        names = [span for kind, parts in found.values() if kind == 1 for _, span in parts]
        frame, at = [], 0
        for low, high in sorted([*spans, labels, *names, (len(data), len(data))]):
            if low < at and high > low:
                raise ValueError("values overlap")
            if low > at:
                frame.append((at, low, data[at:low]))
            at = max(at, high)
        self._layouts[len(data)] = _Layout(spans, labels, tuple(frame))
        return self._layouts[len(data)]

    def ids(self, indices) -> list[str]:
        """Return the videos' names."""
        found = []
        for data in self.records.read(indices):
            entries = example.layout(data)
            kind, parts = entries.get("id") or entries.get("video_id") or (1, [])
            found.append(b"".join(example.values(data, kind, parts)).decode("utf-8", "replace"))
        return found

    def close(self) -> None:
        """Close the files."""
        self.records.close()


def _packed(found: Mapping, name: str, kind: int) -> example.Span:
    """Where the values of a feature lie in one piece; an empty span where it has none."""
    got, parts = found.get(name, (0, []))
    if got != kind or len(parts) > 1 or any(wire != 2 for wire, _ in parts):
        there = ", ".join(found) or "nothing"
        raise ValueError(f"no packed {name!r} of the right type; there are {there}")
    return parts[0][1] if parts else (0, 0)


def youtube8m(
    train: str | Sequence[str], test: str | Sequence[str], classes: int = CLASSES
) -> tuple[Source, Source]:
    """Return (train, test) of files, or patterns such as ``train*.tfrecord``. Local."""
    return YouTube8M(files(train), classes), YouTube8M(files(test), classes)


def files(patterns: str | os.PathLike | Sequence) -> list[str]:
    """Return the files of a pattern, or of several, sorted. Local.

    Raises ConfigError where a pattern matches nothing.
    """
    given = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    found: list[str] = []
    for pattern in given:
        matching = sorted(glob.glob(os.fspath(pattern)))  # noqa: PTH207 (it may be absolute)
        if not matching:
            raise ConfigError(f"no file matches {os.fspath(pattern)!r}")
        found += matching
    return found
