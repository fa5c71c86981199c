"""Sources of data: HDF5, LibSVM, map-style, iterable, derived (R2, R14, R42)."""

import gc
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpidist import data
from mpidist.data.sharding import shard
from mpidist.data.skip_bad import BadRecordFilter
from mpidist.errors import BadRecord, ClosedError, ConfigError

RNG = np.random.default_rng(0)
INPUTS = RNG.random((1000, 3, 4)).astype(np.float32)
LABELS = RNG.integers(0, 5, 1000)
LAYOUTS = [
    {},
    {"chunks": (64, 3, 4)},
    {"chunks": (37, 3, 4), "compression": "gzip", "shuffle": True, "fletcher32": True},
    {"chunks": (1000, 1, 4)},
    {"chunks": (50, 3, 4), "compression": "lzf"},
    {"chunks": (64, 2, 4), "compression": "lzf", "shuffle": True, "fletcher32": True},
    {"chunks": (64, 3, 4), "compression": "szip"},
    {"chunks": (64, 3, 4), "shuffle": True},
]


@pytest.fixture(params=range(len(LAYOUTS)))
def path(request, tmp_path):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=INPUTS, **LAYOUTS[request.param])
        file["labels"] = LABELS
    return path


CHOICES = [
    np.arange(1000), np.arange(30, 700), np.arange(64), np.arange(0), np.array([999]),
    np.array([5, 5, 4, 4]), np.arange(1000)[::-1],
    RNG.permutation(1000), RNG.integers(0, 1000, 77), np.arange(0, 1000, 7),
]  # fmt: skip


@pytest.mark.parametrize("cache", [1, 10_000, 32 << 20])
def test_hdf5_rows(path, cache):
    """Any rows, in any order, of any layout."""
    source = data.HDF5(path, ["inputs", "labels"], cache)
    assert isinstance(source, data.Source)
    assert len(source) == 1000
    for indices in CHOICES:
        inputs, labels = source.take(indices)
        np.testing.assert_array_equal(inputs, INPUTS[indices])
        np.testing.assert_array_equal(labels, LABELS[indices])
        assert inputs.dtype == np.float32
    for wrong in (-1, 1000):
        with pytest.raises(ConfigError, match=f"sample {wrong} of 1000; samples are"):
            source.take([999, wrong])
    source.close()
    source.close()


def test_each_chunk_is_read_once(tmp_path, monkeypatch):
    """Chunk-aligned: 64 rows of 3 chunks are 3 reads, and the next batch of them is none."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("inputs", data=INPUTS, chunks=(100, 3, 4), compression="gzip")
    source = data.HDF5(tmp_path / "a.h5", ["inputs"])
    reads, chunk = [], h5py.Dataset.__getitem__
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda d, at: reads.append(at) or chunk(d, at))
    indices = np.concatenate([RNG.integers(0, 100, 30), RNG.integers(300, 500, 34)])
    source.take(indices)
    source.take(indices[::-1])
    assert reads == [slice(0, 100), slice(300, 400), slice(400, 500)]


def test_shards_of_whole_chunks(tmp_path, monkeypatch):
    """Each chunk is one rank's, which unpacks it once, whatever the order inside of it."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("inputs", data=INPUTS, chunks=(64, 3, 4), compression="gzip")
        file["labels"] = LABELS
    source = data.HDF5(tmp_path / "a.h5", ["inputs", "labels"], cache=1)
    assert source.counts == [64] * 15 + [40]
    reads, real = [], h5py.Dataset.__getitem__
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda d, at: reads.append(at) or real(d, at))
    records = []
    for rank in range(3):
        part = shard("file", source.counts, [3], rank, seed=1, epoch=2)
        for start in range(0, len(part.records), 10):
            indices = part.records[start : start + 10]
            np.testing.assert_array_equal(source.take(indices)[0], INPUTS[indices])
        records += part.records.tolist()
    assert sorted(records) == list(range(1000))
    whole = [slice(low, low + 64) for low in range(0, 1000, 64)]
    # At the seam between two of its chunks a batch has rows of both; each is kept until it is done.
    assert sorted(reads, key=lambda at: at.start) == whole
    assert data.HDF5(tmp_path / "a.h5", ["labels"]).counts == [1000]


def test_rows_of_chunks_without_filters(tmp_path, monkeypatch):
    """Read past HDF5, only what is wanted; not what is stored otherwise than in memory."""
    other = h5py.h5t.NATIVE_INT32.copy()
    other.set_precision(24)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("inputs", data=INPUTS, chunks=(37, 3, 4))
        file.create_dataset("swapped", data=INPUTS.astype(">f8"), chunks=(64, 3, 4))
        file.create_dataset("parts", data=INPUTS, chunks=(37, 3, 2))
        h5py.h5d.create(file.id, b"short", other, h5py.h5s.create_simple((1000,)))
        file["short"][...] = LABELS
        # Chunks that are asked for in another order than they lie in.
        late = file.create_dataset("late", INPUTS.shape, "f4", chunks=(100, 3, 4))
        for low in range(900, -1, -100):
            late[low : low + 100] = INPUTS[low : low + 100]
    names = ["inputs", "swapped", "parts", "short", "late"]
    source = data.HDF5(tmp_path / "a.h5", names)
    past = [type(reader).__name__ == "_Rows" for reader in source._readers]
    assert past == [True, True, False, False, True]
    for indices in CHOICES:
        inputs, swapped, parts, short, late = source.take(indices)
        for array in (inputs, swapped, parts, late):
            np.testing.assert_array_equal(array, INPUTS[indices])
        np.testing.assert_array_equal(short, LABELS[indices])
    asked, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, b, at: asked.append(len(b[0])) or real(f, b, at))
    data.HDF5(tmp_path / "a.h5", ["inputs"]).take(np.array([999, 3, 500]))
    assert asked == [48, 48, 48]


def test_hdf5_damage_is_found_by_record(tmp_path):
    """A damaged chunk makes its own records bad, and no others; a short file its last ones."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("inputs", data=INPUTS, chunks=(100, 3, 4), fletcher32=True)
        at = made.id.get_chunk_info(4).byte_offset
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    raw[at + 17] ^= 1
    (tmp_path / "a.h5").write_bytes(raw)
    careful = BadRecordFilter(data.HDF5(tmp_path / "a.h5", ["inputs"]))
    taken = careful.take(np.arange(395, 505))
    assert [record.index for record in taken.bad] == list(range(400, 500))
    np.testing.assert_array_equal(taken.batch[0], INPUTS[[*range(395, 400), *range(500, 505)]])
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["labels"] = LABELS
        file["inputs"] = INPUTS
        end = file["inputs"].id.get_offset() + INPUTS.nbytes
    source = data.HDF5(tmp_path / "b.h5", ["inputs"])
    os.truncate(tmp_path / "b.h5", end - 3 * 48)
    taken = BadRecordFilter(source).take(np.arange(990, 1000))
    assert [record.index for record in taken.bad] == [997, 998, 999]
    assert "the file ends before it" in taken.bad[0].reason


def test_hdf5_refuses(tmp_path):
    """No links to other files, no storage elsewhere, nothing but numbers."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 100)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["inputs"] = INPUTS
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["inputs"], file["short"], file["text"] = INPUTS, LABELS[:9], "words"
        file["one"] = 5.0
        file["link"] = h5py.ExternalLink("other.h5", "/inputs")
        file.create_dataset("away", (100,), "u1", external=[(str(secret), 0, 100)])
        layout = h5py.VirtualLayout((1000, 3, 4), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "inputs", (1000, 3, 4))
        file.create_virtual_dataset("virtual", layout)
    gc.collect()
    opened = len(list(Path("/dev/fd").iterdir()))
    for names, message in [
        (["nothing"], r"there is no dataset 'nothing' \(there are 'away'"),
        (["link"], "'link' is a link to another place"),
        (["text"], "dataset 'text' is of type object"),
        (["one"], "dataset 'one' is one number, not samples"),
        (["away"], "dataset 'away' lies in other files"),
        (["virtual"], "dataset 'virtual' lies in other files"),
        (["inputs", "short"], "datasets of .* samples, expected equal"),
        ([], "no dataset is named"),
    ]:
        with pytest.raises(ConfigError, match=message):
            data.HDF5(tmp_path / "a.h5", names)
    gc.collect()
    assert len(list(Path("/dev/fd").iterdir())) == opened, "what is refused is closed"
    with pytest.raises(ConfigError, match="is not an HDF5 file that can be read"):
        data.HDF5(secret, ["inputs"])
    with pytest.raises(ConfigError, match="sample 1000 of 1000"):
        data.HDF5(tmp_path / "a.h5", ["inputs"]).take([1000])
    closed = data.HDF5(tmp_path / "a.h5", ["inputs"])
    closed.close()
    with (tmp_path / "other.h5").open("rb"), pytest.raises(ClosedError):
        closed.take([0])  # its descriptor is another file's now


def test_hdf5_of_a_job(path):
    train, test = data.from_settings("hdf5", {"path": str(path), "train": 800})
    assert (len(train), len(test)) == (800, 200)
    assert train.reads
    np.testing.assert_array_equal(test.take(np.array([0, 199]))[0], INPUTS[[800, 999]])
    train, test = data.from_settings("hdf5", {"path": str(path), "test_path": str(path)})
    assert len(train) == len(test) == 1000
    for settings in ({}, {"train": 5, "test_path": "x"}, {"train": 1000}):
        with pytest.raises(ConfigError, match="hdf5: train"):
            data.from_settings("hdf5", {"path": str(path), **settings})


LINES = """# a comment is no record
1 3:1 10:1 20:0.5
0 0:2
-1
nonsense
1 5:1 2:1
0 3:x
1 7:nan

1 1:1 # a remark 5:5
"""


def test_libsvm_lines(tmp_path):
    """R42: lines with words that are no record are bad; comments and empty lines do not count."""
    path = tmp_path / "lines"
    path.write_text(LINES)
    source = data.LibSVM(path, classes=[-1, 0, 1])
    assert (len(source), source.features) == (8, 21)
    taken = BadRecordFilter(source, finite=True).take(np.arange(8))
    assert taken.kept.tolist() == [0, 1, 2, 7]
    assert [record.index for record in taken.bad] == [3, 4, 5, 6]
    reasons = " ".join(record.reason for record in taken.bad)
    for words in ("line 5", "line 6: columns do not ascend at column 2", "'x'", "not finite"):
        assert words in reasons
    assert np.isnan(source.take([6])[0][0, 7]), "for models that know what to do with it"
    (tmp_path / "large").write_text("1 1:1e39\n")
    large = BadRecordFilter(data.LibSVM(tmp_path / "large"), finite=True).take(np.arange(1))
    assert "not finite" in large.bad[0].reason, "not in single precision"
    dense, labels = taken.batch
    assert labels.tolist() == [2, 1, 0, 2]
    expected = np.zeros((4, 21), np.float32)
    expected[0, [3, 10, 20]] = 1, 1, 0.5
    expected[1, 0], expected[3, 1] = 2, 1
    np.testing.assert_array_equal(dense, expected)
    starts, columns, values = source.rows([1, 0, 2])
    assert (starts.tolist(), columns.tolist()) == ([0, 1, 4, 4], [0, 3, 10, 20])
    assert values.tolist() == [2, 1, 1, 0.5]
    assert data.LibSVM(path, features=30).take([0])[0].shape == (1, 30)
    with pytest.raises(BadRecord, match="column 20 is beyond the 15 features"):
        data.LibSVM(path, features=15).take([0])
    with pytest.raises(BadRecord, match="label -1 is unknown"):
        data.LibSVM(path, classes=[0, 1]).take([0, 2])
    with pytest.raises(ConfigError, match="cannot read"):
        data.LibSVM(tmp_path / "nowhere")


def test_libsvm_does_not_believe_a_damaged_column(tmp_path):
    """One flipped digit must not take 64 MiB for each sample: said before anything is allocated."""
    path = tmp_path / "a"
    path.write_text("1 3:1\n\n0 5:1 16000000:2\n1 0:1\n")
    source = data.LibSVM(path)
    message = r"line 3 has column 16000000, so a dense sample would take 61 MiB; if that is right"
    for read in (lambda: source.take([0]), lambda: BadRecordFilter(source).take(np.arange(2))):
        with pytest.raises(ConfigError, match=message):
            read()
    with pytest.raises(ConfigError, match="give features=16000001"):
        data.from_settings("libsvm", {"path": str(path), "test_path": str(path)})
    assert source.rows([1])[1].tolist() == [5, 16000000], "sparse they take what they are"
    assert data.LibSVM(path, 16000001).take([1])[0][0, 16000000] == 2
    taken = BadRecordFilter(data.LibSVM(path, 6)).take(np.arange(3))
    assert [record.index for record in taken.bad] == [1]


def test_libsvm_of_real_records(data_dir):
    """6,513 mushrooms of 126 features, 22 of which each has."""
    folder = data_dir / "agaricus"
    train, test = data.from_settings(
        "libsvm",
        {
            "path": str(folder / "agaricus.txt.train"),
            "test_path": str(folder / "agaricus.txt.test"),
        },
    )
    assert (len(train), len(test)) == (6513, 1611)
    inputs, labels = train.take(np.arange(6513))
    assert inputs.shape == (6513, 126)
    assert set(inputs.sum(axis=1)) == {22}
    assert labels.sum() == 3140
    assert test.take([0])[0].shape == (1, 126)


class Listed:
    """A map-style data set, as of PyTorch."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 13:
            raise OSError("unlucky")
        return INPUTS[index], int(LABELS[index])


def test_map_style_objects():
    source = data.as_source(Listed())
    assert len(source) == 20
    inputs, labels = source.take(np.array([4, 0]))
    np.testing.assert_array_equal(inputs, INPUTS[[4, 0]])
    assert labels.tolist() == LABELS[[4, 0]].tolist()
    assert [array.shape for array in source.take(np.array([], int))] == [(0, 3, 4), (0,)]
    assert data.as_source(Listed()).take(np.array([], int))[0].shape == (0, 3, 4)
    taken = BadRecordFilter(source).take(np.arange(10, 20))
    assert [record.index for record in taken.bad] == [13]
    assert "OSError: unlucky" in taken.bad[0].reason
    with pytest.raises(ConfigError, match=r"take\(indices\) or \[index\]"):
        data.as_source({"a": 1})


def test_iterables():
    """By position: what is skipped is drawn; going back begins anew; too short is bad."""
    drawn = []

    def numbers():
        for k in range(10):
            drawn.append(k)
            yield np.float32(k), k % 2

    source = data.Stream(numbers, 12)
    assert source.take([2, 3])[0].tolist() == [2, 3]
    assert source.take([7])[1].tolist() == [1]
    assert drawn == list(range(8))
    assert source.take([1])[0].tolist() == [1]
    assert drawn == [*range(8), 0, 1]
    assert [array.shape for array in source.take([])] == [(0,), (0,)]
    with pytest.raises(BadRecord, match="record 11: the iterable ended before it"):
        source.take([11])
    assert source.name == "numbers"


def test_derived_features():
    """R14: combinations of features, made where samples are read; bad ones are told apart."""

    def combine(inputs, labels):
        if (labels == 4).any():
            raise ValueError("no such pair")
        flat = inputs.reshape(len(inputs), -1)
        return np.concatenate([flat, flat[:, :1] * flat[:, 1:2]], axis=1), labels

    source = data.Derived(data.ArraySource(INPUTS, LABELS), combine)
    taken = BadRecordFilter(source).take(np.arange(50))
    good = np.flatnonzero(LABELS[:50] != 4)
    assert taken.kept.tolist() == good.tolist()
    np.testing.assert_array_equal(taken.batch[0][:, 12], INPUTS[good, 0, 0] * INPUTS[good, 0, 1])
    assert len(source) == 1000


def test_part_counts_from_its_start():
    part = data.Part(data.ArraySource(LABELS), 100, 150)
    assert len(part) == 50
    np.testing.assert_array_equal(part.take([0, 49])[0], LABELS[[100, 149]])
