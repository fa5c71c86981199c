"""The store among ranks: failures are everybody's, mismatches are named, saves may overlap."""

import resource
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from until import wait_until

import mpidist as md
from mpidist.checkpoint.format.state import Shard
from mpidist.checkpoint.read import restore
from mpidist.checkpoint.storage import files, lock
from mpidist.checkpoint.store import CheckpointStore
from mpidist.checkpoint.write import save
from mpidist.checkpoint.write import shard_writer as shard
from mpidist.errors import (
    CheckpointError,
    ConfigError,
    ForeignCheckpoint,
    MismatchError,
    NoCheckpoint,
    ProtocolError,
)


def names(folder):
    """What lies in a store, but for the lock of those that are open."""
    return sorted(path.name for path in folder.iterdir() if path.name != lock.NAME)


def state_of(step):
    rng = np.random.default_rng(step)
    return {
        "parameters": {"w": rng.standard_normal((40, 9)), "b": rng.standard_normal(9)},
        "step": step,
        "losses": [0.5, float("nan"), None, {"name": "x"}],
    }


def blank():
    return {"parameters": {"w": np.zeros((40, 9)), "b": np.zeros(9)}, "step": -1}


def same(state, step):
    expected = state_of(step)
    assert state["step"] == step
    assert repr(state["losses"]) == repr(expected["losses"])
    for name, array in expected["parameters"].items():
        assert state["parameters"][name].tobytes() == array.tobytes()


def everywhere(comm, kind, work):
    """The text of the error that `work` raises on all ranks: of one class, the same text."""
    with pytest.raises(kind) as caught:
        work()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    assert caught.value.everywhere
    return texts[0]


@pytest.mark.ranks(1, 3)
def test_save_restore_keep(comm, folder):
    """R52, R53: what was saved comes back, in place, and only `keep` steps stay."""
    with CheckpointStore(comm, folder / "new" / "store", keep=2) as store:
        assert store.all_steps() == []
        assert store.latest_step() is None
        for step in (1, 2, 3):
            store.save(step, state_of(step))
        assert store.all_steps() == [2, 3]
        assert store.latest_step() == 3
        like = blank()
        step, state = store.restore(like)
        assert step == 3
        same(state, 3)
        assert state["parameters"]["w"] is like["parameters"]["w"]
        assert store.restore(blank(), step=np.int64(2))[0] == 2
        same(md.load(store.path), 3)
    store.close()
    with pytest.raises(ProtocolError, match="closed"):
        store.save(4, state_of(4))


@pytest.mark.ranks(2)
def test_async_gives_the_same_bytes(comm, folder):
    """R58: the copy is taken before the call returns; the files equal those of a plain save."""
    with CheckpointStore(comm, folder / "a") as store:
        state = state_of(5)
        store.save_async(5, state)
        for array in state["parameters"].values():
            array[...] = -7
        store.wait()
        assert store.all_steps() == [5]
        store.save_async(6, state_of(6))  # committed by close
    with CheckpointStore(comm, folder / "b") as store:
        store.save(5, state_of(5))
        store.save_async(6, state_of(6))
        assert store.restore(blank())[0] == 6
        store.save_async(7, state_of(7))
        store.save(8, state_of(8))
        assert store.all_steps() == [6, 7, 8]
    if comm.rank == 0:
        for one in sorted((folder / "a").rglob("step-*/*")):
            if one.parent.name.endswith("6"):
                assert one.read_bytes() == (folder / "b" / one.parent.name / one.name).read_bytes()
        with CheckpointStore(MPI.COMM_SELF, folder / "a") as store:
            same(store.restore(step=5)[1], 5)


@pytest.mark.ranks(1, 3)
def test_a_save_in_the_background_commits_by_itself(comm, folder, monkeypatch):
    """Issue 4, point 4: no rank makes another call of the store, and one is slow to write."""
    write = shard.write

    def slow(*args):
        time.sleep(0.2)
        return write(*args)

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shard, "write", slow)
    with CheckpointStore(comm, folder) as store:
        for step in (1, 2):  # the second one uses the first one's memory again
            state = state_of(step)
            store.save_async(step, state)
            for array in state["parameters"].values():
                array[...] = -7
            wait_until((folder / f"step-{step:012d}" / "MANIFEST.json").exists, 30)
            same(md.load(folder), step)
        comm.Barrier()


@pytest.mark.ranks(2)
def test_interrupted_async_is_invisible(comm, folder, monkeypatch):
    """An exception on one rank alone neither hangs nor commits; the background thread is over."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, state_of(1))
    before = set(threading.enumerate())

    def killed(*args):
        raise OSError(5, "as good as dead")

    try:
        with CheckpointStore(comm, folder) as store:
            store.restore()
            if comm.rank == 1:
                monkeypatch.setattr(shard, "write", killed)
                monkeypatch.setattr(save.Save, "_tell_failure", lambda self: None)
            store.save_async(2, state_of(2))
            if comm.rank == 1:
                raise KeyError("user")
            time.sleep(0.1)
            store._abandon()  # what the launcher's abort does to the others
    except KeyError:
        assert comm.rank == 1
    assert set(threading.enumerate()) <= before
    comm.Barrier()
    assert names(folder) == ["step-000000000001"]
    with CheckpointStore(comm, folder) as store:
        same(store.restore()[1], 1)


@pytest.mark.ranks(2, 3)
def test_a_writer_that_fails_is_not_waited_for(comm, folder, monkeypatch):
    """Rank 0's thread learns of it from the folder, before any rank makes another call."""

    def full(*args):
        raise OSError(28, "No space left on device")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(shard, "write", full)
    with CheckpointStore(comm, folder) as store:
        store.save_async(1, state_of(1))
        if comm.rank == 0:
            store._pending._thread.join(30)
            assert not store._pending._thread.is_alive()
        comm.Barrier()
        text = everywhere(comm, CheckpointError, store.wait)
        assert f"rank {comm.size - 1} of {comm.size}" in text
        assert "No space left on device" in text
        comm.Barrier()
        assert names(folder) == []


@pytest.mark.ranks(2)
def test_a_writer_that_says_nothing_is_given_up(comm, folder, monkeypatch):
    """A thread of rank 0 never waits for ever for another's shard."""
    monkeypatch.setattr(save, "PATIENCE_SECONDS", 0.2)
    gone = threading.Event()
    if comm.rank == 1:
        monkeypatch.setattr(shard, "write", lambda *args: gone.wait(60) and b"")
    with CheckpointStore(comm, folder) as store:
        store.save_async(1, state_of(1))
        if comm.rank == 0:
            store._pending._thread.join(30)
        comm.Barrier()
        gone.set()
        text = everywhere(comm, CheckpointError, store.wait)
        assert "ranks [1] wrote nothing" in text
        comm.Barrier()
        assert names(folder) == []


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("method", ["save", "save_async"])
def test_a_full_disk_on_one_rank(comm, folder, method):
    """The same CheckpointError on all ranks, no litter, earlier steps intact, later saves work."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, state_of(1))
        big = {"parameters": {"w": np.ones(90_000)}}
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.rank == comm.size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))

        def work():
            getattr(store, method)(2, big)
            store.wait()

        try:
            text = everywhere(comm, CheckpointError, work)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert f"rank {comm.size - 1} of {comm.size}" in text
        assert "File too large" in text
        comm.Barrier()
        assert names(folder) == ["step-000000000001"]
        same(store.restore()[1], 1)
        store.save(2, state_of(2))
        same(store.restore()[1], 2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", ["make_folder", "create", "write_at", "sync", "rename"])
def test_no_space_at_any_call(comm, folder, call, monkeypatch):
    """ENOSPC from any call of rank 0 is one error on all ranks, and the store goes on."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, state_of(1))

        def refuse(*_):
            raise OSError(28, "No space left on device")

        if comm.rank == 0:
            monkeypatch.setattr(files, call, refuse)
        text = everywhere(comm, CheckpointError, lambda: store.save(2, state_of(2)))
        assert "No space left on device" in text
        monkeypatch.undo()
        store.save(3, state_of(3))
        assert store.all_steps() == [1, 3]
        if comm.rank == 0:
            assert all(not name.startswith(".") for name in names(folder))


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree(comm, folder):
    """Steps, names, shapes, kinds and extras that differ are named, with their ranks."""
    last = comm.size - 1
    mine = comm.rank == last
    with CheckpointStore(comm, folder) as store:
        a = np.zeros(3)
        cases = [
            ("save: step differs", 2 if mine else 1, {"a": a}),
            ("a is replicated <f8 of global shape (4,)", 1, {"a": np.zeros(4) if mine else a}),
            ("a is replicated <f4", 1, {"a": a.astype("f4") if mine else a}),
            ("a is sharded", 1, {"a": Shard(a, (3,), 0) if mine else a}),
            ("lr is 0.2", 1, {"lr": 0.2 if mine else 0.1}),
            ("log is", 1, {"log": "x" * 500 + ("a" if mine else "b")}),
            ("arrays on some ranks", 1, {"a": 5 if mine else a}),
        ]
        for text, step, state in cases:
            said = everywhere(comm, MismatchError, lambda: store.save(step, state))  # noqa: B023
            assert text in said, said
        assert store.all_steps() == []


@pytest.mark.ranks(2)
def test_shards_that_do_not_tile(comm, folder):
    """A hole or an overlap is refused before anything is written; equal copies are no overlap."""
    r = comm.rank
    with CheckpointStore(comm, folder) as store:
        for text, shard in [
            ("are covered", Shard(np.zeros(2), (5,), 3 * r)),
            ("overlap", Shard(np.zeros(3), (5,), 2 * r)),
            ("overlap", Shard(np.zeros((2, 2)), (2, 3), (0, r))),
        ]:
            said = everywhere(comm, CheckpointError, lambda: store.save(1, {"x": shard}))  # noqa: B023
            assert text in said, said
        store.save(1, {"x": Shard(np.arange(5.0), (5,), 0)})  # replicas of one shard
        assert (store.restore()[1]["x"] == np.arange(5.0)).all()
        assert sum(1 for _ in folder.rglob("shard-*.h5")) == 1


@pytest.mark.ranks(1, 3)
def test_bad_input(comm, folder):
    """One line on all ranks for what cannot be saved, and for steps that are none."""
    with CheckpointStore(comm, folder) as store:
        for text, state in [
            ("f: builtin_function_or_method cannot be saved", {"f": len}),
            ("keys of the state must be strings", {"a": {3: 1}}),
            ("dtype object", {"a": np.array([None])}),
            ("must be a dict", [1]),
            ("array inside a list", {"a": [1, np.zeros(2)]}),
            ("bytes cannot be saved", {"a": {"b": b"x"}}),
        ]:
            said = everywhere(comm, ConfigError, lambda: store.save(1, state))  # noqa: B023
            assert text in said, said
        for step in (-1, 10**12, 1.5, True, None, "3"):
            assert "expected an integer" in everywhere(
                comm,
                ConfigError,
                lambda: store.save(step, {}),  # noqa: B023
            )
        assert names(folder) == []
    for keep in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="keep="):
            CheckpointStore(comm, folder, keep=keep)
    for bad in (((2, 2), (0, 2)), ((2,), 1), ((4,), -1), ((3, 3), (0,))):
        with pytest.raises(ConfigError):
            Shard(np.zeros((2, 2) if isinstance(bad[1], tuple) else 2), *bad)


@pytest.mark.ranks(1, 3)
def test_another_model(comm, folder):
    """A checkpoint of another model: the error names what differs; the arrays stay."""
    with CheckpointStore(comm, folder) as store:
        store.save(1, state_of(1))
        like = blank()
        like["parameters"]["w"] = np.full((40, 8), 3.0)
        like["parameters"]["b"] = np.full(9, 3, "f4")
        like["momentum"] = {"w": np.zeros(3)}
        like["losses"] = np.zeros(2)
        said = everywhere(comm, CheckpointError, lambda: store.restore(like))
        for text in (
            "another model",
            "parameters/w has shape (40, 9) in the checkpoint, (40, 8) here",
            "parameters/b has dtype <f8 in the checkpoint, <f4 here",
            "momentum/w is missing in the checkpoint",
            "losses is a plain value in the checkpoint",
        ):
            assert text in said, said
        assert (like["parameters"]["w"] == 3).all()
        said = everywhere(comm, CheckpointError, lambda: store.restore({"step": 0}))
        assert "parameters/w is in the checkpoint only" in said
        read_only = blank()
        read_only["parameters"]["w"].flags.writeable = False
        assert "read-only" in everywhere(comm, CheckpointError, lambda: store.restore(read_only))


@pytest.mark.ranks(1, 2)
def test_nothing_there(comm, folder):
    """NoCheckpoint (exit code 2) says what was looked for, and what is there instead."""
    with CheckpointStore(comm, folder / "none") as store:
        assert "does not exist" in everywhere(comm, NoCheckpoint, lambda: store.restore())
        assert "does not exist" in everywhere(comm, NoCheckpoint, lambda: store.verify())
    with CheckpointStore(comm, folder) as store:
        assert "holds no step-" in everywhere(comm, NoCheckpoint, lambda: store.restore())
        store.save(4, state_of(4))
        said = everywhere(comm, NoCheckpoint, lambda: store.restore(step=9))
        assert "steps there: [4]" in said
        assert NoCheckpoint.exit_code == 2


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
        assert "set them anew" in text
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
        assert "set them anew before use" in text
        text = everywhere(comm, ForeignCheckpoint, lambda: store.restore(like, step=1))
        assert "set them anew" not in text


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
