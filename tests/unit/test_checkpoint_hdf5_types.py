"""The types that shard files name without the HDF5 library are those of the library."""

import subprocess
import sys

import h5py
import numpy as np
import pytest

from mpidist.checkpoint.format import hdf5_layout

TYPES = [f"{order}{kind}{size}" for order in "<>" for kind, sizes in
         (("i", (1, 2, 4, 8)), ("u", (1, 2, 4, 8)), ("f", (2, 4, 8)), ("c", (8, 16)))
         for size in sizes]  # fmt: skip


@pytest.mark.parametrize("name", [*TYPES, "|b1"])
def test_numbers(name):
    dtype = np.dtype(name)
    assert hdf5_layout._type(dtype) == h5py.h5t.py_create(dtype, logical=True).encode()[2:]


def test_texts():
    """But for their size, which is 16 bytes in a file."""
    kind = h5py.h5t.py_create(h5py.string_dtype(), logical=True).encode()[2:]
    assert kind[:4] + bytes([16, 0, 0, 0]) + kind[8:] == hdf5_layout._TEXT


PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
import mpidist as md
with md.CheckpointStore(MPI.COMM_SELF, sys.argv[1]) as store:
    store.save(1, {"w": np.ones(5, "f4"), "n": np.arange(3), "text": "word"})
    found = store.restore({"w": np.zeros(5, "f4"), "n": np.zeros(3, int), "text": ""})[1]
assert found["w"].sum() == 5
unused = {"h5py", "matplotlib", "sklearn", "mpidist.servers", "mpidist.training"}
print(*sorted(unused & set(sys.modules)))
"""


def test_a_store_of_numbers_does_not_wait_for_hdf5(tmp_path):
    """Importing h5py takes each rank 25 ms."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
