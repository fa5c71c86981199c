"""A run continues if a checkpoint cannot be written (issue 4: full disk, missing folder)."""

import os
import signal
import threading
import time

import pytest
from test_train import fit
from until import wait_until

import mpidist as md
from mpidist import events
from mpidist.checkpoint import histories
from mpidist.checkpoint.write import shard_writer
from mpidist.errors import MpidistError, ProtocolError, StorageError
from mpidist.training.exchanges.evaluation import parameters_digest

AWAY = ".away"


def at(comm, step, work):
    """A callback: rank 0 does `work` after `step`; no rank saves before rank 0 is back."""

    def callback(done):
        if done.step == step and comm.rank == 0:
            work()

    return callback


def rename_away(folder, step):
    """Take the folder away, but not while `step` is still being saved in the background."""
    wait_until((folder / f"step-{step:012d}" / "MANIFEST.json").exists, 30)
    folder.rename(folder.with_name(folder.name + AWAY))


def rename_back(folder):
    folder.with_name(folder.name + AWAY).rename(folder)


def failures():
    return [details["reason"] for _, kind, details in events.recent if kind == "checkpoint_failed"]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", ["allreduce", "servers"])
def test_a_folder_that_is_gone_for_a_while(comm, folder, capfd, strategy):
    """Saves of steps 6 and 9 fail, in the background or not; those of 12 on are there; same end.

    Settles issue 4, "folder gone: clear error on all ranks, training goes on".
    """
    chosen = md.AllReduce() if strategy == "allreduce" else md.ParameterServer(1)
    expected, _ = fit(comm, strategy=chosen)
    store = folder / "store"
    events.recent.clear()
    gone, back = lambda: rename_away(store, 3), lambda: rename_back(store)
    parameters, result = fit(
        comm, strategy=chosen, checkpoint=store, checkpoint_every=3,
        callbacks=[at(comm, 4, gone), at(comm, 10, back)],
    )  # fmt: skip
    said = capfd.readouterr().err
    assert parameters_digest(parameters) == parameters_digest(expected)
    assert result.failed_saves == len(failures()) == 2
    assert all(f"{store} is gone" in text for text in failures())
    assert not {6, 9} & set(histories.all_steps(str(store)))
    assert md.load(store)["run"]["step"] == result.steps == 24
    if comm.rank == 0:
        lines = [line for line in said.splitlines() if "not saved" in line]
        assert len(lines) == 2, said
        assert "the run goes on" in lines[0]
    else:
        assert "not saved" not in said


@pytest.mark.ranks(3)
@pytest.mark.parametrize("servers", [0, 1])
def test_a_last_save_that_fails(comm, folder, servers):
    """The run says on all ranks that its end is not saved; a second run goes on from before."""
    chosen = md.ParameterServer(servers) if servers else md.AllReduce()
    store = folder / "store"
    with pytest.raises(StorageError, match=r"over at step 24, and the state could not be") as told:
        fit(comm, strategy=chosen, checkpoint=store, checkpoint_every=10,
            callbacks=[at(comm, 21, lambda: rename_away(store, 20))])  # fmt: skip
    assert told.value.everywhere
    assert len(set(comm.allgather(str(told.value)))) == 1
    comm.Barrier()
    if comm.rank == 0:
        rename_back(store)
    comm.Barrier()
    _, result = fit(comm, strategy=chosen, checkpoint=store)
    assert (result.resumed_at, result.steps) == (20, 24)


@pytest.mark.ranks(2)
def test_a_folder_that_is_made_anew(comm, folder):
    """Whoever removes the steps of a run and leaves an empty folder gets the newer ones there."""
    store = folder / "store"

    def remove():
        rename_away(store, 3)
        store.mkdir()

    _, result = fit(comm, checkpoint=store, checkpoint_every=3, callbacks=[at(comm, 4, remove)])
    assert result.failed_saves == 0
    assert histories.all_steps(str(store)) == [18, 21, 24]


@pytest.mark.ranks(2)
def test_a_save_in_the_background_that_fails_at_the_end_is_tried_again(comm, folder, monkeypatch):
    """The step that a run stops at is due anyway: what was begun for it in the background fails."""
    write = shard_writer.write

    def refuse_threads(*args):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(shard_writer, "write", refuse_threads)
    store = folder / "store"
    _, result = fit(comm, checkpoint=store, checkpoint_every=21, stop_after=21)
    assert (result.failed_saves, result.steps) == (1, 21)
    assert histories.all_steps(str(store)) == [21]


@pytest.mark.ranks(2)
def test_another_job_in_the_folder_ends_the_run(comm, folder):
    """What does not pass by itself is raised as before: two jobs never train into one folder."""
    store = folder / "store"

    def take_over():
        lock = store / ".lock"
        lock.write_bytes(b"process 1 on elsewhere since then x\n".ljust(256))

    with pytest.raises(MpidistError, match="taken over by process 1 on elsewhere"):
        fit(comm, checkpoint=store, checkpoint_every=3, callbacks=[at(comm, 4, take_over)])
    comm.Barrier()


@pytest.mark.covering
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("strategy", ["allreduce", "servers"])
def test_a_run_that_ends_by_an_exception_leaves_nothing_open(comm, folder, monkeypatch, strategy):
    """Its own store ends as that of a with block: no thread, no lock; the next run begins at once.

    Some of step 3 may still be under way: it is there whole, or not at all.
    """
    write = shard_writer.write

    def take_time(*args):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
        return write(*args)

    def fail(done):
        if done.step == 4:
            raise KeyError("a callback")

    monkeypatch.setattr(shard_writer, "write", take_time)
    servers = md.ParameterServer(comm.size, placement="colocated")
    chosen = md.AllReduce() if strategy == "allreduce" else servers
    before = set(threading.enumerate())
    # Under servers the first one's may be heard before this rank comes to its own.
    with pytest.raises((KeyError, ProtocolError), match="a callback") as caught:
        fit(comm, strategy=chosen, checkpoint=folder, checkpoint_every=3, callbacks=[fail])
    assert isinstance(caught.value, KeyError) or strategy != "allreduce"
    assert set(threading.enumerate()) <= before
    comm.Barrier()
    assert not (folder / ".lock").exists()
    comm.Barrier()
    _, result = fit(comm, checkpoint=folder)
    assert result.resumed_at in (0, 3)
    assert result.steps == 24


@pytest.mark.ranks(3)
@pytest.mark.parametrize("servers", [0, 1])
def test_a_stop_whose_save_fails_is_not_one_to_be_requeued(comm, folder, servers):
    """75 means saved: a job that cannot save would be requeued for ever, and nobody would know."""
    chosen = md.ParameterServer(servers) if servers else md.AllReduce()
    store = folder / "store"
    gone, ask = lambda: rename_away(store, 3), lambda: os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(StorageError, match="the state could not be saved") as told:
        fit(comm, strategy=chosen, epochs=1000, checkpoint=store, checkpoint_every=3,
            callbacks=[at(comm, 4, gone), at(comm, 8, ask)])  # fmt: skip
    assert told.value.exit_code == 1
    assert len(set(comm.allgather(str(told.value)))) == 1
