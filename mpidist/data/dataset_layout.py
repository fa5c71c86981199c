"""How messages of one kind lie in memory: decoded once, and then known by what never differs.

    message    | key "rgb" length | values ... | key "labels" length | values |
    frame        ^^^^^^^^^^^^^^^^^               ^^^^^^^^^^^^^^^^^^^^     equal: values as before

Where two messages have the same length and the same bytes between their values, keys and lengths
among them, their values lie at the same places. That is compared for a whole batch at once, eight
bytes at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from .readers.example import Span

#: Layouts that are remembered; files of more would only look for them.
_MOST = 2048


class Layouts:
    """The layouts of messages that were met so far.

    Attributes
    ----------
    latest : dict
        Length of a message -> number of the layout that one so long had last.
    spans : array (layouts, count, 2)
        Where the values begin and end. Layout 0 is none.
    """

    def __init__(self, count: int):
        self._count = count
        self._begin()

    def _begin(self) -> None:
        self.latest: dict[int, int] = {}
        self._of_length: dict[int, list[int]] = {}
        self.spans = np.zeros((1, self._count, 2), np.int64)
        # Eight bytes before a message there are always, and no word is 1 where nothing counts.
        self._words = np.full((1, 1), -8)
        self._masks, self._frame = np.zeros((1, 1), "<u8"), np.ones((1, 1), "<u8")

    def kinds(self, lengths: np.ndarray) -> np.ndarray:
        """Return the number of the layout that a message of each length had last, or 0."""
        numbers = map(self.latest.get, lengths.tolist(), itertools.repeat(0))
        return np.fromiter(numbers, np.int64, len(lengths))

    def unlike(self, gather: Callable, starts: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """Return which of the messages at `starts` are not of the layout with that number.

        ``gather(dtype, places)`` returns a value from each byte place; there are at least eight
        bytes before each message.
        """
        words = gather("<u8", starts[:, None] + self._words.take(kinds, axis=0))
        words &= self._masks.take(kinds, axis=0)
        return np.flatnonzero((words != self._frame.take(kinds, axis=0)).any(axis=1))

    def of(self, data: bytes, decoded: Callable[[bytes], tuple]) -> np.ndarray:
        """Return the spans of one message: of another layout of its length, or as `decoded` says.

        ``decoded(data)`` returns (spans of the values, spans of all that may differ).
        """
        padded = np.frombuffer(bytes(8) + data, np.uint8)

        def gather(dtype, places):
            return np.ndarray((len(data) + 1,), dtype, padded, 0, (1,))[places]

        known = np.array(self._of_length.get(len(data), []), np.int64)
        unlike = self.unlike(gather, np.full(len(known), 8), known)
        alike = np.delete(known, unlike)
        if len(alike):
            self.latest[len(data)] = int(alike[0])
            return self.spans[alike[0]]
        spans, loose = decoded(data)
        self._add(data, spans, loose)
        return self.spans[-1]

    def _add(self, data: bytes, spans: Sequence[Span], loose: Sequence[Span]) -> None:
        words, masks, frame = [-8], [0], [0]  # there may be nothing between the values
        for low, high in between(loose, len(data)):
            # From the end backwards, so that no word ends beyond the message.
            for stop in range(high, low, -8):
                text = data[max(low, stop - 8) : stop]
                words.append(stop - 8)
                masks.append(int.from_bytes(b"\xff" * len(text)) << 8 * (8 - len(text)))
                frame.append(int.from_bytes(text, "little") << 8 * (8 - len(text)))
        if len(self.spans) >= _MOST:
            self._begin()
        number = len(self.spans)
        self.spans = np.concatenate([self.spans, np.array([spans], np.int64)])
        self._words = _under(self._words, np.array(words, np.int64))
        self._masks = _under(self._masks, np.array(masks, "<u8"))
        self._frame = _under(self._frame, np.array(frame, "<u8"))
        self.latest[len(data)] = number
        self._of_length.setdefault(len(data), []).append(number)


def between(spans: Sequence[Span], stop: int) -> list[Span]:
    """Return what lies before, between and behind `spans`; ValueError where they overlap."""
    gaps, at = [], 0
    for low, high in sorted([*spans, (stop, stop)]):
        if low < at and high > low:
            raise ValueError("values overlap")
        if low > at:
            gaps.append((at, low))
        at = max(at, high)
    return gaps


def _under(rows: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return the rows with one more, all as long as the longest: their last is said again."""
    width = max(rows.shape[1], len(row))
    padded = [np.pad(r, ((0, 0), (0, width - r.shape[1])), "edge") for r in (rows, row[None])]
    return np.concatenate(padded)
