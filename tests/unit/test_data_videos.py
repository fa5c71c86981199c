"""A batch of videos has the values of its single records, with any mixture of records (R13, R42).

`data.YouTube8M` expects a record to have the byte layout of earlier records. The files here have
few and small features. Their records have any order of fields, equal lengths, unusual fields, or
damage from before or after the computation of the checksum. Plain Python code also decodes each
record alone, field by field.
"""

import io
import math
import struct

import numpy as np
import pytest
from hypothesis import example as also
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import data
from mpidist.data.readers import example, tfrecord
from mpidist.data.skip_bad import BadRecordFilter
from mpidist.errors import BadRecord

FEATURES, CLASSES = {"rgb": 3, "audio": 2}, 300
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: What is done to a record: most are left alone.
CHANGES = (
    "none none none one-by-one twice without nan wide negative endless flip flip cut grow checksum"
)


@st.composite
def videos(draw):
    """Return the bytes of a record, and whether its checksum is that of these bytes."""
    change = draw(st.sampled_from(CHANGES.split()))
    entries = {
        "id": [draw(st.binary(max_size=3))],
        "labels": np.array(draw(st.lists(st.integers(0, CLASSES - 1), max_size=3)), int),
        **{name: np.array(draw(_floats(width)), "<f4") for name, width in FEATURES.items()},
    }
    if draw(st.booleans()):
        entries["more"] = np.arange(draw(st.integers(0, 2)))
    one = draw(st.sampled_from(["labels", *FEATURES]))
    if change == "without":
        del entries[one]
    elif change == "nan":
        entries["rgb"][draw(st.integers(0, 2))] = draw(st.sampled_from([math.nan, -math.inf]))
    elif change == "wide":
        entries["audio"] = np.zeros(draw(st.integers(0, 4)), "<f4")
    elif change == "negative":
        entries["labels"] = np.array([1, draw(st.sampled_from([-1, CLASSES, 2**40]))])
    order = draw(st.permutations(list(entries)))
    record = example.encode_example({name: entries[name] for name in order})
    if change == "one-by-one":
        record += _entry("labels", 3, b"\x08\x05\x08\xac\x02")
    elif change == "twice":  # the last one counts, as in every map
        record += example.encode_example({one: entries[one][::-1]})
    elif change == "endless":
        record += _entry("labels", 3, example._field(1, b"\x05\x85" * draw(st.integers(1, 12))))
    elif change == "flip":
        at, bit = draw(st.integers(0, len(record) - 1)), draw(st.integers(0, 7))
        record = record[:at] + bytes([record[at] ^ 1 << bit]) + record[at + 1 :]
    elif change == "cut":
        record = record[: draw(st.integers(0, len(record) - 1))]
    elif change == "grow":
        record += draw(st.binary(min_size=1, max_size=4))
    return record, change != "checksum"


def _floats(width):
    return st.lists(FLOATS, min_size=width, max_size=width)


def _entry(name, kind, values):
    feature = example._field(2, example._field(kind, values))
    return example._field(1, example._field(1, example._field(1, name.encode()) + feature))


def alone(record):
    """Return (features, entities) of one record, or None if it is bad."""
    try:
        found = example.layout(record)
        row = [_values(record, found, name, width) for name, width in FEATURES.items()]
        numbers = _entities(record, found)
    except (ValueError, KeyError):
        return None
    row = np.concatenate(row)
    if not np.isfinite(row).all() or any(number >= CLASSES for number in numbers):
        return None
    return row, set(numbers)


def _packed(found, name, kind):
    got, parts = found[name]
    if got != kind or len(parts) > 1 or any(wire != 2 for wire, _ in parts):
        raise ValueError("not packed")
    return parts[0][1] if parts else (0, 0)


def _values(record, found, name, width):
    start, stop = _packed(found, name, 2)
    if stop - start != 4 * width:
        raise ValueError("another width")
    return np.frombuffer(record[start:stop], "<f4")


def _entities(record, found):
    at, stop = _packed(found, "labels", 3)
    numbers = []
    while at < stop:
        number, at = example.varint(record, at, stop)
        numbers.append(number)
    return numbers


def _file(records):
    """Return a TFRecord file; where the checksum is to be wrong, a bit of it is."""
    file, crc = io.BytesIO(), tfrecord._checksum()
    for record, whole in records:
        head = struct.pack("<Q", len(record))
        file.write(head + struct.pack("<I", tfrecord.masked(crc(head))))
        file.write(record + struct.pack("<I", tfrecord.masked(crc(record)) ^ (not whole)))
    return file.getvalue()


def _check(batch, expected):
    inputs, labels = batch
    assert inputs.dtype == np.float32
    assert inputs.shape == (len(expected), sum(FEATURES.values()))
    assert labels.shape == (len(expected), CLASSES)
    for row, entities, (features, numbers) in zip(inputs, labels, expected, strict=True):
        assert row.tobytes() == features.tobytes(), "not the same bits"
        assert set(np.flatnonzero(entities).tolist()) == numbers
        assert set(entities.tolist()) <= {0, 1}


def _twin(labels):
    entries = {"labels": labels, "rgb": np.ones(3, "<f4"), "audio": np.zeros(2, "<f4")}
    return example.encode_example(entries), True


TWINS = [_twin(np.array([299])), _twin(np.array([1, 2]))]
#: A number without an end, which would go on as the first one of the record after it.
ENDLESS = (TWINS[0][0] + _entry("labels", 3, example._field(1, b"\x85")), True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("videos") / "a"


BATCHES = given(
    records=st.lists(videos(), min_size=1, max_size=12),
    asked=st.lists(st.integers(0, 1000), max_size=24),
    piece=st.integers(1, 9),
    missing=st.just(0) | st.integers(1, 200),
)


@settings(max_examples=120, deadline=None)
@BATCHES
@also(records=TWINS * 3, asked=[0, 1, 2, 3, 4, 5], piece=2, missing=0)
@also(records=[ENDLESS, TWINS[1]], asked=[0, 1], piece=9, missing=0)
def test_a_batch_is_what_its_records_are_alone(path, **case):
    """R13, R42: the same arrays, bit for bit, and the same bad records, in any order and piece."""
    check_batch(path, **case)


@pytest.mark.exhaustive
@settings(max_examples=300, deadline=None)
@BATCHES
def test_many_batches(path, **case):
    check_batch(path, **case)


def check_batch(path, records, asked, piece, missing):
    whole = _file(records)
    missing = min(missing, len(records[-1][0]) + 15)
    path.write_bytes(whole[: len(whole) - missing])
    expected = [alone(record) if good else None for record, good in records]
    if missing:
        expected[-1] = None
    source = data.YouTube8M(path, CLASSES, FEATURES)
    source._piece = piece
    indices = np.array(asked, np.int64) % len(records)

    taken = BadRecordFilter(source).take(indices)
    kept = [place for place, k in enumerate(indices) if expected[k] is not None]
    assert taken.kept.tolist() == kept
    _check(taken.batch, [expected[k] for k in indices[kept]])
    assert [bad.index for bad in taken.bad] == [k for k in indices if expected[k] is None]

    # Without the bad ones nothing is taken one by one, of however many kinds they are.
    _check(source.take(indices[kept]), [expected[k] for k in indices[kept]])
    for index in set(indices) - set(indices[kept]):
        with pytest.raises((BadRecord, ValueError)):
            source.take([index])
    source.close()


def test_what_is_alike_is_decoded_once(path, monkeypatch):
    """Of 200 videos that differ in values, two are looked at field by field."""
    rng = np.random.default_rng(0)
    videos = [
        {
            "id": [rng.bytes(4)],
            "labels": rng.integers(128, CLASSES, 1 + k % 2),
            **{name: rng.standard_normal(width, np.float32) for name, width in FEATURES.items()},
        }
        for k in range(200)
    ]
    tfrecord.write(path, [example.encode_example(video) for video in videos])
    decoded, layout = [], example.layout
    monkeypatch.setattr(example, "layout", lambda record: decoded.append(1) or layout(record))
    inputs, labels = data.YouTube8M(path, CLASSES, FEATURES).take(np.arange(200))
    assert len(decoded) == 2
    for video, row, entities in zip(videos, inputs, labels, strict=True):
        np.testing.assert_array_equal(row, np.concatenate([video["rgb"], video["audio"]]))
        np.testing.assert_array_equal(np.flatnonzero(entities), np.unique(video["labels"]))
