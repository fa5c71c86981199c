"""If rank 1 gives a method a bad or different argument, all ranks raise within seconds.

These are the methods that the other tests (of settings, stores, arenas, gradients) do not cover.
"""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist import models
from mpidist.errors import ConfigError, MismatchError, MpidistError, ProtocolError

SECONDS = 5.0


def all_raise(comm, call, kind, *words):
    """Every rank raises an error of this kind within seconds; one of them has the words."""
    begin = time.monotonic()
    with pytest.raises(MpidistError) as caught:
        call()
    assert time.monotonic() - begin < SECONDS
    said = comm.allgather(str(caught.value))
    assert any(all(word in text for word in words) for text in said), said
    assert any("rank 1" in text for text in said), said
    assert any(comm.allgather(isinstance(caught.value, kind)))


@pytest.mark.ranks(3, further=(2,))
@pytest.mark.parametrize("tiered", [False, True])
def test_delete_and_all_steps_of_a_store(comm, folder, tiered):
    made = md.TieredStore if tiered else md.CheckpointStore
    given = {"local": folder / "node"} if tiered else {}
    odd = comm.rank == 1
    with made(comm, folder / "store", **given) as store:
        for step in (1, 2):
            store.save(step, {"w": np.ones(3)})
        all_raise(comm, lambda: store.delete(2 if odd else 1), MismatchError, "step")
        all_raise(comm, lambda: store.delete("x" if odd else 1), ConfigError, "step")
        all_raise(comm, lambda: store.delete(1, history=3 if odd else 0), MismatchError, "history")
        all_raise(comm, lambda: store.all_steps(history=1 if odd else 0), MismatchError, "history")
        all_raise(comm, lambda: store.all_steps(history="x" if odd else 0), ConfigError, "history")
        assert store.all_steps() == [1, 2]
        assert store.latest_step() == 2


@pytest.mark.ranks(2, 3)
def test_should_stop_and_leave_at_another_step(comm, folder):
    step = 4 if comm.rank == 1 else 3
    with md.guard(comm, {"w": np.ones(3)}, signals=()) as run:
        all_raise(comm, lambda: run.should_stop(step), MismatchError, "step differs", "rank 1: 4")
    with md.CheckpointStore(comm, folder) as store:
        run = md.guard(comm, {"w": np.ones(3)}, store, signals=())
        with run:
            run.stop()
            assert run.should_stop(3)
            all_raise(comm, lambda: run.leave(step), MismatchError, "step")
        assert store.all_steps() == []


@pytest.mark.ranks(2, 3)
def test_a_guard_that_one_rank_calls_wrongly(comm):
    """Also if this rank catches its error, and does not come back."""
    for call, told in (
        (lambda run, wrong: run.should_stop("3" if wrong else 3), "expected a whole number"),
        (lambda run, wrong: run.should_stop(2**63 if wrong else 3), "expected a whole number"),
        (lambda run, wrong: run.leave(3) if wrong else run.should_stop(3), "without a stop"),
        (lambda run, wrong: run.check_loss(None, 3) if wrong else run.should_stop(3), "a number"),
    ):
        own = comm.Dup()
        with md.guard(own, {"w": np.ones(3)}, signals=()) as run:
            kind = (ConfigError, ProtocolError) if comm.rank == 1 else MismatchError
            with pytest.raises(kind, match=told):
                call(run, comm.rank == 1)
        comm.Barrier()
    with md.guard(comm, signals=()) as run:
        assert not run.should_stop(np.uint8(3)), "its negative number would be 253"


@pytest.mark.ranks(2, 3)
def test_a_state_that_one_rank_cannot_give(comm, folder):
    def state():
        if comm.rank == 1:
            raise OSError("not there")
        return {"w": np.ones(3)}

    kind = OSError if comm.rank == 1 else MismatchError
    with (
        md.CheckpointStore(comm, folder) as store,
        md.guard(comm, state, store, signals=()) as run,
        pytest.raises(kind, match="not there"),
    ):
        run.check_loss(float("nan"), 3)


@pytest.mark.ranks(3, further=(2,))
def test_a_batch_of_another_shape_in_batch_normalisation(comm):
    x = np.arange(12.0).reshape(6, 2)
    wrong = np.ones((6, 3)) if comm.rank == 1 else x
    for call in (models.sync_moments, models.sync_batch_norm):
        own = comm.Dup()
        all_raise(comm, lambda own=own, call=call: call(own, wrong, 0), MismatchError)
        md.free(own)
        own.Free()
    own = comm.Dup()
    saved = models.sync_batch_norm(own, x, 0)[3]
    if comm.rank == 1:
        saved = saved._replace(y=np.ones((6, 3)), scale=np.ones((1, 3)))
    all_raise(comm, lambda: models.sync_batch_norm_backward(own, wrong, saved), MismatchError)
    md.free(own)
    own.Free()


@pytest.mark.ranks(3)
def test_a_tag_that_is_none_on_one_worker(comm):
    """The servers are in the middle of it, so all leave the group, with the words of that rank."""
    own = comm.Dup()

    def run():
        with md.ServerGroup(own, servers=1) as group:
            client = group.add("m", {"x": np.zeros(6)}, optimizer=md.optim.sgd(1.0))
            if client is None:
                group.serve(on_pause=lambda tag: None)
            else:
                group.pause(1.5 if comm.rank == 1 else "now")

    all_raise(comm, run, ConfigError, "tag=1.5")
    md.free(own)
    own.Free()
