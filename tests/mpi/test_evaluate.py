"""Evaluation over several ranks gives the result of one rank, to the last sample (R146)."""

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import BadRecord
from mpidist.training.exchanges.evaluation import evaluate

RNG = np.random.default_rng(8)
INPUTS = RNG.standard_normal((1543, 12)).astype(np.float32)
LABELS = RNG.integers(0, 3, 1543)


@pytest.mark.ranks(1, 2, 3, further=(5, 8))
def test_uneven_parts_are_counted_exactly(comm):
    """R146: fewer samples than ranks, a last batch of one, parts of different length."""
    model = md.models.mlp([12, 16, 3], seed=7)
    right = model.predict(INPUTS).argmax(axis=1) == LABELS
    for n in (1, 2, 7, 256, 257, 1543):
        assert evaluate(comm, model, (INPUTS[:n], LABELS[:n])) == right[:n].sum() / n


class Torn(md.data.ArraySource):
    """Every tenth record cannot be read."""

    def take(self, indices):
        for index in indices:
            if index % 10 == 0:
                raise BadRecord(int(index), "torn")
        return super().take(indices)


@pytest.mark.ranks(1, 3)
def test_bad_records_count_neither_way(comm):
    """R146: the share is of the samples that could be read."""
    model = md.models.mlp([12, 16, 3], seed=7)
    right = model.predict(INPUTS[:100]).argmax(axis=1) == LABELS[:100]
    good = np.arange(100) % 10 > 0
    found = evaluate(comm, model, Torn(INPUTS[:100], LABELS[:100]))
    assert found == right[good].sum() / good.sum()


@pytest.mark.ranks(1, 3)
def test_one_true_label_of_several(comm):
    """R146: a hit is where the largest score is at a label that the sample has."""
    model = md.models.mlp([12, 16, 3], seed=7)
    several = (np.random.default_rng(9).random((101, 3)) < 0.4).astype(np.float32)
    best = model.predict(INPUTS[:101]).argmax(axis=1)
    expected = sum(several[k, label] == 1 for k, label in enumerate(best)) / 101
    assert 0 < expected < 1
    assert evaluate(comm, model, (INPUTS[:101], several)) == expected


class Line:
    """A linear regression; `columns` is the shape of one prediction."""

    def __init__(self, *columns):
        self.parameters = {"w": np.zeros((12, *columns))}
        self.steps = 0

    def predict(self, x):
        return x @ self.parameters["w"]

    def loss_and_gradients(self, batch, gradients, ready=None):
        self.steps += 1
        gradients["w"][...] = 0
        return 0.0


@pytest.mark.ranks(1, 2)
def test_predictions_that_are_no_class_scores_are_refused_before_the_training(comm):
    """One column would silently give an accuracy of 0, and one axis an AxisError at the end."""
    settings = {"optimizer": md.optim.sgd(0.1), "global_batch": 16, "steps": 2}
    data = INPUTS[:32], LABELS[:32]
    wide = data[0], np.zeros((32, 2))
    for model, test_data, text in (
        (Line(), data, r"returned shape \(2,\) for n = 2; expected class scores"),
        (Line(1), data, r"returned shape \(2, 1\) for n = 2; expected class scores"),
        (Line(3), wide, r"the labels have shape \(2, 2\), the scores \(2, 3\)"),
    ):
        with pytest.raises(md.ConfigError, match=text):
            md.train(comm, model, data, test_data=test_data, **settings)
        assert model.steps == 0
    assert md.train(comm, Line(), data, **settings).test_accuracy is None
    assert md.train(comm, Line(3), data, test_data=data, **settings).test_accuracy >= 0


class Here(md.data.ArraySource):
    """Test data that only the workers can read."""

    def __init__(self, comm, servers, *arrays):
        super().__init__(*arrays)
        self.absent = comm.rank in servers

    def take(self, indices):
        assert not self.absent, "read on a server"
        return super().take(indices)


@pytest.mark.ranks(3)
def test_servers_that_do_not_work_read_no_test_data(comm):
    strategy = md.ParameterServer(servers=[0, 2], placement=[0])
    test_data = Here(comm, [0], INPUTS[:32], LABELS[:32])
    result = md.train(
        comm, md.models.mlp([12, 16, 3], seed=7), (INPUTS[:32], LABELS[:32]), test_data=test_data,
        optimizer=md.optim.sgd(0.1), global_batch=16, steps=2, strategy=strategy,
    )  # fmt: skip
    assert 0 <= result.test_accuracy <= 1
