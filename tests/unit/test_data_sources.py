"""The sources digits, IDX files (good and bad ones), and arrays."""

import gzip
import struct

import numpy as np
import pytest

from mpidist import data
from mpidist.data.readers.idx import read_idx
from mpidist.errors import ConfigError


def test_array_source():
    x, y = np.arange(12).reshape(6, 2), np.arange(6)
    source = data.as_source((x, y))
    assert isinstance(source, data.Source)
    assert len(source) == 6
    taken = source.take(np.array([4, 0]))
    np.testing.assert_array_equal(taken[0], [[8, 9], [0, 1]])
    np.testing.assert_array_equal(taken[1], [4, 0])
    empty = source.take(np.array([], int))
    assert [len(part) for part in empty] == [0, 0]
    assert data.as_source(source) is source
    assert len(data.as_source(x)) == 6

    class Own:
        def __len__(self):
            return 3

        def take(self, indices):
            return (np.asarray(indices),)

    own = Own()
    assert data.as_source(own) is own


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((np.zeros(3), np.zeros(4)), r"arrays of \[3, 4\] samples"),
        ((), "at least one array"),
        ((np.zeros(3), [1, 2, 3]), "item 1 is list"),
        ((np.float32(3),), "item 0 is float32"),
        ("abc", "data is str, expected a tuple of arrays"),
    ],
)
def test_bad_arrays(given, message):
    with pytest.raises(ConfigError, match=message):
        data.as_source(given)


def test_digits():
    """R13: real images without a network, the same split everywhere."""
    train, test = data.digits()
    assert (len(train), len(test)) == (1437, 360)
    images, labels = train.arrays
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == np.float32
    assert labels.dtype == np.int64
    assert (images.min(), images.max()) == (0, 1)
    # Every sample is in one of the two: sums and counts of the whole set.
    assert images.sum() * 16 + test.arrays[0].sum() * 16 == pytest.approx(561718, abs=1)
    everything = np.concatenate([labels, test.arrays[1]])
    counts, shares = np.bincount(everything), np.bincount(test.arrays[1])
    assert counts.sum() == 1797
    assert np.all(np.abs(shares - counts * 360 / 1797) < 1), "stratified"
    again, other = data.digits(), data.digits(seed=1)
    np.testing.assert_array_equal(again[1].arrays[0], test.arrays[0])
    assert not np.array_equal(other[1].arrays[0], test.arrays[0])


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "mpidist\[examples\]"'):
        data.digits()


def test_digits_the_official_way(monkeypatch):
    """Where scikit-learn keeps its file elsewhere, its own loader gives the same samples."""
    expected = data.digits()
    monkeypatch.setattr("pathlib.Path.is_file", lambda path: False)
    for given, wanted in zip(data.digits(), expected, strict=True):
        for a, b in zip(given.arrays, wanted.arrays, strict=True):
            np.testing.assert_array_equal(a, b)


def encode(array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (20, 6, 5)), rng.integers(0, 10, 20)
    paths = tmp_path / "images", tmp_path / "labels.gz"
    paths[0].write_bytes(encode(images))
    paths[1].write_bytes(gzip.compress(encode(labels)))
    return paths, images, labels


def test_idx(files):
    """R13: plain and gzip, the first `train` and the others."""
    paths, images, labels = files
    train, test = data.from_settings(
        "idx", {"images_path": str(paths[0]), "labels_path": str(paths[1]), "train": 16}
    )
    assert (len(train), len(test)) == (16, 4)
    x = np.concatenate([train.arrays[0], test.arrays[0]])
    assert x.dtype == np.float32
    assert x.shape == (20, 1, 6, 5)
    np.testing.assert_array_equal(np.rint(x[:, 0] * 255), images)
    np.testing.assert_array_equal(np.concatenate([train.arrays[1], test.arrays[1]]), labels)
    assert x.max() <= 1


def test_idx_of_real_images(data_dir):
    """R13: 10,000 images of MNIST, split 8,000 to 2,000."""
    folder = data_dir / "mnist10k"
    train, test = data.idx(
        folder / "t10k-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz"
    )
    assert (len(train), len(test)) == (8000, 2000)
    assert train.arrays[0].shape == (8000, 1, 28, 28)
    np.testing.assert_array_equal(train.arrays[1][:5], [7, 2, 1, 0, 4])


def test_missing_file(files, tmp_path):
    paths, _, _ = files
    missing = tmp_path / "nowhere" / "images"
    with pytest.raises(ConfigError, match=f"no such file: {missing}"):
        data.idx(missing, paths[1])
    with pytest.raises(ConfigError, match=r"cannot read .*directory"):
        data.idx(tmp_path, paths[1])


@pytest.mark.parametrize("compressed", [False, True])
def test_every_truncation_is_found(files, tmp_path, compressed):
    """R42: a file cut anywhere is refused with the bytes expected and found."""
    (path, _), _, _ = files
    whole = path.read_bytes()
    stored = gzip.compress(whole) if compressed else whole
    short = tmp_path / "short"
    for length in {0, 1, 3, 15, 16, 17, len(stored) // 2, len(stored) - 9, len(stored) - 1}:
        short.write_bytes(stored[:length])
        with pytest.raises(ConfigError, match="short: ") as caught:
            read_idx(short, 3)
        assert "\n" not in str(caught.value)
        if length >= 16 and not compressed:
            assert f"truncated: {length} bytes, expected {len(whole)}" in str(caught.value)
        if compressed and length > len(stored) // 3:
            assert f"expected {len(whole)}" in str(caught.value)


def test_damaged_files(files, tmp_path):
    paths, _, labels = files
    plain = encode(labels)
    bad = tmp_path / "bad"
    for content, dimensions, message in [
        (plain + b"x", 1, "longer than its header says: 29 bytes, expected 28"),
        (plain, 3, "begins with 0x00000801, expected 0x00000803"),
        (b"\0\0\x0d\1" + plain[4:], 1, "begins with 0x00000d01, expected 0x00000801"),
        (b"not an IDX file, but text", 1, "begins with 0x6e6f7420"),
        (b"\0\0\x08\1\xff\xff\xff\xff" + plain[8:], 1, "expected 4294967303 for"),
    ]:
        bad.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_idx(bad, dimensions)
    packed = bytearray(gzip.compress(plain))
    packed[-6] ^= 1
    bad.write_bytes(packed)
    with pytest.raises(ConfigError, match="damaged or truncated gzip"):
        read_idx(bad, 1)
    bad.write_bytes(encode(labels[:19]))
    with pytest.raises(ConfigError, match=r"20 images in .* but 19 labels in"):
        data.idx(paths[0], bad, train=5)


@pytest.mark.parametrize("train", [0, 20, -1, 2.5, True])
def test_bad_split(files, train):
    paths, _, _ = files
    with pytest.raises(ConfigError, match=f"train is {train}, expected from 1 to 19"):
        data.idx(*paths, train=train)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("digit", {}, "unknown data source 'digit': expected one of 'digits', .*; did you mean"),
        ("idx", {"images_path": "x"}, "setting 'labels_path' is missing"),
        ("digits", {"sed": 1}, "unknown setting 'sed'.*did you mean 'seed'"),
        ("digits", {"test": 1797}, "test is 1797, expected from 1 to 1796"),
    ],
)
def test_bad_settings(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        data.from_settings(name, settings)
