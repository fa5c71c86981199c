"""TFRecord files of YouTube-8M's videos, with files made by the tests (R13)."""

import sys
from pathlib import Path

import numpy as np
import pytest

from mpidist import data
from mpidist.data.readers import example, tfrecord
from mpidist.data.readers.youtube8m import files
from mpidist.data.skip_bad import BadRecordFilter
from mpidist.errors import ConfigError

RNG = np.random.default_rng(0)
COUNT, CLASSES = 60, 3862
RGB = RNG.standard_normal((COUNT, 1024)).astype(np.float32)
AUDIO = RNG.standard_normal((COUNT, 128)).astype(np.float32)
LABELS = [RNG.choice(CLASSES, RNG.integers(0, 6), replace=False) for _ in range(COUNT)]


def video(k, **changes):
    entries = {
        "id": [f"vid{k}".encode()], "labels": LABELS[k], "mean_rgb": RGB[k], "mean_audio": AUDIO[k],
    }  # fmt: skip
    entries.update(changes)
    # A map has no order: files written by TensorFlow have any.
    names = [name for name in entries if entries[name] is not None]
    return example.encode_example({name: entries[name] for name in np.roll(names, k % 3)})


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / f"train{k}.tfrecord" for k in range(3)]
    for path, start, stop in zip(paths, (0, 10, 10), (10, 10, COUNT), strict=True):
        tfrecord.write(path, [video(k) for k in range(start, stop)])
    return paths


def test_framing_is_tensorflow_s():
    """The checksum of the published test vector, and its mask as in crc32c.h."""
    crc = tfrecord._checksum()
    assert crc(b"123456789") == 0xE3069283
    assert tfrecord.masked(0xE3069283) == 0xC78AB0E5


def test_records_by_number(paths):
    """R133: through an index; no other record's data are read."""
    records = data.TFRecords(paths)
    assert len(records) == COUNT
    assert records.bounds == [0, 10, 10, COUNT]
    assert records.counts == [10, 0, COUNT - 10]
    indices = [59, 0, 9, 10, 11, 12, 0]
    assert records.read(indices) == [video(k) for k in indices]
    assert records.read([]) == []
    with pytest.raises(ConfigError, match="sample 60 of 60"):
        records.read([60])
    with pytest.raises(ConfigError, match="sample -1 of 60"):
        records.lay([59, -1])
    records.close()
    assert records.read([3]) == [video(3)], "files are opened again when they are needed"


def test_open_files_are_bounded(tmp_path):
    """R137: a data set of many files has few of them open."""
    paths = [tmp_path / f"{k}" for k in range(9)]
    for k, path in enumerate(paths):
        tfrecord.write(path, [bytes([k]) * k])
    records = data.TFRecords(paths)
    records._files._most = 3
    records.close()
    for k in RNG.permutation(np.tile(np.arange(9), 3)).tolist():
        assert records.read([k]) == [bytes([k]) * k]
        assert len(records._files) <= 3


def test_videos(paths):
    source = data.YouTube8M(paths)
    assert isinstance(source, data.Source)
    assert len(source) == COUNT
    for indices in (np.arange(COUNT), np.array([59, 3, 3, 20]), RNG.permutation(COUNT)[:17]):
        inputs, labels = source.take(indices)
        np.testing.assert_array_equal(inputs, np.hstack([RGB, AUDIO])[indices])
        assert labels.shape == (len(indices), CLASSES)
        for row, index in zip(labels, indices, strict=True):
            assert sorted(np.flatnonzero(row)) == sorted(LABELS[index])
    assert [array.shape for array in source.take(np.array([], int))] == [(0, 1152), (0, CLASSES)]
    assert source.ids([7, 2]) == ["vid7", "vid2"]


def test_every_flipped_bit_is_found(tmp_path):
    """R42: one bit anywhere: that record is bad, or the file is refused; never wrong numbers."""
    path = tmp_path / "a"
    tfrecord.write(path, [video(k) for k in range(3)])
    whole = bytearray(path.read_bytes())
    good = data.YouTube8M(path).take(np.arange(3))
    ends = np.cumsum([len(video(k)) + 16 for k in range(3)])
    refused = 0
    for bit in RNG.integers(0, 8 * len(whole), 150).tolist() + list(range(0, 96, 7)):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        if any(start <= bit // 8 < start + 12 for start in (0, *ends[:-1])):
            with pytest.raises(ConfigError, match="is damaged or this is no TFRecord file"):
                data.YouTube8M(path)
            refused += 1
            continue
        source = data.YouTube8M(path)
        taken = BadRecordFilter(source).take(np.arange(3))
        owner = np.searchsorted(ends, bit // 8, side="right")
        assert [record.index for record in taken.bad] == [owner]
        for ours, right in zip(taken.batch, good, strict=True):
            np.testing.assert_array_equal(ours, right[taken.kept])
    assert 0 < refused < 100


def test_a_file_that_was_cut_off(tmp_path):
    path = tmp_path / "a"
    tfrecord.write(path, [video(k) for k in range(3)])
    whole = path.read_bytes()
    ends = np.cumsum([len(video(k)) + 16 for k in range(3)])
    for length in (ends[1] + 5, ends[1] + 12, ends[2] - 1, ends[1] + 700):
        path.write_bytes(whole[:length])
        taken = BadRecordFilter(data.YouTube8M(path)).take(np.arange(3))
        assert taken.kept.tolist() == [0, 1]
        assert "it is cut off, at byte" in taken.bad[0].reason
    path.write_bytes(whole[: ends[1]])
    assert len(data.YouTube8M(path)) == 2
    path.write_bytes(whole[1:])
    opened = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(ConfigError, match="this is no TFRecord file"):
        data.YouTube8M(path)
    assert len(list(Path("/dev/fd").iterdir())) == opened


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_rgb": None}, "no packed 'mean_rgb'"),
        ({"mean_rgb": RGB[0][:1000]}, "mean_rgb has 1000 numbers, not 1024"),
        ({"mean_audio": [b"bytes"]}, "no packed 'mean_audio' of the right type"),
        ({"labels": [b"word"]}, "no packed 'labels'"),
        ({"labels": np.array([5, 3862])}, "entity 3862 of 3862"),
        ({"labels": np.array([-1])}, "entity -1 of 3862"),
        ({"mean_audio": np.full(128, np.nan, np.float32)}, "a feature is not finite"),
    ],
)
def test_records_that_are_no_videos(tmp_path, changes, message):
    """R42: whole and checked, but not what a model can use."""
    tfrecord.write(tmp_path / "a", [video(0), video(1, **changes), video(2)])
    taken = BadRecordFilter(data.YouTube8M(tmp_path / "a")).take(np.arange(3))
    assert [record.index for record in taken.bad] == [1]
    assert message in taken.bad[0].reason
    np.testing.assert_array_equal(taken.batch[0], np.hstack([RGB, AUDIO])[[0, 2]])


def test_bytes_of_any_kind_are_decoded_or_refused():
    """A decoder of files from strangers ends, and says no with a ValueError."""
    good = video(4)
    for k in range(2000):
        rng = np.random.default_rng(k)
        broken = bytearray(good[: rng.integers(1, len(good))] if k % 2 else good)
        for at in rng.integers(0, len(broken), rng.integers(1, 6)):
            broken[at] = rng.integers(0, 256)
        try:
            for kind, parts in example.layout(bytes(broken)).values():
                example.values(bytes(broken), kind, parts)
        except ValueError:
            pass
    for text in (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b", b"\x80" * 20):
        with pytest.raises(ValueError):
            example.layout(text)


def test_values_packed_and_not():
    numbers = np.array([0, 1, 127, 128, 300, 2**40, -1])
    found = example.layout(example.encode_example({"n": numbers, "f": RGB[0], "b": [b"x", b""]}))
    text = example.encode_example({"n": numbers, "f": RGB[0], "b": [b"x", b""]})
    np.testing.assert_array_equal(example.values(text, *found["n"]), numbers)
    np.testing.assert_array_equal(example.values(text, *found["f"]), RGB[0])
    assert example.values(text, *found["b"]) == [b"x", b""]
    # One by one: two integers, of field 1 and kind 0.
    text = example._field(
        1, example._field(1, example._field(1, b"n") + example._field(2, example._field(
            3, b"\x08\x05\x08\xac\x02"))))  # fmt: skip
    assert example.values(text, *example.layout(text)["n"]).tolist() == [5, 300]


def test_patterns(paths, tmp_path):
    found = files(tmp_path / "train*.tfrecord")
    assert found == [str(path) for path in paths]
    train, test = data.from_settings(
        "youtube8m", {"train": str(tmp_path / "train*"), "test": str(paths[0]), "classes": 4000}
    )
    assert (len(train), len(test), train.classes) == (COUNT, 10, 4000)
    with pytest.raises(ConfigError, match="no file matches"):
        files("nowhere*")
    with pytest.raises(ConfigError, match="no files are given"):
        data.TFRecords([])
    with pytest.raises(ConfigError, match="cannot read"):
        data.TFRecords([tmp_path / "nothing"])


def test_without_the_checksum_s_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(ConfigError, match=r'pip install "mpidist\[data\]"'):
        data.TFRecords("x")
