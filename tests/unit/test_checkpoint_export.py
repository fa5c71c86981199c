"""Export to one file: safetensors exactly as its format says, and states that are refused."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from checkpoint_solo import Solo, equal, state_of, two_ranks

from mpidist.checkpoint.export import export_store, plain_file, safetensors
from mpidist.checkpoint.export.plain_file import EXTRAS
from mpidist.checkpoint.store import CheckpointStore
from mpidist.errors import ConfigError, NoCheckpoint


def read_safetensors(path):
    """The arrays of a safetensors file by the letter of the format, and its metadata."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 8 == 0
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    named = {name: kind for kind, name in safetensors.DTYPES.items()}
    arrays, at = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == at  # no hole, no overlap
        kind = named[entry["dtype"]]
        dtype = np.dtype(getattr(ml_dtypes, kind, None) or kind)
        assert begin % dtype.itemsize == 0
        arrays[name] = np.frombuffer(data[start + begin : start + end], dtype)
        arrays[name] = arrays[name].reshape(entry["shape"])
        at = end
    assert start + at == len(data)
    return arrays, metadata


def everything():
    """An array of each type that the format has a name for, and some of difficult shapes."""
    rng = np.random.default_rng(7)
    arrays = {}
    for kind in safetensors.DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, kind, None) or kind)
        bits = rng.integers(0, 2 if kind == "bool" else 256, 15 * dtype.itemsize, np.uint8)
        arrays[kind] = bits.view(dtype).reshape(3, 5)
    arrays["scalar"] = np.array(2.5)
    arrays["nothing"] = np.zeros((0, 3), "f4")
    arrays["strided"] = np.arange(12.0).reshape(3, 4).T
    arrays["big"] = np.arange(5, dtype=">i4")
    return arrays


def same_values(one, other):
    other = other.astype(other.dtype.newbyteorder("<"))
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def test_safetensors_holds_every_type(tmp_path):
    out = tmp_path / "one.safetensors"
    plain_file.write({"a": everything(), "step": 3}, out)
    arrays, metadata = read_safetensors(out)
    assert set(arrays) == {f"a/{name}" for name in everything()}
    for name, array in everything().items():
        assert same_values(arrays[f"a/{name}"], array), name
    assert json.loads(metadata[EXTRAS])["values"] == {"step": 3}


def test_the_safetensors_package_agrees(tmp_path):
    """The format's own library reads what was written, and its file reads like ours."""
    theirs = pytest.importorskip("safetensors.numpy", reason="no safetensors package here")
    out = tmp_path / "one.safetensors"
    plain_file.write(everything(), out)
    # Its NumPy side knows none of the types of eight bits, and none of the others' bits.
    known = {n: a for n, a in everything().items() if not n.startswith(("float8", "bfloat"))}
    plain_file.write(known, tmp_path / "known.safetensors")
    found = theirs.load_file(tmp_path / "known.safetensors")
    assert all(same_values(found[name], array) for name, array in known.items())
    assert found.keys() == known.keys()
    from safetensors import safe_open

    with safe_open(out, "np") as file:
        assert set(file.keys()) == set(everything())
        assert set(file.metadata()) == {EXTRAS}
    plain = {name: np.ascontiguousarray(a) for name, a in known.items() if name != "big"}
    theirs.save_file(plain, tmp_path / "theirs.safetensors", {"x": "y"})
    arrays, metadata = read_safetensors(tmp_path / "theirs.safetensors")
    assert metadata == {"x": "y"}
    assert all(same_values(arrays[name], array) for name, array in plain.items())


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"x": np.zeros(2, "c16")}, "x is of dtype complex128"),
        ({"t": np.array(["a"])}, "safetensors has no name"),
        ({"__metadata__": np.zeros(2)}, "the name of the extras"),
        ({"__extras__": np.zeros(2)}, "the name of the extras"),
    ],
)
def test_what_safetensors_cannot_hold(tmp_path, state, text):
    """Refused by name, and no file is left."""
    with pytest.raises(ConfigError, match=text):
        plain_file.write(state, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_two_ranks(tmp_path):
    store = two_ranks(tmp_path / "store", [1, 2])
    for suffix in plain_file.SUFFIXES:
        assert export_store.export(Solo(), store, tmp_path / f"one{suffix}", step=1) == 1
        assert plain_file.export_step(store, tmp_path / f"new{suffix}") == 2
    from checkpoint_solo import split_state

    arrays, _ = read_safetensors(tmp_path / "one.safetensors")
    assert equal(arrays["parameters/w"], split_state(1)["parameters"]["w"])


def test_nothing_is_written_where_nothing_is_good(tmp_path):
    with CheckpointStore(Solo(), tmp_path / "store") as store:
        store.save(1, state_of(1))
    (tmp_path / "store" / "step-000000000001" / "shard-00000.h5").unlink()
    with pytest.raises(NoCheckpoint):
        export_store.export(Solo(), tmp_path / "store", tmp_path / "x.npz")
    assert not (tmp_path / "x.npz").exists()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    out, seen = tmp_path / "one.npz", []
    synced = os.fsync

    def fsync(descriptor):
        seen.append([path.name for path in tmp_path.iterdir()])
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    plain_file.write({"a": np.ones(3)}, out)
    [[partial]] = seen
    assert partial.startswith(".one.npz-")
    assert [path.name for path in tmp_path.iterdir()] == ["one.npz"]
