"""Remember where values lie in Protocol Buffers messages; similar messages need no decoding.

    message    | key "rgb" length | values ... | key "labels" length | values |
    frame        ^^^^^^^^^^^^^^^^^               ^^^^^^^^^^^^^^^^^^^^     equal bytes: known layout

The frame of a message is all its bytes that are not values: the keys and lengths of its fields. If
two messages have the same length and equal frames, their values are at the same positions, which
are called the layout of the message.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from .readers.example import Span

#: The largest number of layouts that are remembered. Searching among more layouts would be slow.
_MOST = 2048


class Layouts:
    """The layouts of the messages seen so far; a layout says where in a message its values are.

    Attributes
    ----------
    latest : dict
        Length of a message in bytes -> number of the layout of the last message of that length.
    spans : array (layouts, count, 2)
        Begin and end of each value in a message, for each layout. Layout 0 means an unknown layout.
    """

    def __init__(self, count: int):
        self._count = count
        self._begin()

    def _begin(self) -> None:
        self.latest: dict[int, int] = {}
        self._of_length: dict[int, list[int]] = {}
        self.spans = np.zeros((1, self._count, 2), np.int64)
        # Layout 0 matches no message: a word with mask 0 is 0, and its expected value is 1. Eight
        # bytes before each message can always be read.
        self._words = np.full((1, 1), -8)
        self._masks, self._frame = np.zeros((1, 1), "<u8"), np.ones((1, 1), "<u8")

    def kinds(self, lengths: np.ndarray) -> np.ndarray:
        """Guess the layout of each message from its length; return the numbers of the layouts.

        The layout of a message is where its values are. The guess is the layout of the last message
        of the same length, or 0 (unknown) if the length is new.
        """
        numbers = map(self.latest.get, lengths.tolist(), itertools.repeat(0))
        return np.fromiter(numbers, np.int64, len(lengths))

    def unlike(self, gather: Callable, starts: np.ndarray, kinds: np.ndarray) -> np.ndarray:
        """Return the indices of the messages whose layout is not the one that `kinds` supposes.

        For each message, `kinds` has the number of a layout, and `starts` its position in a buffer.
        ``gather(dtype, places)`` must return a value of `dtype` from each position, and must accept
        positions up to eight bytes before a message.
        """
        words = gather("<u8", starts[:, None] + self._words.take(kinds, axis=0))
        words &= self._masks.take(kinds, axis=0)
        return np.flatnonzero((words != self._frame.take(kinds, axis=0)).any(axis=1))

    def of(self, data: bytes, decoded: Callable[[bytes], tuple]) -> np.ndarray:
        """Return where the values lie in the message `data`, as spans (begin, end).

        For an unknown layout, ``decoded(data)`` is called. It must return two lists of spans: those
        of the values, and those of all bytes that may differ between messages with this layout.
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
        words, masks, frame = [-8], [0], [0]  # a first word with mask 0, which always matches
        for low, high in between(loose, len(data)):
            # The words of a frame are cut from its end backwards, so that no word extends beyond
            # the message.
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
    """Return the gaps in the range from 0 to `stop` that none of the `spans` covers.

    Raises ValueError if two spans overlap.
    """
    gaps, at = [], 0
    for low, high in sorted([*spans, (stop, stop)]):
        if low < at and high > low:
            raise ValueError("values overlap")
        if low > at:
            gaps.append((at, low))
        at = max(at, high)
    return gaps


def _under(rows: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Append a row to a matrix; the narrower of the two is widened by repeating its last column."""
    width = max(rows.shape[1], len(row))
    padded = [np.pad(r, ((0, 0), (0, width - r.shape[1])), "edge") for r in (rows, row[None])]
    return np.concatenate(padded)
