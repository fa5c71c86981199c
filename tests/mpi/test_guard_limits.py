"""The guard: end of an allocation, no time for a checkpoint, a loss that does not fall (R141)."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_train import TRAIN, Poisoned, fit
from test_train_storage import at, rename_away, rename_back

import mpidist as md
from mpidist import events
from mpidist.checkpoint.write import shard_writer
from mpidist.errors import ConfigError, MpidistError
from mpidist.fault_tolerance import guard as module
from mpidist.fault_tolerance import time_limit
from mpidist.fault_tolerance.guard import Stopped


class Store:
    def __init__(self):
        self.saved = []

    def save(self, step, state):
        self.saved.append(step)


def loop(run, losses, after_step=lambda: None):
    for step, loss in enumerate(losses):
        run.check_loss(loss, step)
        if run.should_stop(step):
            run.leave(step)
        after_step()


@pytest.fixture
def left(monkeypatch):
    """Let the allocation end in so many seconds; only rank 0 is asked."""

    def end_in(comm, seconds):
        monkeypatch.setattr(events, "recent", events.deque(maxlen=256))
        known = seconds if comm.rank == 0 else None
        monkeypatch.setattr(module, "seconds_left", lambda environ: known)

    return end_in


@pytest.mark.ranks(1, 3)
def test_stops_before_the_allocation_ends(comm, left, monkeypatch):
    """Ten steps of a second would leave nothing of what is kept back: it stops before the last."""
    left(comm, time_limit.RESERVE + 10.0)
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def a_second():
        now[0] += 1.0

    store = Store()
    with (
        pytest.raises(Stopped, match="the end of the allocation"),
        md.guard(comm, {}, store, time_limit="auto") as run,
    ):
        loop(run, [1.0] * 1000, a_second)
    assert store.saved == [9]


@pytest.mark.ranks(3)
def test_a_save_that_cannot_fit_is_not_begun(comm, left):
    """One rank knows that saves take too long: no rank begins one, and all leave alike."""
    left(comm, 20.0)
    if comm.rank == 1:
        events.emit("checkpoint_saved", step=1, bytes=1, seconds=30.0)
    store = Store()
    with pytest.raises(Stopped), md.guard(comm, {}, store, time_limit="auto") as run:
        loop(run, [1.0] * 1000)
    assert store.saved == []
    assert [kind for _, kind, _ in events.recent if kind == "save_does_not_fit"]


@pytest.mark.ranks(2)
def test_nor_is_one_begun_for_a_bad_loss(comm, left):
    left(comm, 20.0)
    if comm.rank == 1:
        events.emit("checkpoint_saved", step=1, bytes=1, seconds=30.0)
    store = Store()
    with (
        pytest.raises(MpidistError, match="nothing was saved, because the allocation ends"),
        md.guard(comm, {}, store, time_limit="auto") as run,
    ):
        run.check_loss(float("nan"), 3)
    assert store.saved == []


@pytest.mark.ranks(2)
def test_nobody_says_when_the_allocation_ends(comm, left):
    left(comm, None)
    with md.guard(comm, {}, Store(), time_limit="auto") as run:
        loop(run, [1.0] * 20)
        assert run.fits()


@pytest.mark.ranks(2)
def test_a_loss_that_does_not_fall(comm):
    """Blocks of `patience` steps: noise within one is none of it."""
    falling = [3.0, 1.0, 2.0, 1.5, 1.2, 1.9]  # means of two: 2, 1.75, 1.55
    store = Store()
    with md.guard(comm, {}, store, patience=2) as run:
        loop(run, falling)
        with pytest.raises(
            MpidistError, match=r"mean loss of 2 steps is 1\.6 and was 1\.55 before"
        ):
            loop(run, [1.6, 1.6])
    assert store.saved == [1]


@pytest.mark.ranks(1)
def test_limits_that_are_none(comm):
    for options in ({"time_limit": "soon"}, {"time_limit": 0}, {"patience": 0}):
        with pytest.raises(ConfigError, match="guard: "):
            md.guard(comm, **options)


@pytest.fixture
def background(monkeypatch):
    """Do something before shards are written in a thread."""

    def before(work):
        write = shard_writer.write

        def wrapped(*args):
            if threading.current_thread() is not threading.main_thread():
                work()
            return write(*args)

        monkeypatch.setattr(shard_writer, "write", wrapped)

    return before


def no_space():
    raise OSError(28, "No space left on device")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad_loss", [True, False])
def test_a_save_that_failed_keeps_no_last_one_from_beginning(comm, folder, background, bad_loss):
    """What went wrong with the step before is told; the state is saved all the same."""
    background(no_space)
    state = {"w": np.ones(9)}
    events.recent.clear()
    with md.CheckpointStore(comm, folder) as store, md.guard(comm, state, store) as run:
        store.save_async(3, state)
        if bad_loss:
            with pytest.raises(MpidistError, match="was saved as step 5"):
                run.check_loss(float("nan"), 5)
        else:
            run.stop()
            assert run.should_stop(5)
            with pytest.raises(Stopped):
                run.leave(5)
        assert store.all_steps() == [5]
    told = [details["reason"] for _, kind, details in events.recent if kind == "checkpoint_failed"]
    assert len(told) == 1
    assert "No space left" in told[0]


@pytest.mark.ranks(2)
def test_a_save_under_way_is_not_given_up_for_a_bad_loss(comm, folder, background):
    """The state is bad already: what is being saved in the background is the last good one."""
    background(lambda: time.sleep(0.3 * comm.rank))
    state = {"w": np.ones(9)}

    def diverge():
        with md.CheckpointStore(comm, folder) as store, md.guard(comm, state, store) as run:
            store.save_async(4, state)
            state["w"][:] = np.nan
            run.check_loss(float("nan"), 5)

    with pytest.raises(MpidistError, match="the state holds NaN or infinity already"):
        diverge()
    comm.Barrier()
    assert md.load(folder)["w"].tolist() == [1] * 9


@pytest.mark.ranks(2)
def test_a_save_under_way_is_not_given_up_at_the_end_of_the_allocation(
    comm, left, folder, background
):
    """No save that cannot fit is begun, but one that was may be there in time."""
    left(comm, 20.0)
    if comm.rank == 1:
        events.emit("checkpoint_saved", step=1, bytes=1, seconds=30.0)
    background(lambda: time.sleep(0.3 * comm.rank))
    with pytest.raises(Stopped), md.CheckpointStore(comm, folder) as store:
        md.train(
            comm, md.models.mlp([4, 3]), (np.ones((60, 4), "f4"), np.zeros(60, np.int64)),
            optimizer=md.optim.sgd(0.1), global_batch=60, steps=1000, checkpoint=store,
            checkpoint_every=1, time_limit="auto",
        )  # fmt: skip
    comm.Barrier()
    assert md.load(folder)["run"]["step"] > 0


@pytest.mark.ranks(2)
def test_the_end_of_a_run_says_that_nothing_was_saved(comm, left, folder):
    """Where a bad loss of one worker is known at the end only."""
    left(comm, 20.0)
    events.emit("checkpoint_saved", step=1, bytes=1, seconds=30.0)
    with pytest.raises(MpidistError, match="was not saved, because the allocation ends too soon"):
        md.train(
            comm, Poisoned(0, 0), TRAIN, optimizer=md.optim.sgd(0.1), global_batch=20, steps=1000,
            checkpoint=folder, strategy=md.ParameterServer(1, md.ASP()), time_limit="auto",
        )  # fmt: skip


@pytest.mark.ranks(3)
@pytest.mark.parametrize("servers", [0, 1])
def test_a_stop_too_late_for_a_save_is_requeued_whatever_failed_before(comm, left, folder, servers):
    """Exit code 75: step 3 is there, and the next attempt may find the folder again."""
    left(comm, time_limit.RESERVE + 60.0)
    store = folder / "store"

    def slow(done):
        time.sleep(0.02)
        if done.step == 11:  # and saves that take longer than what is left
            events.emit("checkpoint_saved", step=1, bytes=1, seconds=600.0)

    chosen = md.ParameterServer(servers) if servers else md.AllReduce()
    with pytest.raises(Stopped, match="the end of the allocation") as stop:
        fit(comm, strategy=chosen, epochs=1000, time_limit="auto", checkpoint=store,
            checkpoint_every=3, callbacks=[at(comm, 4, lambda: rename_away(store, 3)), slow],
        )  # fmt: skip
    assert stop.value.code == 75
    assert "checkpoint_failed" in [kind for _, kind, _ in events.recent]
    comm.Barrier()
    if comm.rank == 0:
        rename_back(store)
    comm.Barrier()
    assert md.load(store)["run"]["step"] == 3


class Slow(md.data.ArraySource):
    """What rank 1 is given comes late."""

    def take(self, indices):
        time.sleep(0.03 * self.rank)
        return super().take(indices)


@pytest.mark.ranks(2)
def test_servers_on_workers_serve_until_all_know_whether_a_save_fits(comm, left, folder):
    """R141: the fast worker is there first, and holds what the slow one still asks for."""
    left(comm, time_limit.RESERVE + 0.5)
    source = Slow(np.ones((60, 4), np.float32), np.zeros(60, np.int64))
    source.rank = comm.rank
    strategy = md.ParameterServer([0], md.SSP(5), placement="colocated")
    with pytest.raises(Stopped, match="the end of the allocation"):
        md.train(
            comm, md.models.mlp([4, 3]), source, optimizer=md.optim.sgd(0.1), global_batch=60,
            steps=100_000, strategy=strategy, checkpoint=folder, checkpoint_every=100_000,
            time_limit="auto",
        )  # fmt: skip
    comm.Barrier()
    assert md.load(folder)["run"]["step"] > 0


@pytest.mark.ranks(2)
def test_training_that_does_not_learn(comm, folder):
    """md.train hands the limits on; the newest checkpoint is the state that did not get better."""
    inputs = np.ones((60, 4), np.float32)
    data = inputs, np.zeros(60, np.int64)
    options = {"optimizer": md.optim.sgd(0.0), "global_batch": 60, "steps": 50}
    model = md.models.mlp([4, 3])
    with pytest.raises(MpidistError, match="the mean loss of 5 steps"):
        md.train(comm, model, data, checkpoint=folder, patience=5, time_limit="auto", **options)
    comm.Barrier()
    assert md.load(folder)["run"]["step"] == 9
    with pytest.raises(ConfigError, match="patience=5 needs the allreduce strategy"):
        md.train(comm, model, data, patience=5, strategy=md.ParameterServer(1), **options)
    comm.Barrier()
