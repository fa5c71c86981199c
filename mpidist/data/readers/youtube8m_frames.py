"""Read frame-level features of YouTube-8M: visual and audio features of each second of a video.

    TFRecord files   SequenceExample   context: id, labels   feature_lists: rgb, audio
                     a video of 3      frames (5, 1024 + 128) uint8: 3, and 2 of zeros; 3; (3862,)

The second line shows a sample that is padded to 5 frames: an array with 3 frames and 2 frames of
zeros, the number 3, and a label for each of 3862 classes. Each byte of a frame stands for a number
from -2 to 2.

References: Abu-El-Haija et al., "YouTube-8M: a large-scale video classification benchmark", 2016,
arXiv:1609.08675; the function "Dequantize" in YouTube-8M's starter code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import BadRecord
from ...registry import checked_whole
from ..sources import Derived, Source
from . import example
from .youtube8m import CLASSES, Videos, YouTube8M, files, mark_entities, packed_span

#: Names and bytes of the features of a frame, in the order of a sample.
FRAME = {"rgb": 1024, "audio": 128}
#: A byte b of a feature means the number ``_SCALE * b + _BIAS``.
_SCALE, _BIAS = 4 / 255, 4 / 512 - 2


class YouTube8MFrames(Videos):
    """A source of videos: frames (uint8), the number of frames, and a 0 or 1 per entity (class).

    Parameters
    ----------
    paths : path-like, or sequence of path-like
        The TFRecord files with frame-level features.
    frames : int
        Number of frames of each sample. Longer videos are cut, and shorter videos are padded with
        zeros. The data set has at most 300 frames of a video, one per second.
    classes : int
        Number of entities (topics). A record with a label of `classes` or more is bad.
    features : mapping of name -> bytes
        Names of the feature lists of a frame, in order, and the bytes of each in one frame.
    """

    def __init__(
        self,
        paths,
        frames: int = 300,
        classes: int = CLASSES,
        features: Mapping[str, int] | None = None,
    ):
        checked_whole("youtube8m: frames", frames, 1)
        super().__init__(paths, classes)
        self.frames, self.features = frames, dict(FRAME if features is None else features)

    def take(self, indices) -> tuple:
        """Return frames (n, frames, bytes), frame counts int64 (n,), and labels (n, classes)."""
        indices = np.asarray(indices, np.int64)
        with self._lock:
            shape = len(indices), self.frames, sum(self.features.values())
            inputs = self._rooms.empty(shape, np.uint8)
            labels = self._rooms.empty((len(indices), self.classes), np.uint8)
            counts = np.zeros(len(indices), np.int64)
            for piece in self._pieces(len(indices)):
                self._decode(indices[piece], inputs[piece], counts[piece], labels[piece])
        return inputs, counts, labels

    def _decode(self, indices, inputs: np.ndarray, counts: np.ndarray, labels: np.ndarray) -> None:
        """Read the samples at `indices` into `inputs`, `counts` and `labels`."""
        records = self.records.lay(indices, self._room)
        spans = np.empty((len(indices), 2), np.int64)
        for k, (start, stop) in enumerate(zip(records.starts, records.stops, strict=True)):
            data = records.data[start:stop].tobytes()
            try:
                spans[k] = packed_span(example.layout(data), "labels", 3)
                counts[k] = self._frames(data, inputs[k])
            except ValueError as error:
                raise BadRecord(int(indices[k]), f"no frames of a video: {error}") from None
        mark_entities(records, spans + records.starts[:, None], indices, labels)

    def _frames(self, data: bytes, target: np.ndarray) -> int:
        """Write the frames of one record into `target`, and return their number."""
        lists, at, counts = example.feature_lists(data), 0, {}
        for name, width in self.features.items():
            if name not in lists:
                there = ", ".join(lists) or "none"
                raise ValueError(f"no list {name!r}; there are {there}")
            try:
                rows = example.byte_rows(data, lists[name], width)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            counts[name] = len(rows)
            target[: len(rows), at : at + width] = rows[: self.frames]
            at += width
        count = max(counts.values())
        if count != min(counts.values()) or not count:
            raise ValueError(f"lists of {counts} frames, expected equal numbers, at least one")
        target[count:] = 0
        return min(count, self.frames)


def mean_frames(frames: np.ndarray, counts: np.ndarray, labels: np.ndarray) -> tuple:
    """Return the mean of the frames of each video, and the labels.

    The means are a float32 array with a row for each video and a column for each byte of a frame;
    its values are from -2 to 2.

    Pass `mean_frames` to `Derived`, a source that computes its samples from another source.
    """
    means = frames.sum(axis=1, dtype=np.uint32) / np.maximum(counts, 1)[:, None]
    return (means * _SCALE + _BIAS).astype(np.float32), labels


def youtube8m(
    train: str | Sequence[str],
    test: str | Sequence[str],
    classes: int = CLASSES,
    frames: int | None = None,
) -> tuple[Source, Source]:
    """Return (train, test) sources from names of files, or patterns such as ``train*.tfrecord``.

    If `frames` is None, the files must have video-level records: one vector of features for each
    video. If it is a number, they must have frame-level records: features of each second of a
    video. A sample is then the mean of at most the first `frames` frames of a video.
    """

    def opened(patterns):
        if frames is None:
            return YouTube8M(files(patterns), classes)
        return Derived(YouTube8MFrames(files(patterns), frames, classes), mean_frames)

    return opened(train), opened(test)
