"""Layers with several batches on the way: the halves of `backward`, and any order of the passes."""

import numpy as np
import pytest

from mpidist import models
from mpidist.models import layers
from mpidist.models.layers import Convolution, Dense, Features, Images, MaxPool, Relu, Rows

#: Layer, and the shape of its x for a number of samples.
LAYERS = {
    "dense": (Dense("l", 70, 40), lambda n: (2, n, 70)),
    "convolution": (Convolution("l", 2, 3, 3), lambda n: (2, 2, 6, 5, n)),
    "convolution, padded": (Convolution("l", 2, 3, 5, 2), lambda n: (3, 2, 9, 8, n)),
    "max pool": (MaxPool(), lambda n: (2, 2, 6, 4, n)),
    "max pool, odd": (MaxPool(), lambda n: (2, 2, 7, 5, n)),
    "relu": (Relu(), lambda n: (2, n, 5)),
    "images": (Images(), lambda n: (2, n, 2, 5, 4)),
    "features": (Features(), lambda n: (2, 2, 3, 4, n)),
    "rows": (Rows(), lambda n: (2, n, 2, 4)),
}


def problem(layer, shape, seed):
    """Parameters, x, dy and empty gradients."""
    rng = np.random.default_rng(seed)
    parameters = {k: rng.standard_normal(s, np.float32) for k, s in layer.shapes().items()}
    x = rng.standard_normal(shape, np.float32)
    dy = rng.standard_normal(layer.forward(parameters, x)[0].shape, np.float32)
    return parameters, x, dy


def nans(layer, pieces):
    return {k: np.full((pieces, *s), np.nan, np.float32) for k, s in layer.shapes().items()}


def in_bytes(dx, gradients):
    """What a backward pass has made; a transposed view counts with the order of its memory."""
    return dx.tobytes(), dx.strides, [g.tobytes() for g in gradients.values()]


@pytest.mark.parametrize("samples", [0, 1, 7])
@pytest.mark.parametrize("name", LAYERS)
def test_the_halves_in_both_orders_have_the_bits_of_backward(name, samples):
    layer, shape = LAYERS[name]
    parameters, x, dy = problem(layer, shape(samples), 3)
    _, saved = layer.forward(parameters, x)
    whole, order = nans(layer, len(x)), []
    dx = layer.backward(parameters, saved, dy.copy(), whole, order.append)
    assert order == list(reversed(parameters))
    expected = in_bytes(dx, whole)
    for weights_first in (True, False):
        _, saved = layer.forward(parameters, x)
        found, pull, order = nans(layer, len(x)), dy.copy(), []
        if weights_first:
            layer.backward_weights(parameters, saved, pull, found, order.append)
            dx = layer.backward_input(parameters, saved, pull)
        else:
            dx = layer.backward_input(parameters, saved, pull)
            if parameters:  # the other half still needs dy
                np.testing.assert_array_equal(pull, dy)
                assert not np.shares_memory(dx, pull)
            kept = dx.copy()
            layer.backward_weights(parameters, saved, pull, found, order.append)
            np.testing.assert_array_equal(dx, kept, err_msg="a half changed the other's result")
        assert order == list(reversed(parameters))
        assert in_bytes(dx, found) == expected, weights_first


@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_batch_has_gradients_of_zero(name):
    """A short last batch may leave a microbatch without samples."""
    layer, shape = LAYERS[name]
    parameters, x, dy = problem(layer, shape(0), 0)
    y, saved = layer.forward(parameters, x)
    found = nans(layer, len(x))
    assert layer.backward(parameters, saved, dy, found).shape == x.shape
    assert y.size == 0
    for gradient in found.values():
        assert gradient.tobytes() == bytes(gradient.nbytes), "zero, and not -0.0"


@pytest.mark.parametrize("name", LAYERS)
def test_any_order_of_passes_has_the_same_bits(name):
    """Three batches, one of another size, in 40 random orders with forward before the halves."""
    layer, shape = LAYERS[name]
    cases = [problem(layer, shape(n), seed) for seed, n in enumerate((4, 6, 4))]
    parameters, expected = cases[0][0], []
    for _, x, dy in cases:
        _, saved = layer.forward(parameters, x)
        gradients = nans(layer, len(x))
        dx = layer.backward(parameters, saved, dy.copy(), gradients)
        expected.append(in_bytes(dx, gradients))
    rng = np.random.default_rng(8)
    for _ in range(40):
        saved, pulls, dxs = {}, {}, {}
        gradients = [nans(layer, len(x)) for _, x, _ in cases]
        open_actions, order = [("F", k) for k in range(3)], []
        while open_actions:
            action, k = open_actions.pop(rng.integers(len(open_actions)))
            order.append(f"{action}{k}")
            if action == "F":
                saved[k], pulls[k] = layer.forward(parameters, cases[k][1])[1], cases[k][2].copy()
                open_actions += [("I", k), ("W", k)]
            elif action == "I":
                dxs[k] = layer.backward_input(parameters, saved[k], pulls[k])
            else:
                layer.backward_weights(parameters, saved[k], pulls[k], gradients[k])
        found = [in_bytes(dxs[k], gradients[k]) for k in range(3)]
        assert found == expected, order


def test_a_convolution_reuses_its_windows_and_only_its_own():
    """The windows are copied once for F and B together, and anew after another batch."""
    copies = []

    class Counting(Convolution):
        def _columns(self, x):
            copies.append(x.shape[-1])
            return super()._columns(x)

    layer = Counting("l", 2, 3, 3)
    (parameters, one, d1), (_, two, d2) = (problem(layer, (1, 2, 6, 5, n), n) for n in (4, 6))
    copies.clear()
    _, saved = layer.forward(parameters, one)
    layer.backward(parameters, saved, d1, nans(layer, 1))
    assert copies == [4]
    _, saved_one = layer.forward(parameters, one)
    _, saved_two = layer.forward(parameters, two)
    layer.backward(parameters, saved_one, d1, nans(layer, 1))
    layer.backward(parameters, saved_two, d2, nans(layer, 1))
    assert copies == [4, 4, 6, 4, 6]


def test_every_layer_has_both_halves():
    classes = {c for c in vars(layers).values() if isinstance(c, type) and hasattr(c, "shapes")}
    found = {c for c in classes if not c.__name__.startswith("_")}
    assert found == {type(layer) for layer, _ in LAYERS.values()}
    assert {type(layer) for layer in models.lenet().layers} < found
    for cls in found:
        assert callable(cls.backward_input)
        assert callable(cls.backward_weights)
