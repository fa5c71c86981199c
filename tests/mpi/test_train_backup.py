"""md.train with backup workers: a late worker passes over steps, and all end at the same one."""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist import models, optim
from mpidist.errors import ConfigError
from mpidist.training.exchanges.evaluation import parameters_digest
from mpidist.training.exchanges.server_exchange import Served

RNG = np.random.default_rng(5)
TRUTH = RNG.standard_normal((12, 3))
INPUTS = RNG.standard_normal((240, 12)).astype("f4")
DATA = INPUTS, (INPUTS @ TRUTH).argmax(1)


def fit(comm, spare=1, servers=1, placement="dedicated", slow=None, **settings):
    """Train; the worker `slow` sleeps in its steps. Returns parameters, summary, steps seen."""
    model, seen = models.mlp([12, 16, 3], seed=7), []

    def note(report):
        seen.append(report.step)
        time.sleep(0.01 * (comm.rank == slow))

    settings = {"epochs": 6, "optimizer": optim.momentum(0.05), **settings}
    summary = md.train(
        comm, model, DATA, global_batch=20, seed=1, test_data=DATA, callbacks=[note],
        strategy=md.ParameterServer(servers, md.BackupWorkers(spare), placement), **settings,
    )  # fmt: skip
    return model.parameters, summary, seen


@pytest.mark.covering
@pytest.mark.ranks(4, 5, 6)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_slow_worker_passes_over_steps(comm, placement, servers):
    parameters, summary, seen = fit(comm, servers=servers, placement=placement, slow=0)
    assert (summary.steps, summary.epochs, summary.finished) == (72, 6, True)
    assert summary.test_accuracy > 0.7
    workers = summary.workers
    assert len(set(comm.allgather(parameters_digest(parameters))[:workers])) == 1
    if comm.rank == 0:
        assert seen == sorted(set(seen))
        assert len(seen) < 72
    if comm.rank < workers:
        assert seen[-1] == 72


@pytest.mark.ranks(4)
def test_a_worker_that_is_late_in_its_first_pull(comm, folder, monkeypatch):
    """The others have made steps before it comes: it passes over them, and all come to an end."""
    begin = Served.begin

    def late(self):
        if comm.rank == 0:
            time.sleep(0.3)
        begin(self)

    monkeypatch.setattr(Served, "begin", late)
    for every in (7, "auto"):
        path = f"{folder}/{every}"
        _, summary, seen = fit(comm, checkpoint=path, checkpoint_every=every)
        assert (summary.steps, summary.finished) == (72, True)
        if comm.rank == 0:
            assert seen[0] > 1
        if comm.rank < 3:
            assert seen[-1] == 72


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_saves_stops_and_goes_on(comm, folder, placement):
    """Nobody passes a save or a planned stop before all have come to it."""
    settings = {"servers": 2, "placement": placement, "slow": 1, "checkpoint": folder}
    _, half, seen = fit(comm, checkpoint_every=7, stop_after=30, **settings)
    assert (half.steps, half.finished) == (30, False)
    if seen:
        assert {7, 14, 21, 28, 30} <= set(seen)
    parameters, summary, seen = fit(comm, checkpoint_every=7, **settings)
    assert (summary.resumed_at, summary.steps, summary.finished) == (30, 72, True)
    if seen:
        assert {35, 42, 49, 56, 63, 70, 72} <= set(seen)
    assert len(set(comm.allgather(parameters_digest(parameters))[: summary.workers])) == 1


@pytest.mark.covering
@pytest.mark.ranks(4, 6)
@pytest.mark.parametrize("who", [0, 1])
def test_a_worker_asks_for_a_stop(comm, folder, who):
    """The slow one, or a fast one: all stop after one step, and save it."""

    class Broken(models.mlp([12, 16, 3], seed=7).__class__):
        calls = 0

        def loss_and_gradients(self, batch, gradients, ready=None):
            self.calls += 1
            loss = super().loss_and_gradients(batch, gradients, ready)
            return float("nan") if comm.rank == who and self.calls > 3 else loss

    model = models.mlp([12, 16, 3], seed=7)
    model.__class__ = Broken
    with pytest.raises(md.MpidistError, match=r"not a number|loss is nan"):
        md.train(
            comm, model, DATA, global_batch=20, seed=1, optimizer=optim.sgd(0.05), epochs=9,
            strategy=md.ParameterServer(2, md.BackupWorkers(1), "colocated"), checkpoint=folder,
            callbacks=[lambda report: time.sleep(0.01 * (comm.rank == 0))],
        )  # fmt: skip
    comm.Barrier()
    saved = md.load(folder)
    assert 3 <= saved["run"]["step"] < 108
    assert all(np.isfinite(array).all() for array in saved["parameters"].values())
    comm.Barrier()


@pytest.mark.ranks(4)
def test_no_spare_worker_is_bsp(comm):
    """To the last bit."""
    model = models.mlp([12, 16, 3], seed=7)
    md.train(
        comm, model, DATA, global_batch=20, seed=1, optimizer=optim.momentum(0.05), epochs=6,
        strategy=md.ParameterServer(2),
    )  # fmt: skip
    parameters, _, _ = fit(comm, spare=0, servers=2)
    if comm.rank < 2:
        assert parameters_digest(parameters) == parameters_digest(model.parameters)


@pytest.mark.ranks(3)
def test_what_is_refused(comm):
    with pytest.raises(ConfigError, match=r"BackupWorkers\(count=1\) cannot go on after a death"):
        fit(comm, elastic=True)
    with pytest.raises(ConfigError, match="count=2 of 2 workers leaves none to wait for"):
        fit(comm, spare=2)
