"""With damaged or missing steps, branches and histories, all ranks restore the same good step."""

import time

import numpy as np
import pytest
from mpi4py import MPI
from test_checkpoint_store import blank, everywhere, names, same, state_of

import mpidist as md
from mpidist.checkpoint.format.state import Shard
from mpidist.checkpoint.read import restore
from mpidist.checkpoint.store import CheckpointStore
from mpidist.checkpoint.write import save
from mpidist.checkpoint.write import shard_writer as shard
from mpidist.errors import (
    CheckpointError,
    ConfigError,
    ForeignCheckpoint,
    MismatchError,
    NoCheckpoint,
)


@pytest.mark.ranks(1, 3)
def test_damage_on_one_rank_is_a_fallback_of_all(comm, folder, capfd):
    """A block that only one rank reads is bad: all ranks go back to the step before, once said."""
    flat = Shard(np.arange(comm.size * 1000.0) + comm.rank, (comm.size * 1000,), 0)
    part = slice(comm.rank * 1000, comm.rank * 1000 + 1000)
    mine = Shard(flat.array[part].copy(), flat.global_shape, comm.rank * 1000)
    with CheckpointStore(comm, folder) as store:
        store.save(1, {"x": mine})
        store.save(2, {"x": Shard(mine.array + 1, mine.global_shape, mine.start)})
        last = folder / "step-000000000002" / f"shard-{comm.size - 1:05d}.h5"
        if comm.rank == 0:
            data = bytearray(last.read_bytes())
            data[len(data) // 2] ^= 4
            last.write_bytes(data)
        comm.Barrier()
        like = Shard(np.zeros(1000), mine.global_shape, mine.start)
        step, _ = store.restore({"x": like})
        assert step == 1
        assert (like.array == mine.array).all()
        said = comm.gather(capfd.readouterr().err)
        if comm.rank == 0:
            assert "".join(said).count("damaged checkpoint passed over") == 1
            assert last.name in said[0]
        text = everywhere(comm, CheckpointError, lambda: store.verify(2))
        assert "fail their checksum" in text
        text = everywhere(comm, CheckpointError, lambda: store.restore({"x": like}, step=2))
        assert "step 2" in text
        assert "fail their checksum" in text
        # Both are bad now, and only one is found out before arrays are changed.
        if comm.rank == 0:
            (folder / "step-000000000001" / "shard-00000.h5").unlink()
        comm.Barrier()
        text = everywhere(comm, CheckpointError, lambda: store.restore({"x": like}))
        assert "step-000000000002" in text
        assert "step-000000000001: shard-00000.h5 is missing" in text
        assert "reset their values" in text
        comm.Barrier()
        if comm.rank == 0:
            last.unlink()
        comm.Barrier()
        like.array[...] = 8
        everywhere(comm, NoCheckpoint, lambda: store.restore({"x": like}))
        assert (like.array == 8).all()


@pytest.mark.ranks(2, 3)
def test_an_older_step_of_another_model(comm, folder):
    """Arrays hold parts of the damaged step by then, and the error of all ranks says so."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, {"w": np.ones(3)})
        store.save(2, {"w": np.ones(3000)})
        if comm.rank == 0:
            path = folder / "step-000000000002" / f"shard-{comm.size - 1:05d}.h5"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        comm.Barrier()
        like = {"w": np.zeros(3000)}
        text = everywhere(comm, ForeignCheckpoint, lambda: store.restore(like))
        assert "w has shape (3,) in the checkpoint, (3000,) here" in text
        assert "reset their values before use" in text
        text = everywhere(comm, ForeignCheckpoint, lambda: store.restore(like, step=1))
        assert "reset their values" not in text


@pytest.mark.ranks(3)
@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_that_passes_no_state(comm, folder, without):
    """It would take other arrays than all others, by other calls; {} says that it wants none."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, {"w": np.ones(3)})
        like = None if comm.rank == without else {"w": np.zeros(3)}
        text = everywhere(comm, MismatchError, lambda: store.restore(like))
        assert f"like is None on rank {without} and a state on rank {1 - without}" in text
        got = store.restore(like or {})[1]
        assert len(got) == int(comm.rank != without)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("writers", "state"), [(1, state_of(1)), ("all", {})])
def test_who_writes_nothing_comes_late(comm, folder, monkeypatch, writers, state):
    """The step is committed without it, and the folder has its last name by then: no error."""
    committed, write = folder / "step-000000000001", save.Save.write

    def late(self):
        began = time.monotonic()
        while not committed.exists() and time.monotonic() - began < 20:
            time.sleep(0.01)
        write(self)

    if comm.rank == 2:
        monkeypatch.setattr(save.Save, "write", late)
    with CheckpointStore(comm, folder, writers=writers) as store:
        store.save_async(1, state)
        store.wait()
        assert store.all_steps() == [1]


@pytest.mark.ranks(2)
def test_resave_after_a_fallback(comm, folder):
    """Past damaged steps a branch begins, and they go; the last that was restored never does."""
    with CheckpointStore(comm, folder, keep=1) as store:
        store._keep.newest = None
        for step in (1, 2, 3):
            store.save(step, state_of(step))
        store.wait()
        store._keep.newest = 1
        if comm.rank == 0:
            for step in (2, 3):
                path = folder / f"step-{step:012d}" / "shard-00001.h5"
                path.write_bytes(path.read_bytes()[:-1])
        comm.Barrier()
        assert store.restore(blank())[0] == 1
        store.save(2, state_of(2))
        assert store.restore(blank())[0] == 2
        store.save(3, state_of(3))
        assert store.restore(blank())[0] == 3
        comm.Barrier()
        if comm.rank == 0:
            kept = ["step-000000000002-h1", "step-000000000003-h1"]
            assert names(folder) == ["history-1-after-0-step-1", *kept]


@pytest.mark.ranks(2)
def test_a_rank_without_memory_is_an_error_of_all(comm, folder, monkeypatch):
    """A failing copy, before the background write, is reported by wait() on all ranks."""
    with CheckpointStore(comm, folder) as store:

        def fail(*_, **__):
            raise MemoryError("no host memory")

        if comm.rank == 1:
            monkeypatch.setattr(shard, "copied", fail)
        store.save_async(1, state_of(1))
        assert "no host memory" in everywhere(comm, CheckpointError, store.wait)
        store.wait()
        assert store.all_steps() == []


@pytest.mark.ranks(1)
def test_a_store_forgets_steps_that_are_gone(comm, folder):
    """R41: what it knows of steps is as long as what it keeps."""
    with md.CheckpointStore(comm, folder, keep=2) as store:
        for step in range(8):
            store.save(step, {"w": np.ones(3)})
        store.restore()
        assert len(store._keep._good) <= 3


# --------------------------------------------------------------------------------- histories


@pytest.mark.ranks(3)
def test_a_save_that_continues_nothing_is_refused_on_all_ranks(comm, folder):
    """Issue 10, line 1: the steps of the run before would win over this one's."""
    for fresh, steps in ((False, (1000, 2000)), (True, (10, 20))):
        with CheckpointStore(comm, folder, fresh=fresh) as store:
            for step in steps:
                (store.save if step % 20 else store.save_async)(step, state_of(step))
    with CheckpointStore(comm, folder) as store:
        text = everywhere(comm, CheckpointError, lambda: store.save(1, state_of(1)))
        assert "good steps up to 20" in text
        assert "restore()" in text
        assert "fresh=True" in text
        assert "\n" not in text
        same(store.restore(history=0)[1], 2000)
        same(store.restore()[1], 20)
        store.save(30, state_of(30))
        assert store.all_steps() == [10, 20, 30]
        assert store.all_steps(history=0) == [1000, 2000]
        everywhere(comm, NoCheckpoint, lambda: store.all_steps(history=5))
        everywhere(comm, NoCheckpoint, lambda: store.delete(1000))
        store.delete(1000, history=0)
        assert store.all_steps(history=0) == [2000]
        everywhere(comm, ConfigError, lambda: store.restore(history=-1))


@pytest.mark.ranks(3)
def test_a_step_that_another_job_removes_while_it_is_restored(comm, folder, monkeypatch, capfd):
    """Issue 10, line 4: the newest by then is restored on all ranks, and no damage is told."""
    other = CheckpointStore(MPI.COMM_SELF, folder, keep=1) if comm.rank == 0 else None
    if other:
        other.save(1, state_of(1))
    left, real = [2], restore.Restore._fill

    def attempt(self, answer, *rest):
        step = answer.entry.step + 1
        comm.Barrier()
        if other and left[0]:
            left[0] -= 1
            other.save(step, state_of(step))
            other.wait()
        comm.Barrier()
        return real(self, answer, *rest)

    monkeypatch.setattr(restore.Restore, "_fill", attempt)
    comm.Barrier()
    with CheckpointStore(comm, folder) as store:
        step, state = store.restore(blank())
        assert step == 3
        same(state, 3)
        assert store.verify() > 0
    assert "damaged" not in capfd.readouterr().err
    if other:
        other.close()
