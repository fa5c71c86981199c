"""index.h5, by which any HDF5 program reads a step; it is made only if the step is undamaged."""

import hashlib
import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from checkpoint_solo import Solo, equal, resumed, state_of, two_ranks
from forged_manifest import TABLE, body_of, forge

import mpidist as md
from mpidist import untrusted_hdf5
from mpidist.checkpoint.export.index import NAME, index
from mpidist.checkpoint.export.plain_file import EXTRAS, name_of
from mpidist.checkpoint.format.state import is_array, leaves
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import CheckpointError, ConfigError, NoCheckpoint

GOLDEN = Path(__file__).parent / "golden"


def same(path, state):
    """Whether plain h5py reads the arrays of `state`, to the last bit, through an index."""
    with h5py.File(path) as file:
        for keys, leaf in leaves(state):
            if is_array(leaf):
                found, leaf = file[name_of(keys)][...], np.asarray(leaf)
                raw = found.dtype == np.uint8 and found.ndim == leaf.ndim + 1
                assert raw or (found.dtype, found.shape) == (leaf.dtype, leaf.shape)
                assert found.tobytes() == leaf.tobytes(), keys
        values = json.loads(file[EXTRAS][...].tobytes())["values"]
    extras = {name_of(keys) for keys, leaf in leaves(state) if not is_array(leaf)}
    return values.keys() == extras


@pytest.fixture
def folder(tmp_path):
    with CheckpointStore(Solo(), tmp_path / "store") as store:
        for step in (1, 2):
            store.save(step, state_of(step))
    return tmp_path / "store"


def newest(folder):
    return folder / "step-000000000002"


def test_plain_h5py_reads_a_step(folder, tmp_path, monkeypatch):
    """From any folder, by relative names: a copy of the store has an index as well."""
    assert index(folder) == (2, newest(folder) / NAME)
    assert same(newest(folder) / NAME, state_of(2))
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    monkeypatch.chdir("/")
    assert same(newest(tmp_path / "copy") / NAME, state_of(2))
    monkeypatch.chdir(tmp_path / "copy")
    assert index("./", 1)[0] == 1
    assert same("step-000000000001/index.h5", state_of(1))
    assert equal(md.load("./"), state_of(2))
    with CheckpointStore(Solo(), "./") as store:
        assert store.verify() > 0


def test_pieces_of_two_ranks_and_format_1(tmp_path):
    """Flat ranges of an array are no boxes of it: each is a few."""
    store = two_ranks(tmp_path / "store", [1, 2])
    assert same(index(store, 1)[1], md.load(store, 1))
    shutil.copytree(GOLDEN / "format-1", tmp_path / "old")
    for step in (7, 14):
        assert same(index(tmp_path / "old", step)[1], md.load(tmp_path / "old", step))


def test_types_that_hdf5_has_no_name_for_are_bytes(tmp_path):
    state = {
        "half": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
        "text": np.array(["höhe"]),
        "one": np.array(1.5, ml_dtypes.bfloat16),
        "a/b": {"..": np.arange(2.0), "": np.ones(1), "\0": np.ones(2)},
    }
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state)
    _, out = index(tmp_path)
    assert same(out, state)
    with h5py.File(out) as file:
        assert file["half"].shape == (2, 3, 2)
        dtypes = json.loads(file[EXTRAS][...].tobytes())["dtypes"]
    assert dtypes == {"half": "bfloat16", "text": "<U4", "one": "bfloat16"}


def test_an_index_is_made_again_and_goes_with_its_step(folder):
    index(folder, 1)
    (newest(folder) / NAME).write_text("no index")
    index(folder)
    assert same(newest(folder) / NAME, state_of(2))
    assert [path.name for path in newest(folder).glob("index*")] == [NAME]
    (folder / "step-000000000001" / "index-01234567.part").write_text("of a killed process")
    with resumed(folder, keep=1) as store:
        store.save(3, state_of(3))
        store.verify(3)  # or the step that was restored stays
        store.save(4, state_of(4))
    assert {path.name for path in folder.glob("step*")} == {f"step-{k:012d}" for k in (3, 4)}


def test_damage_and_missing_sources_are_refused(folder, capfd):
    """HDF5 would give zeros for them, without an error."""
    index(folder)
    (newest(folder) / "shard-00000.h5").unlink()
    with h5py.File(newest(folder) / NAME) as file:
        assert not file["parameters/w"][...].any()  # why a restart never goes through it
    (newest(folder) / NAME).unlink()
    with pytest.raises(CheckpointError, match=r"step 2 in .* is damaged: .* is missing"):
        index(folder, 2)
    assert index(folder)[0] == 1
    shard = folder / "step-000000000001" / "shard-00000.h5"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(NoCheckpoint, match="fail their checksum"):
        index(folder)
    assert not (newest(folder) / NAME).exists()
    assert "passed over" in capfd.readouterr().err


def forged(folder, change):
    """Put another HDF5 file in the place of the newest shard; all digests are right again."""
    path, body = newest(folder) / "shard-00000.h5", body_of(folder)
    change(path)
    data = path.read_bytes()
    table = body_of(folder, TABLE)
    blocks = [data[at : at + body["block"]] for at in range(0, len(data), body["block"])]
    table.update(
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        crc32=[zlib.crc32(block) for block in blocks],
    )
    forge(folder, body, table)


def replaced(make):
    def change(path):
        with h5py.File(path, "a") as file:
            shape, dtype = file["0"].shape, file["0"].dtype
            del file["0"]
            make(file, shape, dtype)

    return change


FORGED = {
    "external storage": (
        lambda file, shape, dtype: file.create_dataset(
            "0", shape, dtype, external=[("/etc/passwd", 0, h5py.h5f.UNLIMITED)]
        ),
        "lies in other files",
    ),
    "an external link": (
        lambda file, *_: file.update({"0": h5py.ExternalLink("/tmp/other.h5", "0")}),
        "is a link",
    ),
    "another shape": (
        lambda file, shape, dtype: file.create_dataset("0", data=np.ones(shape[::-1], dtype)),
        "is not",
    ),
    "other numbers": (
        lambda file, shape, dtype: file.update(
            {name: np.ones(shape, dtype) for name in ("where it was", "0")}
        ),
        "is not",
    ),
    "chunks": (
        lambda file, shape, dtype: file.create_dataset(
            "0", data=np.ones(shape, dtype), chunks=True
        ),
        "is not",
    ),
    "35 TB": (
        lambda file, shape, dtype: file.create_dataset("0", (10**12, 35), "u1"),
        "declares 35000000000000 bytes",
    ),
    "nothing": (lambda *_: None, "there is no dataset"),
}


@pytest.mark.parametrize("attack", FORGED)
def test_a_shard_that_shows_hdf5_something_else(folder, attack, capfd):
    """The digests are right, the offsets of the manifest hold; HDF5 would read other numbers."""
    make, text = FORGED[attack]
    forged(folder, replaced(make))
    assert md.load(folder)["step"] == 2  # no HDF5 is parsed, so nothing is different for it
    with pytest.raises(CheckpointError, match=text):
        index(folder, 2)
    assert not (newest(folder) / NAME).exists()


def test_the_command_names_the_holes_of_hdf5(folder, monkeypatch):
    """It parses HDF5, so it says once what the version here lets through."""
    done = subprocess.run(
        [sys.executable, "-m", "mpidist", "checkpoint", "index", folder, "--step", "1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"step 1 of {folder} -> ")
    assert same(folder / "step-000000000001" / NAME, state_of(1))
    assert done.stderr.count("CVE-2025-44904") == bool(untrusted_hdf5.known_holes())


@pytest.mark.parametrize("state", [{EXTRAS: np.ones(3)}, {EXTRAS: {"x": np.ones(3)}}])
def test_an_array_that_is_named_like_the_extras(tmp_path, state):
    with CheckpointStore(Solo(), tmp_path) as store:
        store.save(1, state)
    with pytest.raises(ConfigError, match="the name of the extras"):
        index(tmp_path)
    assert not list(tmp_path.rglob("index*"))
