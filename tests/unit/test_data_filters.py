"""HDF5 filters of other packages are used if installed; if not, the error says what to install."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from mpidist import data, untrusted_hdf5
from mpidist.data.skip_bad import BadRecordFilter
from mpidist.errors import ConfigError

ZSTD = 32015
VALUES = np.random.default_rng(0).random((500, 6)).astype(np.float32)

#: A stand-in for hdf5plugin: importing it registers a filter of that number, which flips all bits.
PLUGIN = """
import ctypes, h5py

@ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p,
                  ctypes.c_size_t, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def flip(flags, count, values, nbytes, size, buffer):
    room = (ctypes.c_ubyte * nbytes).from_address(buffer[0])
    room[:] = bytes(byte ^ 255 for byte in room)
    return nbytes

class Class(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("id", ctypes.c_int), ("encodes", ctypes.c_uint),
                ("decodes", ctypes.c_uint), ("name", ctypes.c_char_p), ("apply", ctypes.c_void_p),
                ("local", ctypes.c_void_p), ("filter", ctypes.c_void_p)]

it = Class(1, 32015, 1, 1, b"flip", None, None, ctypes.cast(flip, ctypes.c_void_p))
h5py.h5z.register_filter(ctypes.addressof(it))
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """hdf5plugin is not here; calling what is given puts a stand-in where Python finds it."""
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)

    def install():
        (tmp_path / "hdf5plugin.py").write_text(PLUGIN)
        monkeypatch.delitem(sys.modules, "hdf5plugin")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    if h5py.h5z.filter_avail(ZSTD):
        h5py.h5z.unregister_filter(ZSTD)


@pytest.fixture
def path(tmp_path):
    """A file that a program with the plugin has written."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    code = (
        "import sys, plugin, h5py, numpy\n"
        "file = h5py.File(sys.argv[1], 'w')\n"
        "rows = numpy.random.default_rng(0).random((500, 6)).astype('f4')\n"
        "file.create_dataset('inputs', data=rows, chunks=(64, 6), compression=32015)\n"
        "file['labels'] = numpy.arange(500)\n"
        "file.close()"
    )
    path = tmp_path / "data.h5"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=environment)
    return path


def test_a_filter_that_is_not_here(path, plugin):
    """One line that names it and says what to install."""
    with pytest.raises(ConfigError) as caught:
        data.HDF5(path, ["inputs", "labels"])
    assert (
        "dataset 'inputs' needs the filter zstd (32015), which is not installed: "
        "pip install hdf5plugin" in str(caught.value)
    )
    assert "\n" not in str(caught.value)
    assert len(data.HDF5(path, ["labels"])) == 500, "what needs no filter is read"


def test_a_filter_of_hdf5plugin(path, plugin):
    """It is loaded when a file asks for it; files of strangers get it on request only."""
    plugin()
    with (
        untrusted_hdf5.open_untrusted(path) as file,
        pytest.raises(ConfigError, match="only filters of HDF5"),
    ):
        untrusted_hdf5.checked_dataset(file, "inputs")
    assert "hdf5plugin" not in sys.modules
    inputs, labels = data.HDF5(path, ["inputs", "labels"]).take(np.array([3, 499, 64, 63]))
    np.testing.assert_array_equal(inputs, VALUES[[3, 499, 64, 63]])
    assert labels.tolist() == [3, 499, 64, 63]


def test_szip_that_was_not_built(path, monkeypatch):
    """It is in HDF5 or it is not: nothing that could be installed beside it helps."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, compression="szip")
    monkeypatch.setattr(h5py.h5z, "get_filter_info", lambda code: 1)
    with pytest.raises(
        ConfigError, match=r"needs the filter szip \(4\), which is not installed: use another"
    ):
        data.HDF5(path, ["x"])


def test_a_damaged_chunk_of_lzf(path):
    """Its records are bad, and no others."""
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "x", data=VALUES, chunks=(100, 6), compression="lzf", shuffle=True, fletcher32=True
        )
        at = made.id.get_chunk_info(2).byte_offset
    raw = bytearray(path.read_bytes())
    raw[at + 17] ^= 1
    path.write_bytes(raw)
    taken = BadRecordFilter(data.HDF5(path, ["x"])).take(np.arange(195, 305))
    assert [record.index for record in taken.bad] == list(range(200, 300))


def test_the_real_hdf5plugin(tmp_path):
    """Each of its filters, in a process of its own, which has not imported it to read."""
    pytest.importorskip("hdf5plugin", reason="no hdf5plugin here")
    written = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert written.returncode == 0, written.stderr
    read = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert read.returncode == 0, read.stderr
    assert len(read.stdout.split()) >= 6, "filters without loss"


REAL = """
import sys, h5py, hdf5plugin, numpy as np
values = np.random.default_rng(0).integers(0, 9, (500, 16)).astype("f4")
zeros = np.zeros((4096, 256), "f4")
for make in (hdf5plugin.Blosc, hdf5plugin.Blosc2, hdf5plugin.BZip2, hdf5plugin.LZ4,
             hdf5plugin.Bitshuffle, hdf5plugin.Zstd):
    with h5py.File(f"{sys.argv[1]}/{make.__name__}.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(64, 16), **make())
        file.create_dataset("zeros", data=zeros, chunks=(4096, 256), **make())
"""
READ = """
import sys, pathlib, numpy as np
from mpidist import data
values = np.random.default_rng(0).integers(0, 9, (500, 16)).astype("f4")
for path in pathlib.Path(sys.argv[1]).glob("*.h5"):
    order = np.random.default_rng(1).permutation(500)
    np.testing.assert_array_equal(data.HDF5(path, ["x"]).take(order)[0], values[order])
    assert not data.HDF5(path, ["zeros"]).take([5, 4000])[0].any()
    print(path.stem)
"""
