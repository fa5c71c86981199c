"""Export: with parallel HDF5 each rank writes its rows; without it rank 0 writes all.

The h5py of PyPI has no parallel HDF5. For the tests named ``real``, ``make test-hdf5`` builds an
h5py with it.
"""

from contextlib import contextmanager

import h5py
import ml_dtypes
import numpy as np
import pytest

import mpidist as md
from mpidist import events
from mpidist.checkpoint.export import export_store, parallel_hdf5, plain_file
from mpidist.checkpoint.format.state import leaves
from mpidist.checkpoint.read import restore
from mpidist.errors import ConfigError, StorageError


def state_of(comm, step):
    """Arrays of every kind of rows: many, fewer than ranks, none, no axis; types without a name."""
    rng = np.random.default_rng(step)
    whole = rng.standard_normal((2 * comm.size, 3 * comm.size)).astype("c8")
    rows, columns = (slice(n * comm.rank, n * (comm.rank + 1)) for n in (2, 3))
    last = slice(0, whole.size * (comm.rank == comm.size - 1))
    return {
        "w": rng.standard_normal((7, 4)),
        "few": np.arange(2.0),
        "none": np.zeros((0, 3), "f4"),
        "scalar": np.array(step + 0.5),
        "half": rng.standard_normal((5, 2)).astype("f2"),
        "bf16": rng.standard_normal((5, 2)).astype(ml_dtypes.bfloat16),
        "mask": rng.standard_normal((3, 2, 2)) > 0,
        "big-endian": np.array([1.5, np.nan, -0.0], ">f8"),
        "names": np.array(["a", "b\u00fc", "", "ccc"]),
        "when": np.array([1, 2, 3], "M8[s]"),
        "box": {
            "rows": md.Shard(whole[rows], whole.shape, (2 * comm.rank, 0)),
            "columns": md.Shard(whole[:, columns].copy(), whole.shape, (0, 3 * comm.rank)),
            "last": md.Shard(whole.reshape(-1)[last], whole.shape, 0),
        },
        "odd names": {
            name: np.arange(3) for name in ("a/b", "..", "", "%", "b\u00fc \n", "x" * 300)
        },
        "many": {str(i): np.full((i % 5, 2), i) for i in range(100)},
        "more": {"lr": 0.1, "step": step},
    }


def content(path):
    """All data sets, as text or bits: {name: (shape, what the elements are, elements)}."""
    found = {}

    def take(name, one):
        if isinstance(one, h5py.Dataset):
            values = np.asarray(one[()])
            if one.dtype.kind == "S":  # it has the room that it needs, or more
                found[name] = one.shape, "S", values.tolist()
            else:
                found[name] = one.shape, one.dtype, values.tobytes()

    with File(path) as file:
        file.visititems(take)
    return found


class Together:
    """Stands for h5py.File of parallel HDF5: what ranks write comes together at close."""

    def __init__(self, path, mode, driver, comm):
        assert (mode, driver) == ("r+", "mpio")
        self.path, self.comm, self.writes = path, comm, []

    def __getitem__(self, name):
        writes = self.writes
        with File(self.path, "r") as file:  # else it is given room, by all ranks together
            assert file[name].id.get_offset() is not None, name

        class DataSet:
            def __setitem__(self, where, values):
                writes.append((name, where, np.array(values)))

        return DataSet()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        everyone = self.comm.gather(self.writes)
        if self.comm.rank == 0:
            with File(self.path, "r+") as file:
                for name, where, values in (write for writes in everyone for write in writes):
                    file[name][where] = values
        self.comm.Barrier()


File = h5py.File


@pytest.fixture(params=["stand-in", "real"])
def parallel(request, monkeypatch):
    """Parallel HDF5: `Together`, or the real one where h5py has it."""
    if request.param == "stand-in":
        monkeypatch.setattr(h5py, "get_config", type("Config", (), {"mpi": True}))

        def opened(*words, **more):
            kind = Together if more.get("driver") == "mpio" else File
            return kind(*words, **more)

        monkeypatch.setattr(h5py, "File", opened)
    elif not h5py.get_config().mpi:
        pytest.skip("no parallel HDF5 here")


@pytest.mark.ranks(3, further=(2, 4))
def test_all_ranks_write_one_file(comm, folder, parallel):
    """The same file as that of one process, bit by bit; a damaged step is passed over.

    Issue 4, point 5.
    """
    with md.CheckpointStore(comm, folder / "store") as store:
        for step in (1, 2):
            store.save(step, state_of(comm, step))
    if comm.rank == 0:
        shard = folder / "store" / "step-000000000002" / "shard-00001.h5"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    comm.Barrier()
    assert export_store.export(comm, folder / "store", folder / "all.h5") == 1
    comm.Barrier()
    if comm.rank == 0:
        assert plain_file.export_step(folder / "store", folder / "one.h5") == 1
        assert sorted(p.name for p in folder.iterdir()) == ["all.h5", "one.h5", "store"]
        one, every = content(folder / "one.h5"), content(folder / "all.h5")
        assert len(one) > 100
        assert one == every
    with pytest.raises(ConfigError, match=r"all\.h5 exists"):
        export_store.export(comm, folder / "store", folder / "all.h5")


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("arrays", [{}, {"x": np.array(0.5)}], ids=["none", "one number"])
def test_ranks_that_write_nothing(comm, folder, parallel, arrays):
    with md.CheckpointStore(comm, folder / "store") as store:
        store.save(1, {**arrays, "note": "long " * 20_000})
    assert export_store.export(comm, folder / "store", folder / "all.h5") == 1
    comm.Barrier()
    if comm.rank == 0:
        plain_file.export_step(folder / "store", folder / "one.h5")
        assert content(folder / "one.h5") == content(folder / "all.h5")


@pytest.mark.ranks(2)
def test_no_write_of_more_than_hdf5_takes(comm, folder, parallel, monkeypatch):
    """HDF5 1.10 fails beyond 2 GiB in one call, be it one row. Real: "size to size_i"."""
    monkeypatch.setattr(parallel_hdf5, "AT_ONCE", 40)
    state = {
        "row": np.arange(33.0).reshape(1, 11, 3),
        "rows": np.arange(7.0),
        "t": np.array("long" * 9),
    }
    with md.CheckpointStore(comm, folder / "store") as store:
        store.save(1, state)
    export_store.export(comm, folder / "store", folder / "all.h5")
    comm.Barrier()
    if comm.rank == 0:
        plain_file.export_step(folder / "store", folder / "one.h5")
        assert content(folder / "one.h5") == content(folder / "all.h5")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("when", ["in the midst", "at close"])
def test_a_rank_that_cannot_write(comm, folder, parallel, monkeypatch, when):
    """All ranks hear of it, and no file is there, nor a part of one."""
    with md.CheckpointStore(comm, folder / "store") as store:
        store.save(1, state_of(comm, 1))

    def full(*_):
        raise OSError(28, "No space left on device")

    opened = h5py.File

    @contextmanager
    def full_at_close(*words, **more):
        with opened(*words, **more) as file:
            yield file
        if more.get("driver") == "mpio":
            full()

    if comm.rank == 1 and when == "in the midst":
        monkeypatch.setattr(parallel_hdf5, "_write", full)
    elif comm.rank == 1:
        monkeypatch.setattr(h5py, "File", full_at_close)
    with pytest.raises(StorageError, match=r"rank 1 of 2.*No space left"):
        export_store.export(comm, folder / "store", folder / "all.h5")
    comm.Barrier()
    assert [p.name for p in folder.iterdir()] == ["store"]


@pytest.mark.ranks(2)
def test_no_older_step_for_want_of_memory(comm, folder, parallel, monkeypatch, capfd):
    """Only a damaged step is passed over, and that is said, whatever of it is damaged."""
    with md.CheckpointStore(comm, folder / "store") as store:
        for step in (1, 2):
            store.save(step, state_of(comm, step))

    def short(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(restore, "open_reader", short)
        with pytest.raises(StorageError, match="rank 1 of 2"):
            export_store.export(comm, folder / "store", folder / "all.h5")
    comm.Barrier()
    if comm.rank == 0:
        (folder / "store" / "step-000000000002" / "shard-00001.h5").unlink()
    comm.Barrier()
    assert export_store.export(comm, folder / "store", folder / "all.h5") == 1
    said = capfd.readouterr().err
    assert ("damaged checkpoint passed over" in said) == (comm.rank == 0)


@pytest.mark.ranks(2)
def test_without_parallel_hdf5_rank_0_writes(comm, folder, capfd, monkeypatch):
    """And says so, in a line."""
    with md.CheckpointStore(comm, folder / "store") as store:
        store.save(1, state_of(comm, 1))
    monkeypatch.setattr(export_store.h5py, "get_config", type("Config", (), {"mpi": False}))
    assert export_store.export(comm, folder / "store", folder / "one.h5") == 1
    said = capfd.readouterr().err
    assert ("no parallel HDF5: rank 0 alone writes" in said) == (comm.rank == 0)
    assert export_store.export(comm, folder / "store", folder / "one.npz") == 1
    monkeypatch.setattr(events, "VERBOSITY", 0)
    assert export_store.export(comm, folder / "store", folder / "two.h5") == 1
    assert not capfd.readouterr().err
    comm.Barrier()
    if comm.rank == 0:
        assert content(folder / "one.h5")["few"] == ((2,), "f8", np.arange(2.0).tobytes())


@pytest.mark.ranks(1, 3)
def test_all_ranks_read_the_newest_good_step(comm, folder, capfd):
    """What parallel HDF5 then writes; reading needs none. Damage is passed over, and said once."""
    with md.CheckpointStore(comm, folder) as store:
        for step in (1, 2, 3):
            store.save(step, state_of(comm, step))
    if comm.rank == 0:
        (folder / "step-000000000003" / "MANIFEST.json").write_bytes(b"no manifest")
        (folder / "step-000000000002" / "shard-00000.h5").unlink()
    comm.Barrier()
    step, tensors, state = parallel_hdf5._read(comm, str(folder), None)
    assert step == 1
    assert {tensor.path for tensor in tensors} <= {path for path, _ in leaves(state)} or comm.rank
    said = capfd.readouterr().err
    for number in (2, 3):
        assert said.count(f"step-00000000000{number}: ") == (comm.rank == 0)
    with pytest.raises(md.CheckpointError, match=r"step 3 in .* is damaged"):
        parallel_hdf5._read(comm, str(folder), 3)
    if comm.rank == 0:
        (folder / "step-000000000001" / "shard-00000.h5").unlink()
    comm.Barrier()
    with pytest.raises(md.NoCheckpoint, match=r"no good .*; tried step-.*3.*step-.*1"):
        parallel_hdf5._read(comm, str(folder), None)
