"""Read video-level records of YouTube-8M: visual and audio features of a video, and its labels.

    TFRecord files   Example {id, labels, mean_rgb, mean_audio}   ->   (n, 1024 + 128), (n, 3862)

The labels of a video are the indices of its entities, which are topics.

Reference: S. Abu-El-Haija et al., "YouTube-8M: a large-scale video classification benchmark", 2016,
arXiv:1609.08675.
"""

from __future__ import annotations

import glob
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...errors import BadRecord, ConfigError
from ...partition import pieces
from ..byte_runs import Rooms
from ..message_layouts import Layouts
from . import example
from .tfrecord import Laid, TFRecords

#: Names and lengths of the features, in the order of a sample.
FEATURES = {"mean_rgb": 1024, "mean_audio": 128}
CLASSES = 3862
#: Bytes of records that are decoded together.
_PIECE = 4 << 20
#: Bytes of values that are copied together, few enough to stay in a cache until the next copy.
_STRIP = 192 << 10


class Videos:
    """Base class of the sources that read TFRecord files of videos."""

    reads = finite = True

    def __init__(self, paths, classes: int):
        self.records, self.classes = TFRecords(paths), classes
        # Records are read and decoded in pieces. Each piece has a fixed cost as high as the cost of
        # sixty records, so a piece is large. But a piece is small enough for its bytes to stay in a
        # cache until they are decoded.
        mean = -(-self.records.nbytes // max(1, len(self)))
        self._piece = max(1, _PIECE // max(1, mean))
        self._room = np.empty(2 * _PIECE, np.uint8)
        self._rooms, self._lock = Rooms(), threading.Lock()
        more = f" and {len(self.records.paths) - 1} more" if len(self.records.paths) > 1 else ""
        self.name = self.records.paths[0] + more

    def __len__(self) -> int:
        return len(self.records)

    def _pieces(self, count: int) -> Iterator[slice]:
        return itertools.starmap(slice, pieces(0, count, self._piece))

    def ids(self, indices) -> list[str]:
        """Return the identifiers of the videos at `indices`."""
        found = []
        for data in self.records.read(indices):
            entries = example.layout(data)
            kind, parts = entries.get("id") or entries.get("video_id") or (1, [])
            found.append(b"".join(example.values(data, kind, parts)).decode("utf-8", "replace"))
        return found

    def close(self) -> None:
        """Close all TFRecord files of this source."""
        self.records.close()


class YouTube8M(Videos):
    """Samples of files with features of whole videos.

    A sample has float32 features, and a label that is a uint8 number for each entity (topic): 1 if
    the video has this entity, otherwise 0.

    Parameters
    ----------
    paths : path-like, or sequence of path-like
        The TFRecord files with video-level features.
    classes : int
        Number of entities (topics). A record with an entity number of `classes` or more is bad.
    features : mapping of name -> length
        Names and lengths of the float features of a sample, in order.
    """

    def __init__(self, paths, classes: int = CLASSES, features: Mapping[str, int] | None = None):
        super().__init__(paths, classes)
        self.features = dict(FEATURES if features is None else features)
        # The bytes of a sample: all features one after the other.
        self._row = np.dtype([(name, f"V{4 * width}") for name, width in self.features.items()])
        self._layouts = Layouts(len(self.features) + 1)

    def take(self, indices) -> tuple:
        """Return the samples at `indices`. Raises BadRecord for a record that cannot be decoded."""
        indices = np.asarray(indices, np.int64)
        with self._lock:
            inputs = self._rooms.empty((len(indices), sum(self.features.values())), "<f4")
            labels = self._rooms.empty((len(indices), self.classes), np.uint8)
            for piece in self._pieces(len(indices)):
                self._decode(indices[piece], inputs[piece], labels[piece])
        return inputs, labels

    def _decode(self, indices: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> None:
        """Read the samples at `indices` into `inputs` and `labels`."""
        records = self.records.lay(indices, self._room)
        # Begin and end of the features and of the entities of each record.
        spans = self._spans(records, indices) + records.starts[:, None, None]
        # Values are copied as bytes, because their places need not be multiples of four.
        for k, name in enumerate(self.features):
            values = inputs.view(self._row)[name][:, 0]
            few = max(1, _STRIP // max(1, values.itemsize))
            for first in range(0, len(indices), few):
                strip = slice(first, first + few)
                values[strip] = records.gather(values.dtype, spans[strip, k, 0])
        mark_entities(records, spans[:, -1], indices, labels)
        if not np.isfinite(inputs).all():
            first = int(np.flatnonzero(~np.isfinite(inputs).all(axis=1))[0])
            raise BadRecord(int(indices[first]), "a feature is not finite")

    def _spans(self, records: Laid, indices: np.ndarray) -> np.ndarray:
        """Return the (begin, end) of the values in each record, counted from its first byte."""
        kinds = self._layouts.kinds(records.stops - records.starts)
        spans = self._layouts.spans.take(kinds, axis=0)
        for place in self._layouts.unlike(records.gather, records.starts, kinds).tolist():
            data = records.data[records.starts[place] : records.stops[place]].tobytes()
            try:
                spans[place] = self._layouts.of(data, self._decoded)
            except ValueError as error:
                raise BadRecord(int(indices[place]), f"no video: {error}") from None
        return spans

    def _decoded(self, data: bytes) -> tuple[list[example.Span], list[example.Span]]:
        """Return the (begin, end) of features and labels, and of all bytes that may vary."""
        found = example.layout(data)
        spans = []
        for name, width in self.features.items():
            span = packed_span(found, name, 2)
            if span[1] - span[0] != 4 * width:
                raise ValueError(f"{name} has {(span[1] - span[0]) // 4} numbers, not {width}")
            spans.append(span)
        spans.append(packed_span(found, "labels", 3))
        names = [span for kind, parts in found.values() if kind == 1 for _, span in parts]
        return spans, [*spans, *names]


def mark_entities(records: Laid, spans: np.ndarray, indices, labels: np.ndarray) -> None:
    """Set `labels` to 1 for the entities (topics) of each video, and to 0 for all others.

    Raises BadRecord for an entity number that is too large.
    """
    labels[...] = 0
    starts, stops = spans.T
    lengths = stops - starts
    open_ended = (lengths > 0) & (records.data[stops - 1] > 127)
    if open_ended.any():
        first = int(np.flatnonzero(open_ended)[0])
        raise BadRecord(int(indices[first]), "no video: a number is incomplete")
    owners = np.repeat(np.arange(len(indices)), lengths)
    shifts = stops - np.cumsum(lengths)
    flat = records.data[np.arange(len(owners)) + shifts[owners]]
    numbers, begins = example.varints(flat)
    owners = owners[begins]
    wrong = (numbers < 0) | (numbers >= labels.shape[1])
    if wrong.any():
        index, number = int(indices[owners[wrong][0]]), numbers[wrong][0]
        raise BadRecord(index, f"entity {number} of {labels.shape[1]}; the first is 0")
    labels[owners, numbers] = 1


def packed_span(found: Mapping, name: str, kind: int) -> example.Span:
    """Return the (begin, end) in bytes of a feature's values; both are equal if there are none.

    A feature is packed if all its values are in one run of bytes. Raises ValueError if the feature
    is missing, has another type than `kind`, or is not packed.
    """
    got, parts = found.get(name, (0, []))
    if got != kind or len(parts) > 1 or any(wire != 2 for wire, _ in parts):
        there = ", ".join(found) or "nothing"
        raise ValueError(f"no packed {name!r} of the right type; there are {there}")
    return parts[0][1] if parts else (0, 0)


def files(patterns: str | os.PathLike | Sequence) -> list[str]:
    """Return the files that match one or several patterns; the files of each pattern are sorted.

    Raises ConfigError if a pattern matches no file.
    """
    given = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    found: list[str] = []
    for pattern in given:
        matching = sorted(glob.glob(os.fspath(pattern)))  # noqa: PTH207 (it may be absolute)
        if not matching:
            raise ConfigError(f"no file matches {os.fspath(pattern)!r}")
        found += matching
    return found
