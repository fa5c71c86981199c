"""Train the tagger (R13) on TFRecord files made here, on damaged files, on derived data (R14)."""

import gzip

import numpy as np
import pytest

import mpidist as md
from mpidist import data, models, optim
from mpidist.data.readers import example, tfrecord

COUNT, CLASSES = 400, 30
RNG = np.random.default_rng(5)
CENTRES = RNG.standard_normal((CLASSES, 1152)).astype(np.float32)


def video(k):
    rng = np.random.default_rng((7, k))
    labels = rng.choice(CLASSES, rng.integers(1, 4), replace=False)
    x = CENTRES[labels].sum(axis=0) + rng.standard_normal(1152).astype(np.float32)
    return example.encode_example(
        {"id": [b"%d" % k], "labels": labels, "mean_rgb": x[:1024], "mean_audio": x[1024:]}
    )


@pytest.fixture
def paths(comm, folder):
    """Four files of training records, three of which are damaged, and one to test with."""
    if folder is None:
        return None
    paths = [folder / f"train{k}.tfrecord" for k in range(4)] + [folder / "test.tfrecord"]
    if comm.rank == 0:
        for k, path in enumerate(paths):
            tfrecord.write(path, [video(i) for i in range(100 * k, 100 * k + 100)])
        whole = bytearray(paths[1].read_bytes())
        for at in (20_000, 100_000, 300_000):
            whole[at] ^= 4
        paths[1].write_bytes(whole)
        whole = bytearray(paths[4].read_bytes())
        whole[40_000] ^= 4
        paths[4].write_bytes(whole)
    comm.Barrier()
    return paths


BITS: list = []


@pytest.mark.ranks(3, further=(1,))
def test_a_tagger_learns_from_damaged_files(comm, paths):
    model = models.tagger(1152, CLASSES)
    source = data.YouTube8M(paths[:4], CLASSES)
    result = md.train(
        comm, model, source, optimizer=optim.adam(0.003), global_batch=40, epochs=6,
        test_data=data.YouTube8M(paths[4], CLASSES), max_bad=0.01, microbatches=4,
    )  # fmt: skip
    assert result.skipped_records == 6 * 3
    assert result.test_accuracy > 0.9, "hit@1"
    taken = data.BadRecordFilter(data.YouTube8M(paths[4], CLASSES)).take(np.arange(100))
    assert len(taken.bad) == 1, "also in what is tested with"
    inputs, labels = taken.batch
    assert models.hit_at_one(model.predict(inputs), labels) == result.test_accuracy
    assert models.gap(model.predict(inputs), labels) > 0.8
    BITS.append(result.parameters_sha256)
    assert set(BITS) == {comm.bcast(BITS[0])}


@pytest.mark.ranks(2)
def test_derived_features_in_the_loader(comm, paths):
    """R14: made in the thread that reads ahead."""

    def normalised(inputs, labels):
        length = np.linalg.norm(inputs, axis=1, keepdims=True)
        return inputs / length * 10, labels

    source = data.Derived(data.YouTube8M(paths[:4], CLASSES), normalised)
    assert source.reads
    result = md.train(
        comm, models.tagger(1152, CLASSES), source, optimizer=optim.adam(0.01), global_batch=40,
        epochs=6, max_bad=0.01,
        test_data=data.Derived(data.YouTube8M(paths[4], CLASSES), normalised),
    )  # fmt: skip
    assert result.test_accuracy > 0.8


def frames(k):
    """A SequenceExample of 2 to 5 frames around the centres of its labels."""
    rng = np.random.default_rng((8, k))
    labels = rng.choice(CLASSES, rng.integers(1, 4), replace=False)
    rows = CENTRES[labels].sum(axis=0) + rng.standard_normal((rng.integers(2, 6), 1152))
    rows = np.clip(np.round(rows * 20 + 128), 0, 255).astype(np.uint8)

    def rows_of(name, part):
        rows = b"".join(
            example._field(1, example._field(1, example._field(1, row.tobytes()))) for row in part
        )
        return example._field(1, example._field(1, name) + example._field(2, rows))

    lists = rows_of(b"rgb", rows[:, :1024]) + rows_of(b"audio", rows[:, 1024:])
    return example.encode_example({"id": [b"%d" % k], "labels": labels}) + example._field(2, lists)


@pytest.mark.ranks(1, further=(3,))
def test_a_tagger_learns_from_packed_frames(comm, folder):
    """The frame level, packed by gzip, one file cut off: one bad record of all ranks."""
    paths = [folder / f"frames{k}.tfrecord" for k in range(3)]
    if comm.rank == 0:
        for k, path in enumerate(paths):
            tfrecord.write(path, [frames(i) for i in range(100 * k, 100 * k + 100)])
            path.write_bytes(gzip.compress(path.read_bytes(), 1))
        paths[0].write_bytes(paths[0].read_bytes()[:-1])
    comm.Barrier()
    train, test = (
        data.Derived(data.YouTube8MFrames(some, 4, CLASSES), data.mean_frames)
        for some in (paths[:2], paths[2:])
    )
    assert len(train) == 201
    result = md.train(
        comm, models.tagger(1152, CLASSES), train, optimizer=optim.adam(0.01), global_batch=40,
        epochs=6, max_bad=0.01, test_data=test, microbatches=4,
    )  # fmt: skip
    assert result.skipped_records == 6
    assert result.test_accuracy > 0.9
    FRAME_BITS.append(result.parameters_sha256)
    assert set(FRAME_BITS) == {comm.bcast(FRAME_BITS[0])}


FRAME_BITS: list = []
