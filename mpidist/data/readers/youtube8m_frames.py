"""Frame-level features of YouTube-8M: what each second of a video looks and sounds like.

    TFRecord files   SequenceExample   context: id, labels   feature_lists: rgb, audio
                     a video of 3      frames (5, 1024 + 128) uint8: 3, and 2 of zeros; 3; (3862,)

A frame is 1,024 bytes of "rgb" and 128 of "audio", floats from -2 to 2 in 256 steps.

S. Abu-El-Haija et al., "YouTube-8M: a large-scale video classification benchmark", 2016,
arXiv:1609.08675; "Dequantize" in its starter code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import BadRecord, ConfigError, shown
from ..sources import Derived, Source
from . import example
from .youtube8m import CLASSES, Videos, YouTube8M, files, mark_entities, packed_span

#: Names and bytes of what a frame has, in the order of a sample.
FRAME = {"rgb": 1024, "audio": 128}
#: What a byte of a feature means: so much times it, and so much more.
_SCALE, _BIAS = 4 / 255, 4 / 512 - 2


class YouTube8MFrames(Videos):
    """Samples (frames uint8, counts, entities uint8 of 0 and 1) of TFRecord files.

    Parameters
    ----------
    paths : path-like, or sequence of them
    frames : int
        Of each sample: longer videos are cut, shorter ones are filled up with zeros; `counts` says
        how many are the video's. The data set has one a second, 300 at most.
    classes : int
        Entities; a record with a larger one is bad.
    features : mapping of name -> bytes
        Which lists a frame is made of, one after the other.
    """

    def __init__(
        self,
        paths,
        frames: int = 300,
        classes: int = CLASSES,
        features: Mapping[str, int] | None = None,
    ):
        if isinstance(frames, bool) or not isinstance(frames, int) or frames < 1:
            raise ConfigError(f"youtube8m: frames is {shown(frames)}, expected 1 or more")
        super().__init__(paths, classes)
        self.frames, self.features = frames, dict(FRAME if features is None else features)

    def take(self, indices) -> tuple:
        """Return frames (n, frames, bytes), counts int64 (n,) and entities (n, classes)."""
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
        """Put samples where they belong."""
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
        """Lay the frames of one record into `target`, and return how many there are."""
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
            raise ValueError(
                f"lists of {counts} frames, expected as many of each, and one at least"
            )
        target[count:] = 0
        return min(count, self.frames)


def mean_frames(frames: np.ndarray, counts: np.ndarray, labels: np.ndarray) -> tuple:
    """Return (mean over each video's frames, float32 (n, bytes), from -2 to 2; labels).

    For `Derived`: what the files of the video level have is such a mean.
    """
    means = frames.sum(axis=1, dtype=np.uint32) / np.maximum(counts, 1)[:, None]
    return (means * _SCALE + _BIAS).astype(np.float32), labels


def youtube8m(
    train: str | Sequence[str],
    test: str | Sequence[str],
    classes: int = CLASSES,
    frames: int | None = None,
) -> tuple[Source, Source]:
    """Return (train, test) of files, or patterns such as ``train*.tfrecord``.

    With `frames` the files are of the frame level, and a sample is the mean over so many.
    """

    def opened(patterns):
        if frames is None:
            return YouTube8M(files(patterns), classes)
        return Derived(YouTube8MFrames(files(patterns), frames, classes), mean_frames)

    return opened(train), opened(test)
