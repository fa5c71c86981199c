"""md.Hogwild: the ranks of a node update shared parameters without a lock (R93)."""

import os
import signal
import time

import numpy as np
import pytest
from test_bad_records import Source
from test_bad_records import fit as fit_records
from test_train import TEST, TRAIN, close

import mpidist as md
from mpidist import models, optim
from mpidist.errors import ConfigError, MpidistError
from mpidist.fault_tolerance.guard import Stopped
from mpidist.runtime import topology
from mpidist.training.exchanges import shared_parameters
from mpidist.training.exchanges.evaluation import parameters_digest
from mpidist.training.exchanges.shared_parameters import nonzero_rows


def fit(comm, optimizer=None, strategy=None, **settings):
    model = models.mlp([12, 16, 3], seed=7 + comm.rank)
    before = dict(model.parameters)
    if "steps" not in settings:
        settings.setdefault("epochs", 8)
    result = md.train(
        comm, model, TRAIN, optimizer=optimizer or optim.sgd(0.2), global_batch=20, seed=1,
        test_data=TEST, strategy=strategy or md.Hogwild(), **settings,
    )  # fmt: skip
    same = all(model.parameters[name] is array for name, array in before.items())
    assert same, "the model has its own memory again"
    assert len(set(comm.allgather(parameters_digest(model.parameters)))) == 1
    assert comm.allgather(result) == [result] * comm.size
    return model, result


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("optimizer", [optim.sgd(0.2), optim.momentum(0.05)], ids=repr)
def test_it_learns(comm, optimizer):
    model, result = fit(comm, optimizer)
    assert (result.steps, result.epochs, result.finished) == (64, 8, True)
    assert result.test_accuracy > 0.6
    if comm.size == 1:
        other, _ = fit(comm, optimizer, md.AllReduce())
        close(model.parameters, other.parameters)


class Rows:
    """Sample k has a gradient of -1 in row k only."""

    def __init__(self):
        self.parameters = {"w": np.zeros((3000, 1), "f8")}

    def loss_and_gradients(self, batch, gradients, ready=None):
        gradients["w"][...] = 0
        np.add.at(gradients["w"], batch[0], -1 / len(batch[0]))
        return 0.0


@pytest.mark.ranks(3)
def test_every_update_arrives(comm):
    """Ranks that change different rows lose nothing, however they meet."""
    model = Rows()
    # In a second epoch another rank may change a row while the first one, stopped between reading
    # and writing it, still does: this change may be lost.
    md.train(comm, model, (np.arange(3000),), optimizer=optim.sgd(1.0), global_batch=6, epochs=1,
             strategy="hogwild")  # fmt: skip
    np.testing.assert_allclose(model.parameters["w"], 1 / 6)


def test_few_rows_of_a_gradient():
    gradient = np.zeros((1000, 3), "f4")
    gradient[[5, 999], [2, 0]] = 1
    rows, values = nonzero_rows(gradient)
    assert rows.tolist() == [5, 999]
    assert values.sum() == 2
    assert nonzero_rows(np.ones(1000)) is not None
    for whole in (np.ones(1000), np.zeros((10, 4)), np.array(1.0)):
        assert nonzero_rows(whole) is whole


@pytest.mark.ranks(2)
def test_a_checkpoint_restarts(comm, folder):
    for optimizer in (optim.momentum(0.05), optim.adam(0.01)):
        place = folder / optimizer.name
        _, first = fit(comm, optimizer, checkpoint=place, steps=20, stop_after=9)
        assert (first.steps, first.finished) == (9, False)
        _, second = fit(comm, optimizer, checkpoint=place, steps=20, resume=True)
        assert (second.resumed_at, second.steps) == (9, 20)
        _, third = fit(comm, optimizer, md.AllReduce(), checkpoint=place, steps=30, resume=True)
        assert (third.resumed_at, third.steps) == (20, 30)


@pytest.mark.ranks(3, further=(2,))
def test_a_signal_stops_all_after_one_step(comm, folder):
    def note(report):
        if comm.rank == 1 and report.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.002 * (comm.rank == 0))

    with pytest.raises(Stopped) as stopped:
        fit(comm, checkpoint=folder, callbacks=[note], epochs=30)
    assert len(set(comm.allgather(stopped.value.step))) == 1


@pytest.mark.ranks(3)
def test_an_exception_of_one_rank_ends_all(comm):
    def note(report):
        if comm.rank == 1 and report.step == 3:
            raise RuntimeError("torn")

    part, began = comm.Dup(), time.monotonic()
    with pytest.raises(RuntimeError if comm.rank == 1 else MpidistError, match="torn"):
        fit(part, callbacks=[note])
    assert time.monotonic() - began < 20
    comm.Barrier()


class Plain:
    """The least that `md.train` asks of an optimizer."""

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters):
        for name, array in parameters.items():
            array -= 0.1 * gradients[name]


@pytest.mark.ranks(1)
def test_an_optimizer_without_weights(comm):
    models_, results = zip(*(fit(comm, one) for one in (Plain(), optim.sgd(0.1))), strict=True)
    assert results[0].finished
    for name, array in models_[0].parameters.items():
        np.testing.assert_allclose(array, models_[1].parameters[name], rtol=1e-4, atol=1e-5)


class PlainRows(Plain):
    """It also takes gradients of some rows."""

    rows = "exact"

    def update(self, gradients, state, parameters):
        for name, array in parameters.items():
            rows, values = gradients[name]
            array[rows] -= values


@pytest.mark.ranks(3)
def test_rows_have_the_weight_of_their_samples(comm):
    """A third of a batch of a rank's own, for an optimizer that takes no weight."""
    model = Rows()
    md.train(comm, model, (np.arange(3000),), optimizer=PlainRows(), global_batch=6, epochs=1,
             strategy="hogwild")  # fmt: skip
    np.testing.assert_allclose(model.parameters["w"], 1 / 6)


@pytest.mark.ranks(2)
def test_bad_records(comm):
    _, result = fit_records(comm, Source({7, 33, 80}), strategy=md.Hogwild())
    assert result.skipped_records == 6


@pytest.mark.ranks(4)
def test_several_nodes_are_refused(comm, monkeypatch):
    def two_nodes(given):
        return topology.topology_of(given, 2)

    monkeypatch.setattr(shared_parameters, "topology_of", two_nodes)
    with pytest.raises(ConfigError, match="Hogwild: the ranks are on 2 nodes, and only the ranks"):
        fit(comm)


@pytest.mark.ranks(2)
def test_what_is_refused(comm):
    for settings, text in (
        ({"check_replicas": 2}, "there is one set of parameters"),
        ({"patience": 2}, "each rank has a loss of its own"),
        ({"microbatches": 4}, "ranks update the parameters in any order"),
        ({"elastic": True}, "Hogwild cannot go on after a death: a dead rank may have left half"),
    ):
        with pytest.raises(ConfigError, match=text):
            fit(comm, **settings)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", [md.PeerAverage("ring", 2), md.Hogwild()], ids=repr)
def test_a_model_that_is_not_finite_is_not_saved(comm, folder, strategy):
    """Each resumed run would begin with it; the step before stays the newest."""
    model = models.mlp([12, 16, 3], seed=7)
    usual, calls = model.loss_and_gradients, []

    def torn(batch, gradients, ready=None):
        calls.append(len(batch[0]))
        if comm.rank == 1 and len(calls) == 6:
            model.parameters["dense1.bias"][...] = np.nan
        return usual(batch, gradients)

    model.loss_and_gradients = torn
    with pytest.raises(MpidistError, match="nothing was saved, because the mean of all models"):
        md.train(
            comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, epochs=2,
            strategy=strategy, checkpoint=folder, checkpoint_every=4,
        )  # fmt: skip
    if comm.rank == 0:
        saved = md.load(folder)
        assert saved["run"]["step"] == 4
        assert all(np.isfinite(array).all() for array in saved["parameters"].values())
    comm.Barrier()
