"""Export by all ranks: with parallel HDF5 each writes its rows, without it rank 0 writes all."""

import h5py
import ml_dtypes
import numpy as np
import pytest

import mpidist as md
from mpidist.checkpoint import export, export_together, restore
from mpidist.errors import CheckpointError, ConfigError, StorageError


def state_of(comm, step):
    """Arrays of every kind of rows: many, fewer than ranks, none, no axis; types without a name."""
    rng = np.random.default_rng(step)
    mine = np.full((2, 3), comm.rank + step, "f4")
    return {
        "w": rng.standard_normal((7, 4)),
        "few": np.arange(2.0),
        "none": np.zeros((0, 3), "f4"),
        "scalar": np.array(step + 0.5),
        "half": rng.standard_normal((5, 2)).astype(ml_dtypes.bfloat16),
        "names": np.array(["a", "b\u00fc", "", "ccc"]),
        "when": np.array([1, 2, 3], "M8[s]"),
        "box": md.Shard(mine, (2 * comm.size, 3), (2 * comm.rank, 0)),
        "more": {"lr": 0.1, "step": step},
    }


def content(path):
    with h5py.File(path) as file:
        return {name: (one.shape, one[()]) for name, one in file.items()}


class Together:
    """Stands for h5py.File of parallel HDF5: what ranks write of one file comes together at close.

    It holds ranks to the same rule: all of them make the same data sets in the same order.
    """

    def __init__(self, path, mode, driver, comm):
        assert (mode, driver) == ("w-", "mpio")
        self.path, self.comm, self.made = path, comm, []

    def create_dataset(self, name, shape=None, dtype=None, data=None):
        if data is not None:
            shape, dtype = data.shape, data.dtype
        self.made.append((name, shape, np.dtype(dtype), writes := []))

        class DataSet:
            def __setitem__(self, where, values):
                writes.append((where, np.array(values)))

        if data is not None:
            writes.append((..., data))
        return DataSet()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        everyone = self.comm.gather(self.made)
        assert len(set(self.comm.allgather(str([one[:3] for one in self.made])))) == 1
        if self.comm.rank == 0:
            with File(self.path, "w-") as file:
                for number, (name, shape, dtype, _) in enumerate(self.made):
                    made = file.create_dataset(name, shape, dtype)
                    for rank in everyone:
                        for where, values in rank[number][3]:
                            made[where] = values
        self.comm.Barrier()


File = h5py.File


@pytest.fixture
def parallel(monkeypatch):
    """Parallel HDF5: the real one where h5py has it, else `Together`."""
    if not h5py.get_config().mpi:
        monkeypatch.setattr(h5py, "get_config", type("Config", (), {"mpi": True}))

        def opened(*words, **more):
            kind = Together if more.get("driver") == "mpio" else File
            return kind(*words, **more)

        monkeypatch.setattr(h5py, "File", opened)


@pytest.mark.ranks(2, 3)
def test_all_ranks_write_one_file(comm, folder, parallel):
    """The same file as that of one process, but for the room of text; a damaged step is passed."""
    with md.CheckpointStore(comm, folder / "store") as store:
        for step in (1, 2):
            store.save(step, state_of(comm, step))
    if comm.rank == 0:
        shard = folder / "store" / "step-000000000002" / "shard-00001.h5"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    comm.Barrier()
    assert export.export(comm, folder / "store", folder / "all.h5") == 1
    comm.Barrier()
    if comm.rank == 0:
        assert export.export_step(folder / "store", folder / "one.h5") == 1
        assert sorted(p.name for p in folder.iterdir()) == ["all.h5", "one.h5", "store"]
        one, every = content(folder / "one.h5"), content(folder / "all.h5")
        assert one.keys() == every.keys()
        for name, (shape, values) in one.items():
            assert every[name][0] == shape
            np.testing.assert_array_equal(every[name][1], values, err_msg=name)
    with pytest.raises(ConfigError, match=r"all\.h5 exists"):
        export.export(comm, folder / "store", folder / "all.h5")


@pytest.mark.ranks(2)
def test_a_rank_that_cannot_write(comm, folder, parallel, monkeypatch):
    """All ranks hear of it, and no file is there, nor a part of one."""
    with md.CheckpointStore(comm, folder / "store") as store:
        store.save(1, state_of(comm, 1))

    def full(*_):
        raise OSError(28, "No space left on device")

    if comm.rank == 1:
        monkeypatch.setattr(export_together, "_write", full)
    with pytest.raises(CheckpointError, match=r"rank 1 of 2.*No space left"):
        export.export(comm, folder / "store", folder / "all.h5")
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
            patch.setattr(restore, "opened", short)
        with pytest.raises(StorageError, match="rank 1 of 2"):
            export.export(comm, folder / "store", folder / "all.h5")
    comm.Barrier()
    if comm.rank == 0:
        (folder / "store" / "step-000000000002" / "shard-00001.h5").unlink()
    comm.Barrier()
    assert export.export(comm, folder / "store", folder / "all.h5") == 1
    said = capfd.readouterr().err
    assert ("damaged checkpoint passed over" in said) == (comm.rank == 0)


@pytest.mark.ranks(2)
def test_without_parallel_hdf5_rank_0_writes(comm, folder, capfd, monkeypatch):
    """And says so, in a line."""
    with md.CheckpointStore(comm, folder / "store") as store:
        store.save(1, state_of(comm, 1))
    monkeypatch.setattr(export.h5py, "get_config", type("Config", (), {"mpi": False}))
    assert export.export(comm, folder / "store", folder / "one.h5") == 1
    said = capfd.readouterr().err
    assert ("no parallel HDF5: rank 0 alone writes" in said) == (comm.rank == 0)
    assert export.export(comm, folder / "store", folder / "one.npz") == 1
    assert not capfd.readouterr().err
    comm.Barrier()
    if comm.rank == 0:
        assert content(folder / "one.h5")["few"][1].tolist() == [0, 1]
