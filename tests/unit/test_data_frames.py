"""The frame level of YouTube-8M: SequenceExamples with the field names of the data set (R13)."""

import gzip

import numpy as np
import pytest
import wire

from mpidist import data, models
from mpidist.data.readers import tfrecord
from mpidist.data.skip_bad import BadRecordFilter
from mpidist.errors import ConfigError

RNG = np.random.default_rng(0)
COUNTS = [3, 1, 7, 5, 5, 2, 9, 4]
FRAMES = [RNG.integers(0, 256, (count, 1152), np.uint8) for count in COUNTS]
LABELS = [RNG.choice(3862, k % 4, replace=False) for k in range(len(COUNTS))]


def features(rows):
    return [wire.bytes_feature(row.tobytes()) for row in rows]


def video(k, **changes):
    """Record k, with other lists or with another context."""
    context = {
        "id": wire.bytes_feature(f"vid{k}".encode()),
        "labels": wire.integers_feature(LABELS[k].tolist()),
    }
    lists = {"rgb": features(FRAMES[k][:, :1024]), "audio": features(FRAMES[k][:, 1024:])}
    for name, value in changes.items():
        (context if name in context else lists)[name] = value
    order = list(lists)[:: 1 if k % 2 else -1]
    return wire.sequence_example(context, {n: lists[n] for n in order if lists[n] is not None})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "train00.tfrecord"
    path.write_bytes(wire.tfrecord([video(k) for k in range(len(COUNTS))]))
    return path


def padded(indices, frames):
    expected = np.zeros((len(indices), frames, 1152), np.uint8)
    for row, k in zip(expected, indices, strict=True):
        row[: COUNTS[k]] = FRAMES[k][:frames]
    return expected


@pytest.mark.parametrize("frames", [1, 5, 300])
@pytest.mark.parametrize("packed", [False, True])
def test_frames(path, frames, packed):
    """As many as there are, cut or filled up with zeros, with counts and entities."""
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    source = data.YouTube8MFrames(path, frames)
    assert isinstance(source, data.Source)
    assert len(source) == len(COUNTS)
    for indices in ([0, 1, 2, 3, 4, 5, 6, 7], [6, 6, 0], [5]):
        for piece in (1, 2, 100):
            source._piece = piece
            inputs, counts, labels = source.take(np.array(indices))
            assert inputs.dtype == np.uint8
            np.testing.assert_array_equal(inputs, padded(indices, frames))
            assert counts.tolist() == [min(COUNTS[k], frames) for k in indices]
            assert [sorted(np.flatnonzero(row)) for row in labels] == [
                sorted(LABELS[k]) for k in indices
            ]
    assert [a.shape for a in source.take([])] == [(0, frames, 1152), (0,), (0, 3862)]
    assert source.ids([7, 2]) == ["vid7", "vid2"]
    source.close()


def test_our_checksums_are_theirs(path):
    """The encoder of these tests and the one of `tfrecord.write` make the same file."""
    tfrecord.write(path.with_name("ours"), [video(k) for k in range(len(COUNTS))])
    assert path.read_bytes() == path.with_name("ours").read_bytes()


RGB, AUDIO = features(FRAMES[3][:, :1024]), features(FRAMES[3][:, 1024:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rgb": None}, "no frames of a video: no list 'rgb'; there are audio"),
        ({"rgb": []}, "lists of {'rgb': 0, 'audio': 5} frames"),
        ({"rgb": [], "audio": []}, "lists of {'rgb': 0, 'audio': 0} frames"),
        ({"rgb": RGB[:4]}, "lists of {'rgb': 4, 'audio': 5} frames, expected equal numbers"),
        ({"audio": RGB}, r"audio: row 0 has \[1024\] bytes, not 128"),
        ({"rgb": [*RGB[:4], AUDIO[0]]}, r"rgb: row 4 has \[128\] bytes, not 1024"),
        ({"rgb": [*RGB[:4], wire.integers_feature([5])]}, r"rgb: row 4 has \[\] bytes"),
        ({"rgb": [*RGB[:4], wire.bytes_feature(bytes(1024), bytes(1024))]}, r"\[1024, 1024\]"),
        ({"rgb": [*RGB[:4], b"\x0a\xff\x01"]}, "longer than its message"),
        ({"labels": wire.bytes_feature(b"word")}, "no packed 'labels'"),
        ({"labels": wire.integers_feature([3862])}, "entity 3862 of 3862"),
        ({"labels": wire.integers_feature([-1])}, "entity -1 of 3862"),
    ],
)
def test_records_that_are_no_videos(path, changes, message):
    """R42: whole and checked, but not what a model can use: bad alone, cut or not."""
    path.write_bytes(wire.tfrecord([video(0), video(3, **changes), video(2)]))
    for frames in (2, 300):
        taken = BadRecordFilter(data.YouTube8MFrames(path, frames)).take(np.arange(3))
        assert [record.index for record in taken.bad] == [1]
        with pytest.raises(Exception, match=message):
            raise taken.bad[0]
        np.testing.assert_array_equal(taken.batch[0], padded([0, 2], frames))


def test_frames_that_are_written_another_way(path):
    """Lengths in more bytes than they need, fields in between, and lists given twice: the last."""
    odd = [wire.message((7, b"more"), (1, wire.message((9, b"x"), (1, row.tobytes()))), (8, b""))
           for row in FRAMES[3][:, :1024]]  # fmt: skip
    rgb = [RGB[0][:1] + bytes([RGB[0][1] | 128, RGB[0][2] | 128, 0]) + RGB[0][3:], *RGB[1:]]
    assert len(rgb[0]) == len(RGB[0]) + 1
    twice = video(1)[:-1] + FRAMES[1][0, -1:].tobytes()
    path.write_bytes(wire.tfrecord([video(3, rgb=odd), video(3, rgb=rgb), twice + video(3)]))
    inputs, counts, _ = data.YouTube8MFrames(path, 5).take([0, 1, 2])
    np.testing.assert_array_equal(inputs, padded([3, 3, 3], 5))
    assert counts.tolist() == [5, 5, 5]


def test_bytes_of_any_kind_are_decoded_or_refused(tmp_path):
    """Whatever is in a record whose checksum is right, it is its frames or a bad record."""
    good = video(0)
    records = []
    for k in range(200):
        rng = np.random.default_rng(k)
        broken = bytearray(good[: rng.integers(1, len(good))] if k % 4 == 0 else good)
        for at in rng.integers(0, min(60, len(broken)), k % 3):
            broken[at] = rng.integers(0, 256)
        records.append(bytes(broken))
    tfrecord.write(tmp_path / "a", records)
    taken = BadRecordFilter(data.YouTube8MFrames(tmp_path / "a", 3)).take(np.arange(200))
    whole = [k for k, record in enumerate(records) if record == good]
    assert set(whole) <= set(taken.kept.tolist())
    assert len(taken.kept) + len(taken.bad) == 200
    assert len(taken.bad) > 60


def test_frames_of_a_job(path):
    """With `frames` a sample is the mean over a video's frames, as the tagger takes it."""
    settings = {"train": str(path), "test": str(path), "frames": 5}
    train, test = data.from_settings("youtube8m", settings)
    assert train.reads
    inputs, labels = test.take(np.arange(len(COUNTS)))
    assert (inputs.dtype, inputs.shape, labels.shape) == (np.float32, (8, 1152), (8, 3862))
    for k, row in enumerate(inputs):
        floats = FRAMES[k][:5].astype(float) * 4 / 255 + 4 / 512 - 2
        np.testing.assert_allclose(row, floats.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert models.tagger().predict(inputs).shape == (8, 3862)
    for frames in (0, True, 2.5):
        with pytest.raises(ConfigError, match=r"youtube8m: frames is .*, expected a whole number"):
            data.YouTube8MFrames(path, frames)
