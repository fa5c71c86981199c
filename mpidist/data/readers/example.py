"""Decode tf.train.Example and SequenceExample without a library, with checks of every length.

    Example   1: Features   1: map entry   1: name   2: Feature   1 bytes | 2 floats | 3 integers
    each of the last three                                        1: values, packed or one by one
    SequenceExample         1: Features, its context              2: FeatureLists
    FeatureLists            1: map entry   1: name   2: FeatureList           1: Feature, repeated

Both are messages of Protocol Buffers. A message is a sequence of fields, and a field is a key,
``number << 3 | kind``, followed by a value. An unknown kind, or a length beyond the end of the
message, raises a ValueError.

References: Protocol Buffers, "Encoding"; tensorflow/core/example/{example,feature}.proto.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Span = tuple[int, int]
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3


def varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return the value of the varint at position `at`, and the position after it."""
    value = shift = 0
    while at < stop and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("a number is incomplete")


def fields(data: bytes, span: Span) -> Iterator[tuple[int, int, Span]]:
    """Yield (number, kind, span of the value) for each field of a Protocol Buffers message.

    The argument `span` says where the message lies in `data`. A span is a (begin, end) in bytes.
    """
    at, stop = span
    while at < stop:
        key, at = varint(data, at, stop)
        number, kind = key >> 3, key & 7
        start = at
        if kind == 0:
            _, at = varint(data, at, stop)
        elif kind == 2:
            length, start = varint(data, at, stop)
            at = start + length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        if at > stop:
            raise ValueError("a field is longer than its message")
        yield number, kind, (start, at)


def layout(data: bytes) -> dict[str, tuple[int, list[tuple[int, Span]]]]:
    """Return a dict: name of a feature -> (type, [(kind, span) of each value]).

    The type says whether the values are bytes (1), floats (2) or integers (3). The kind of a value
    says how it is encoded. A span is the (begin, end) of a value in `data`.
    """
    found: dict[str, tuple[int, list[tuple[int, Span]]]] = {}
    for name, feature in _entries(data, 1):
        for number, kind, values in fields(data, feature):
            if kind == 2 and number in (_BYTES, _FLOATS, _INTEGERS):
                found[name] = number, [(k, span) for _, k, span in _of(data, values, 1, None)]
    return found


def feature_lists(data: bytes) -> dict[str, Span]:
    """Return a dict: name of each FeatureList of a SequenceExample -> its (begin, end) in bytes."""
    return dict(_entries(data, 2))


def byte_rows(data: bytes, span: Span, width: int) -> np.ndarray:
    """Return a FeatureList of n Features of `width` bytes each, as a uint8 array (n, width)."""
    # The usual writers put the same few bytes before each row, so the rows are one array.
    head = _field(1, _field(1, _field(1, bytes(width))))[:-width]
    flat = np.frombuffer(data, np.uint8)[slice(*span)]
    if len(flat) % (len(head) + width) == 0:
        rows = flat.reshape(-1, len(head) + width)
        if (rows[:, : len(head)] == np.frombuffer(head, np.uint8)).all():
            return rows[:, len(head) :]
    found: list[np.ndarray] = []
    for _, _, feature in _of(data, span, 1):
        parts = [part for _, _, some in _of(data, feature, _BYTES) for part in _of(data, some, 1)]
        lengths = [stop - start for _, _, (start, stop) in parts]
        if lengths != [width]:
            raise ValueError(f"row {len(found)} has {lengths} bytes, not {width}")
        found.append(np.frombuffer(data, np.uint8, width, parts[0][2][0]))
    return np.stack(found)


def _entries(data: bytes, number: int) -> Iterator[tuple[str, Span]]:
    """Yield, for each entry of the map in field `number`, its name and the span of its value."""
    for _, _, entries in _of(data, (0, len(data)), number):
        for _, _, entry in _of(data, entries, 1):
            name, value = "", (0, 0)
            for key, kind, span in fields(data, entry):
                if kind == 2 and key == 1:
                    name = data[slice(*span)].decode("utf-8")
                elif kind == 2 and key == 2:
                    value = span
            yield name, value


def _of(data: bytes, span: Span, number: int, kind: int | None = 2):
    return (f for f in fields(data, span) if f[0] == number and kind in (None, f[1]))


def values(data: bytes, kind_of_list: int, parts: list[tuple[int, Span]]):
    """Return a record field's decoded values: a list of bytes, or an array of float32 or int64."""
    if kind_of_list == _BYTES:
        return [data[slice(*span)] for _, span in parts]
    text = b"".join(data[slice(*span)] for _, span in parts)
    if kind_of_list == _FLOATS:
        if len(text) % 4:
            raise ValueError("floats that are not four bytes each")
        return np.frombuffer(text, "<f4")
    return varints(np.frombuffer(text, np.uint8))[0]


def varints(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of successive varints as int64, and the position where each begins."""
    ends = np.flatnonzero(flat < 128)
    if not len(flat):
        return np.empty(0, np.int64), ends
    if not len(ends) or ends[-1] != len(flat) - 1:
        raise ValueError("a number is incomplete")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a number has more than 64 bits")
    place = np.arange(len(flat)) - np.repeat(starts, lengths)
    bits = (flat & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).astype(np.int64), starts


def encode_example(features: dict) -> bytes:
    """Return an encoded Example of features: lists of bytes, or arrays of floats or integers."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, list):
            kind, text = _BYTES, b"".join(_field(1, part) for part in value)
        elif np.asarray(value).dtype.kind == "f":
            kind, text = _FLOATS, _field(1, np.asarray(value, "<f4").tobytes())
        else:
            numbers = b"".join(_varint(int(v) & (1 << 64) - 1) for v in np.asarray(value))
            kind, text = _INTEGERS, _field(1, numbers)
        entries += _field(1, _field(1, name.encode()) + _field(2, _field(kind, text)))
    return _field(1, entries)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, text: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(text)) + text
