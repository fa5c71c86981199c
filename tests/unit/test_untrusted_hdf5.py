"""Attacks by untrusted HDF5 files: each attack is a real file, and each is refused."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpidist import events, untrusted_hdf5
from mpidist.errors import ConfigError

VALUES = np.arange(60, dtype="f4").reshape(12, 5)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data.h5"


def read(path, name="x", **options):
    with untrusted_hdf5.open_untrusted(path, **options) as file:
        return untrusted_hdf5.checked_dataset(file, name)[...]


GOOD = {
    "contiguous": {},
    "chunked": {"chunks": (5, 2)},
    "compressed": {"chunks": (5, 2), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "growing": {"maxshape": (None, 5)},
    "one big chunk": {"chunks": (12, 5), "compression": 9},
    "lzf": {"chunks": (5, 2), "compression": "lzf", "shuffle": True},
    "szip": {"chunks": (5, 2), "compression": "szip"},
}


@pytest.mark.parametrize("options", GOOD.values(), ids=GOOD)
def test_plain_arrays_are_read(path, options):
    with h5py.File(path, "w") as file:
        file.create_dataset("a/x", data=VALUES, **options)
        file["zeros"] = file.create_dataset("z", data=np.zeros(10**6), compression=9)
        file.create_dataset("lzf", data=np.zeros(10**6), compression="lzf")
    assert (read(path, "a/x") == VALUES).all()
    assert (read(path, "/a/x") == VALUES).all()
    for name in ("zeros", "lzf"):  # what is made of zeros is within the bound of each filter
        assert not read(path, name).any()


@pytest.mark.parametrize("kind", ["?", "<i2", ">u8", "<f2", "<f8", "<c8", "S7"])
def test_plain_types_are_read(path, kind):
    values = np.arange(6).astype(kind)
    with h5py.File(path, "w") as file:
        file["x"], file["scalar"], file["none"] = values, values[3], values[:0]
    assert (read(path) == values).all()
    assert read(path, "scalar") == values[3]
    assert len(read(path, "none")) == 0


def external_link(file, folder):
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = VALUES
    file["x"] = h5py.ExternalLink("secret.h5", "x")


def external_group(file, folder):
    external_link(file, folder)
    file["a"] = h5py.ExternalLink("secret.h5", "/")


def virtual(file, folder):
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = VALUES
    layout = h5py.VirtualLayout((12, 5), "f4")
    layout[...] = h5py.VirtualSource("secret.h5", "x", (12, 5), "f4")
    file.create_virtual_dataset("x", layout)


def soft_link(file, folder):
    file["y"] = VALUES
    file["x"] = h5py.SoftLink("/y")


def text(file, folder):
    file.create_dataset("x", data=["a", "bc"], dtype=h5py.string_dtype())


def ragged(file, folder):
    file.create_dataset("x", (3,), h5py.vlen_dtype("i4"))


def references(file, folder):
    file["y"] = VALUES
    file.create_dataset("x", data=[file["y"].ref], dtype=h5py.ref_dtype)


def regions(file, folder):
    file["y"] = VALUES
    file.create_dataset("x", data=[file["y"].regionref[:2]], dtype=h5py.regionref_dtype)


def terabytes(file, folder):
    file.create_dataset("x", (10**12, 35), "u1")  # 35 TB, declared only


def terabytes_in_chunks(file, folder):
    file.create_dataset("x", (10**9, 4375), "f8", chunks=(1000, 4375), compression=9)


def one_chunk_of_many(file, folder):
    data = file.create_dataset("x", (10**6, 100), "f8", chunks=(100, 100), compression=9)
    data[:100] = 1


def plugin_dataset(file, code=32015, flags=h5py.h5z.FLAG_OPTIONAL):
    """A dataset that names a filter; an optional one need not be here to write it."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_chunk((5, 2))
    settings.set_filter(code, flags)
    made = h5py.h5d.create(
        file.id, b"x", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(VALUES.shape), settings
    )
    h5py.Dataset(made)[...] = VALUES


def lzf_of_much(file, folder):
    data = file.create_dataset("x", (10**6,), "f8", chunks=(1000,), compression="lzf")
    data[:2000] = 1


def a_giant_chunk(file, folder):
    file.create_dataset("x", (1,), "u1", chunks=(2**31,), maxshape=(None,))


ATTACKS = {
    "an external link": (external_link, "x", "is a link"),
    "a group elsewhere": (external_group, "a/x", "is a link"),
    "external storage": (
        lambda file, _: file.create_dataset(
            "x", (64,), "u1", external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
        ),
        "x",
        "lies in other files",
    ),
    "a virtual dataset": (virtual, "x", "lies in other files"),
    "a soft link": (soft_link, "x", "is a link"),
    "text": (text, "x", "is of type object"),
    "ragged arrays": (ragged, "x", "is of type object"),
    "references": (references, "x", "is of type object"),
    "references to regions": (regions, "x", "is of type object"),
    "opaque": (
        lambda file, _: file.create_dataset("x", data=np.zeros(3, "V5")),
        "x",
        "is of type",
    ),
    "records": (
        lambda file, _: file.create_dataset("x", data=np.zeros(3, "i4,f8")),
        "x",
        "is of type",
    ),
    "an enumeration": (
        lambda file, _: file.create_dataset("x", (3,), h5py.enum_dtype({"a": 1, "b": 2})),
        "x",
        "is of type",
    ),
    "no space": (
        lambda file, _: file.create_dataset("x", data=h5py.Empty("f4")),
        "x",
        "is of type",
    ),
    "another filter": (
        lambda file, _: plugin_dataset(file),
        "x",
        r"needs the filter zstd \(32015\); only filters of HDF5 and h5py are allowed here",
    ),
    "scaled integers": (
        lambda file, _: file.create_dataset("x", data=VALUES.astype("i4"), scaleoffset=5),
        "x",
        "needs the filter 6; only filters",
    ),
    "35 TB": (terabytes, "x", "declares 35000000000000 bytes, but the file holds only 0"),
    "35 TB in chunks": (terabytes_in_chunks, "x", "declares 35000000000000 bytes"),
    "one chunk of many": (one_chunk_of_many, "x", "declares 800000000 bytes"),
    "lzf of much": (lzf_of_much, "x", "declares 8000000 bytes"),
    "a giant chunk": (a_giant_chunk, "x", "declares 2147483648 bytes"),
    "a group": (lambda file, _: file.create_group("x"), "x", "is not a dataset"),
    "nothing": (lambda file, _: None, "x", "there is no dataset"),
    "a dataset as a folder": (
        lambda file, _: file.create_dataset("x", data=VALUES),
        "x/y",
        "there is no dataset",
    ),
    "the place itself": (
        lambda file, _: file.create_dataset("x", data=VALUES),
        "./x",
        "there is no dataset",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused(path, tmp_path, attack):
    """The file is real, h5py would follow it; ConfigError says what it is."""
    make, name, text = ATTACKS[attack]
    with h5py.File(path, "w") as file:
        make(file, tmp_path)
    if attack == "35 TB":
        assert path.stat().st_size < 4096
    with pytest.raises(ConfigError, match=text):
        read(path, name)


def test_the_attacks_are_real(path, tmp_path):
    """What plain h5py does with two of them."""
    with h5py.File(path, "w") as file:
        ATTACKS["external storage"][0](file, tmp_path)
        file["a"] = h5py.ExternalLink("secret.h5", "/")
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = VALUES
    with h5py.File(path) as file:
        assert (file["a/x"][...] == VALUES).all()
        assert file["x"][:4].tobytes() == Path("/etc/passwd").read_bytes()[:4]


def test_a_contiguous_dataset_that_ends_behind_the_file(path):
    """The place of the numbers is changed in the file: HDF5 itself would give zeros or fail."""
    with h5py.File(path, "w", libver=("earliest", "v108")) as file:
        file["x"] = VALUES
        offset = file["x"].id.get_offset()
    data = path.read_bytes()
    place = data.index(offset.to_bytes(8, "little") + (240).to_bytes(8, "little"))
    for at in (len(data) - 100, 2**50, 2**63):
        path.write_bytes(data[:place] + at.to_bytes(8, "little") + data[place + 8 :])
        with pytest.raises(ConfigError):
            read(path)


def test_only_regular_files_are_opened(path, tmp_path):
    """Nobody waits for a FIFO; a link is followed only where the user may name one."""
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read(path)
    path.unlink()
    with h5py.File(tmp_path / "real.h5", "w") as file:
        file["x"] = VALUES
    path.symlink_to(tmp_path / "real.h5")
    with pytest.raises(ConfigError, match="cannot be opened"):
        read(path)
    assert (read(path, follow=True) == VALUES).all()
    folder = os.open(tmp_path, os.O_RDONLY)
    assert (read("real.h5", folder=folder) == VALUES).all()
    os.close(folder)
    for bad in (tmp_path, tmp_path / "none.h5", "/dev/zero"):
        with pytest.raises(ConfigError, match=r"cannot be opened|not a regular"):
            read(bad)
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(ConfigError, match="not an HDF5 file"):
        read(tmp_path / "text.h5")


def test_no_descriptor_is_left(path):
    with h5py.File(path, "w") as file:
        external_link(file, path.parent)
    gc.collect()  # what other tests have left
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ConfigError):
            read(path)
        with pytest.raises(ConfigError):
            untrusted_hdf5.open_untrusted(path.parent / "none")
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_versions_with_known_holes_are_named(path, monkeypatch):
    """Once in the event log of a process, by version and numbers."""
    monkeypatch.setattr(h5py.version, "hdf5_version_tuple", (2, 2, 0))
    assert untrusted_hdf5.known_holes() is None
    monkeypatch.setattr(h5py.version, "hdf5_version_tuple", (2, 1, 9))
    assert "CVE-2026-17572" in untrusted_hdf5.known_holes()
    untrusted_hdf5._report_holes.cache_clear()
    with h5py.File(path, "w") as file:
        file["x"] = VALUES
    events.recent.clear()
    read(path)
    read(path)
    assert [kind for _, kind, _ in events.recent] == ["hdf5_known_holes"]


CHILD = """
import random, sys
from pathlib import Path
from mpidist import untrusted_hdf5
from mpidist.errors import ConfigError
path, rng = Path(sys.argv[1]), random.Random(5)
good, refused = path.read_bytes(), 0
for _ in range(300):
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 4])):
        data[rng.randrange(len(data))] = rng.choice([0, 1, 255, rng.randrange(256)])
    path.write_bytes(data[: rng.choice([len(data), len(data), rng.randrange(len(data))])])
    try:
        with untrusted_hdf5.open_untrusted(path) as file:
            for name in ("a/x", "y"):
                untrusted_hdf5.checked_dataset(file, name)
    except ConfigError:
        refused += 1
print(refused)
"""


def test_damaged_files_end_in_one_kind_of_error(path):
    """300 mutations in a process of their own: it lives, and nothing but ConfigError comes out."""
    with h5py.File(path, "w") as file:
        file.create_dataset("a/x", data=VALUES, chunks=(5, 2), compression=9, shuffle=True)
        file["y"] = VALUES
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
