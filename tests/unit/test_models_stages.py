"""A part of a `Network`: its parameters alone, and the loss apart from the layers."""

import tracemalloc

import numpy as np
import pytest

from mpidist import models
from mpidist.arrays import keep_freed_memory
from mpidist.errors import ConfigError
from mpidist.models.layers import Dense, Relu, Rows
from mpidist.models.network import checked_input

MAKERS = {
    "logistic": lambda seed=0: models.logistic([1, 8, 8], 10, seed),
    "mlp": lambda seed=0: models.mlp([[1, 8, 8], 2048, 40, 10], seed),  # drawn in several parts
    "lenet": lambda seed=0: models.lenet((1, 8, 8), 10, seed),
}


def made(model):
    return "parameters" in vars(model)


@pytest.mark.parametrize("name", MAKERS)
def test_a_part_has_the_values_of_the_whole(name):
    whole = MAKERS[name](seed=4).parameters
    part = MAKERS[name](seed=4)
    count = len(part.layers)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            found = part.initial_parameters(start, stop)
            names = [n for layer in part.layers[start:stop] for n in layer.shapes()]
            assert list(found) == names
            for key, value in found.items():
                assert value.dtype == np.float32
                assert value.tobytes() == whole[key].tobytes(), (start, stop, key)
    assert list(part.initial_parameters()) == list(whole)
    assert not made(part)


def test_initial_parameters_are_new_and_initial():
    model = MAKERS["mlp"]()
    first = {k: v.copy() for k, v in model.parameters.items()}
    for value in model.parameters.values():
        value += 1
    again = model.initial_parameters()
    assert {k: v.tobytes() for k, v in again.items()} == {k: v.tobytes() for k, v in first.items()}
    assert model.parameters is model.parameters, "made once"
    model.parameters["dense1.bias"] = replaced = np.ones(2048, np.float32)
    assert model.parameters["dense1.bias"] is replaced


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 99), (99, None)])
def test_a_range_of_layers_must_exist(start, stop):
    with pytest.raises(ConfigError, match=r"initial_parameters: layers .*stop <= 13, the number"):
        MAKERS["lenet"]().initial_parameters(start, stop)


def test_a_part_needs_the_memory_of_its_layers_only():
    """Five layers of 4 MB: the fourth of them takes 4 MB, and 1 MB to draw."""
    layers = [Dense(f"dense{k}", 1000, 1000) for k in range(5)]
    keep_freed_memory()  # which Network calls once in a process: 31 MiB that are never touched
    tracemalloc.start()
    try:
        model = models.Network(layers, (1000,))
        assert model.classes == 1000
        parameters = model.initial_parameters(3, 4)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(value.nbytes for value in parameters.values())
    assert size == 4_004_000
    assert held < size + 1e5
    assert peak < size + 2e6
    assert not made(model)


def test_a_network_needs_a_layer_with_parameters():
    with pytest.raises(ConfigError, match="Network: none of the 2 layers has parameters"):
        models.Network([Rows(), Relu()], (3,))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_layers_and_loss_are_the_whole_step(name, pieces):
    """Run by hand, without `model.parameters`, they give the bits of `piece_gradients`."""
    model, reference = MAKERS[name](seed=2), MAKERS[name](seed=2)
    rng = np.random.default_rng(1)
    inputs = rng.random((pieces, 5, 1, 8, 8))
    labels = rng.integers(0, 10, (pieces, 5))
    expected = {k: np.empty((pieces, *v.shape), v.dtype) for k, v in reference.parameters.items()}
    expected_losses = reference.piece_gradients((inputs, labels), expected)

    parameters = model.initial_parameters()
    found = {k: np.empty((pieces, *v.shape), v.dtype) for k, v in parameters.items()}
    x = checked_input(model, inputs.reshape(-1, 1, 8, 8), like=next(iter(parameters.values())))
    x, tape = x.reshape(inputs.shape), []
    for layer in model.layers:
        x, saved = layer.forward(parameters, x)
        tape.append(saved)
    losses, dy = model.loss(x, labels)
    for layer, saved in zip(reversed(model.layers), reversed(tape), strict=True):
        dy = layer.backward(parameters, saved, dy, found)
    assert losses.tobytes() == expected_losses.tobytes()
    assert {k: g.tobytes() for k, g in found.items()} == {
        k: g.tobytes() for k, g in expected.items()
    }
    assert not made(model)


def test_the_loss_of_no_samples_is_zero():
    losses, gradient = MAKERS["mlp"]().loss(np.zeros((3, 0, 10), np.float32), np.zeros((3, 0), int))
    assert losses.tolist() == [0, 0, 0]
    assert gradient.shape == (3, 0, 10)


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        (
            (2, 3, 10),
            (2, 4),
            r"scores of shape \(2, 3, 10\) and labels of shape \(2, 4\), expected",
        ),
        ((2, 3, 9), (2, 3), r"expected \(pieces, samples, 10\) and \(pieces, samples\)"),
        ((3, 10), (3,), "expected .pieces, samples, 10"),
        ((3, 10), (3, 10), "expected .pieces, samples, 10"),
    ],
)
def test_the_loss_refuses_other_shapes(scores, labels, message):
    with pytest.raises(ConfigError, match=message):
        MAKERS["mlp"]().loss(np.zeros(scores, np.float32), np.zeros(labels, int))


@pytest.mark.parametrize("label", [-1, 10])
def test_the_loss_refuses_labels_beyond_the_classes(label):
    with pytest.raises(ConfigError, match=f"labels run from .*{label}.*expected 0 to 9"):
        MAKERS["mlp"]().loss(np.zeros((1, 1, 10), np.float32), np.array([[label]]))


def test_labels_may_be_a_list():
    model = MAKERS["logistic"]()
    inputs = np.random.default_rng(0).random((3, 1, 8, 8), np.float32)
    gradients = {k: np.empty_like(v) for k, v in model.parameters.items()}
    expected = model.loss_and_gradients((inputs, np.array([1, 2, 3])), gradients)
    assert model.loss_and_gradients((inputs, [1, 2, 3]), gradients) == expected
