"""The multi-label model: its gradients, its measures, and that it learns (R13)."""

import numpy as np
import pytest

from mpidist import models, optim
from mpidist.errors import ConfigError

RNG = np.random.default_rng(0)


def batch(n=7, inputs=5, classes=6):
    x = RNG.standard_normal((n, inputs)).astype(np.float32)
    return x, (RNG.random((n, classes)) < 0.3).astype(np.uint8)


@pytest.mark.parametrize("hidden", [0, 4])
def test_gradients_against_differences(hidden):
    model = models.tagger(5, 6, hidden=hidden, seed=1)
    data = batch()
    for array in model.parameters.values():
        array += RNG.standard_normal(array.shape) * 0.5
    model.parameters = {name: a.astype(np.float64) for name, a in model.parameters.items()}
    gradients = {name: np.full_like(a, np.nan) for name, a in model.parameters.items()}
    told = []
    model.loss_and_gradients(data, gradients, told.append)
    assert told == [f"dense{k}.{kind}" for k in range(2 if hidden else 1, 0, -1) for kind in "bw"]
    scratch = {name: np.empty_like(a) for name, a in gradients.items()}
    for name, array in model.parameters.items():
        for at in [tuple(RNG.integers(0, n) for n in array.shape) for _ in range(6)]:
            value, losses = array[at], []
            for step in (1e-5, -1e-5):
                array[at] = value + step
                losses.append(model.loss_and_gradients(data, scratch))
            array[at] = value
            assert gradients[name][at] == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-6)


def test_an_empty_batch_and_large_scores():
    model = models.tagger(5, 6)
    gradients = {name: np.full_like(a, np.nan) for name, a in model.parameters.items()}
    assert model.loss_and_gradients(batch(0), gradients) == 0
    assert not any(g.any() for g in gradients.values())
    model.parameters["dense1.b"][...] = [1e4, -1e4, 0, 0, 0, 0]
    x, labels = batch(2)
    loss = model.loss_and_gradients((x, labels), gradients)
    assert np.isfinite(loss)
    assert all(np.isfinite(g).all() for g in gradients.values())


def test_it_learns():
    """Three entities that a line tells apart, of 20."""
    x = RNG.standard_normal((600, 10)).astype(np.float32)
    labels = np.zeros((600, 20), np.uint8)
    labels[:, :3] = x[:, :3] > 0.8
    labels[:, 3] = ~labels[:, :3].any(axis=1)
    for hidden in (0, 16):
        model = models.tagger(10, 20, hidden=hidden)
        optimizer = optim.adam(0.05)
        state = optimizer.init(model.parameters)
        gradients = {name: np.empty_like(a) for name, a in model.parameters.items()}
        before = models.gap(model.predict(x), labels)
        for _ in range(150):
            model.loss_and_gradients((x, labels), gradients)
            optimizer.update(gradients, state, model.parameters)
        assert models.hit_at_one(model.predict(x), labels) > 0.9
        assert before < 0.5 < 0.85 < models.gap(model.predict(x), labels)


def test_measures_by_hand():
    """GAP as in the paper: ranked over all samples, 20 (here 2) of each."""
    scores = np.array([[0.9, 0.1, 0.5], [0.3, 0.8, 0.2]])
    labels = np.array([[1, 0, 0], [1, 0, 0]])
    # Ranked: .9 hit, .8 miss, .5 miss, .3 hit: (1/1 + 2/4) / 2.
    assert models.gap(scores, labels, top=2) == pytest.approx(0.75)
    assert models.hit_at_one(scores, labels) == 0.5
    assert models.gap(scores, np.zeros((2, 3))) == 0
    assert models.gap(scores, labels, top=20) == pytest.approx(0.75)


def test_bad_input():
    model = models.from_settings("tagger", {"inputs": 5, "classes": 6})
    x, labels = batch()
    with pytest.raises(ConfigError, match=r"labels have shape \(7, 5\), expected \(7, 6\)"):
        model.loss_and_gradients((x, labels[:, :5]), {})
    with pytest.raises(ConfigError, match=r"input has shape \(7, 4\), expected \(n, 5\)"):
        model.predict(x[:, :4])
    with pytest.raises(ConfigError, match="hidden is -1, expected a whole number of at least 0"):
        models.tagger(5, 6, hidden=-1)
    assert sum(a.size for a in models.tagger().parameters.values()) == 1153 * 3862
