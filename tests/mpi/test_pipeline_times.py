"""What a pipeline measures: idle times, and the times of layers that the cuts need (R82, R84)."""

import time

import pytest
from test_train import TRAIN

import mpidist as md
from mpidist import models, optim
from mpidist.models.layers import Dense, Relu


class Sleeps(Relu):
    """Takes time in the forward pass."""

    def forward(self, parameters, x):
        time.sleep(0.04)
        return super().forward(parameters, x)


@pytest.mark.ranks(2)
def test_the_idle_time_is_measured(comm):
    """The first stage computes nearly all the time, and the second one waits for it."""
    layers = [Dense("a", 12, 16), Sleeps(), Dense("b", 16, 3)]
    found = md.train(
        comm, models.Network(layers, (12,)), TRAIN, optimizer=optim.sgd(0.1), global_batch=20,
        steps=2, microbatches=3, strategy=md.Pipeline(cuts=[2]),
    ).pipeline  # fmt: skip
    first, second = found["idle"]
    assert first < 0.45
    assert second > 0.55
    # Messages take no time there.
    assert 0.3 < found["bubble_simulated"] < 0.55


@pytest.mark.ranks(2)
def test_measured_cuts_are_between_the_slow_layers(comm):
    """Two layers near the end take all the time."""
    layers = [
        Dense("a", 12, 9),
        Relu(),
        Relu(),
        Relu(),
        Sleeps(),
        Relu(),
        Sleeps(),
        Dense("b", 9, 3),
    ]
    found = md.train(
        comm, models.Network(layers, (12,)), TRAIN, optimizer=optim.sgd(0.1), global_batch=20,
        steps=1, microbatches=2, strategy=md.Pipeline(),
    ).pipeline  # fmt: skip
    assert found["cuts"] in ([5], [6])
