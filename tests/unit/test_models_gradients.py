"""The gradients of every layer and model equal finite differences in float64."""

import itertools

import numpy as np
import pytest

from mpidist import models
from mpidist.models import layers
from mpidist.models.layers import (
    Convolution,
    Dense,
    Features,
    Images,
    MaxPool,
    Relu,
    Rows,
    softmax_cross_entropy,
)


def differences(function, x, count=60, step=1e-6, seed=0):
    """Central differences of a scalar `function` at some entries of `x`: (indices, slopes)."""
    rng = np.random.default_rng(seed)
    flat = x.reshape(-1)
    chosen = rng.permutation(flat.size)[:count]
    slopes = []
    for i in chosen:
        kept = flat[i]
        flat[i] = kept + step
        high = function()
        flat[i] = kept - step
        slopes.append((high - function()) / (2 * step))
        flat[i] = kept
    return chosen, np.array(slopes)


LAYERS = {
    "dense": (Dense("l", 7, 4), (2, 5, 7)),
    "convolution": (Convolution("l", 2, 3, 3), (2, 2, 6, 5, 4)),
    "convolution, padded": (Convolution("l", 2, 3, 5, 2), (3, 2, 6, 7, 3)),
    "convolution, one sample": (Convolution("l", 1, 2, 3, 1), (1, 1, 4, 4, 1)),
    "max pool": (MaxPool(), (2, 2, 6, 4, 3)),
    "max pool, odd": (MaxPool(), (2, 2, 7, 5, 3)),
    "relu": (Relu(), (2, 6, 5)),
    "images": (Images(), (2, 3, 2, 5, 4)),
    "features": (Features(), (2, 2, 3, 4, 5)),
    "rows": (Rows(), (2, 3, 2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    """Of several pieces, each has gradients of its own."""
    layer, shape = LAYERS[name]
    rng = np.random.default_rng(3)
    x = rng.standard_normal(shape)
    parameters = {k: rng.standard_normal(s) for k, s in layer.shapes().items()}
    gradients = {k: np.full((shape[0], *s), np.nan) for k, s in layer.shapes().items()}
    y, saved = layer.forward(parameters, x)
    pull = rng.standard_normal(y.shape)

    def loss():
        return float((layer.forward(parameters, x)[0] * pull).sum())

    before = x.copy()
    order = []
    dx = layer.backward(parameters, saved, pull.copy(), gradients, order.append, False)
    np.testing.assert_array_equal(x, before, err_msg="the input was written")
    assert order == list(reversed(parameters))
    assert dx.shape == x.shape
    chosen, slopes = differences(loss, x)
    np.testing.assert_allclose(dx.reshape(-1)[chosen], slopes, rtol=1e-6, atol=1e-7)
    for piece, (k, array) in itertools.product(range(shape[0]), parameters.items()):

        def loss_of_piece(piece=piece):
            return float((layer.forward(parameters, x)[0] * pull)[piece].sum())

        chosen, slopes = differences(loss_of_piece, array)
        gradient = gradients[k][piece].reshape(-1)[chosen]
        np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-7)


def test_convolution_is_a_convolution():
    """Against the definition, loop by loop."""
    rng = np.random.default_rng(0)
    layer = Convolution("l", 2, 3, 3, 1)
    x = rng.standard_normal((2, 5, 6, 2))
    w, b = rng.standard_normal((3, 2, 3, 3)), rng.standard_normal(3)
    [y], _ = layer.forward({"l.weight": w, "l.bias": b}, x[None])
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    assert y.shape == (3, 5, 6, 2)
    for o, i, j, n in np.ndindex(y.shape):
        expected = (w[o] * padded[:, i : i + 3, j : j + 3, n]).sum() + b[o]
        assert y[o, i, j, n] == pytest.approx(expected)


def test_pool_gives_a_tie_to_one():
    layer = MaxPool()
    x = np.ones((1, 1, 4, 4, 1))
    y, saved = layer.forward({}, x)
    dx = layer.backward({}, saved, np.ones_like(y), {})
    assert dx.sum() == 4
    assert set(dx.ravel()) == {0.0, 1.0}


def test_convolution_takes_batches_of_changing_size():
    """The scratch memory grows and is reused, and no call sees what another left in it."""
    rng = np.random.default_rng(1)
    layer = Convolution("l", 1, 2, 3)
    p = {"l.weight": rng.standard_normal((2, 1, 3, 3)), "l.bias": np.zeros(2)}
    x = rng.standard_normal((1, 1, 6, 6, 9))
    whole, _ = layer.forward(p, x)
    first, saved = layer.forward(p, x[..., :2])
    layer.forward(p, x[..., 2:])
    np.testing.assert_allclose(first, whole[..., :2])
    g = {k: np.empty((1, *v.shape)) for k, v in p.items()}
    layer.backward(p, saved, np.ones_like(first), g)
    np.testing.assert_allclose(g["l.bias"], 16 * 2)
    expected = [[x[0, 0, i : i + 4, j : j + 4, :2].sum() for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(g["l.weight"][0, 0, 0], expected)


def test_softmax_cross_entropy():
    rng = np.random.default_rng(2)
    scores, labels = rng.standard_normal((2, 3, 4)), np.array([[0, 3, 2], [2, 1, 0]])
    losses, gradient = softmax_cross_entropy(scores, labels)
    shares = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    right = np.take_along_axis(shares, labels[..., None], axis=2)
    np.testing.assert_allclose(losses, -np.log(right).mean(axis=(1, 2)))
    chosen, slopes = differences(lambda: softmax_cross_entropy(scores, labels)[0].sum(), scores)
    np.testing.assert_allclose(gradient.reshape(-1)[chosen], slopes, atol=1e-8)


def test_softmax_cross_entropy_of_huge_scores():
    with np.errstate(all="raise", under="ignore"):
        loss, gradient = softmax_cross_entropy(
            np.array([[[1e4, 0.0], [0.0, 1e4]]], np.float32), np.array([[0, 0]])
        )
    assert loss == pytest.approx([5000])
    np.testing.assert_allclose(gradient, [[[0, 0], [-0.5, 0.5]]])


MODELS = {
    "logistic": (lambda: models.logistic(6, 3, seed=1), (6,), 3),
    "mlp": (lambda: models.mlp([[2, 3], 8, 5, 4], seed=1), (2, 3), 4),
    "lenet 8x8": (lambda: models.lenet((1, 8, 8), 10, seed=1), (1, 8, 8), 10),
    "lenet 2x17x20": (lambda: models.lenet((2, 17, 20), 5, 1, (3, 4), (9, 8)), (2, 17, 20), 5),
    "lenet 28x28": (lambda: models.lenet(seed=1), (1, 28, 28), 10),
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    """R13: the gradient of the mean loss, by every parameter."""
    make, shape, classes = MODELS[name]
    model = make()
    rng = np.random.default_rng(5)
    for key, value in model.parameters.items():
        # Biases too, so that no map is exactly zero, where ReLU and pooling have no slope.
        noise = 0.1 * rng.standard_normal(value.shape)
        model.parameters[key] = value.astype(np.float64) + noise
    batch = rng.standard_normal((4, *shape)), rng.integers(0, classes, 4)
    gradients = {k: np.full_like(v, np.nan) for k, v in model.parameters.items()}
    spare = {k: np.empty_like(v) for k, v in model.parameters.items()}
    loss = model.loss_and_gradients(batch, gradients)
    assert isinstance(loss, float)
    for key, value in model.parameters.items():
        chosen, slopes = differences(
            lambda: model.loss_and_gradients(batch, spare), value, count=8, step=1e-6
        )
        np.testing.assert_allclose(
            gradients[key].reshape(-1)[chosen], slopes, rtol=1e-5, atol=1e-8, err_msg=key
        )


def test_layers_have_the_same_interface():
    """Every public class of layers.py can be a layer of a Network."""
    classes = {c for c in vars(layers).values() if isinstance(c, type) and hasattr(c, "shapes")}
    found = {c for c in classes if not c.__name__.startswith("_")}
    tested = {type(layer) for layer, _ in LAYERS.values()}
    assert found == tested
