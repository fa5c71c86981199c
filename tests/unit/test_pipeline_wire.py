"""An activation that has been sent gives the next stage's products the bits of one rank."""

import itertools

import numpy as np
import pytest

from mpidist import models
from mpidist.errors import ConfigError
from mpidist.models.layers import softmax_cross_entropy
from mpidist.pipeline.activation_wire import from_wire, to_wire


def sent(array):
    """A copy of `array` that only the bytes on the wire have made."""
    buffer, shape, strides = to_wire(array)
    assert buffer.ndim == 1
    assert buffer.flags.c_contiguous
    assert np.shares_memory(buffer, array) or not array.size, "no copy before the send"
    arrived = from_wire(np.frombuffer(bytearray(buffer.tobytes()), buffer.dtype), shape, strides)
    assert arrived.shape == array.shape
    assert arrived.strides == array.strides
    np.testing.assert_array_equal(arrived, array)
    return arrived


def gradients_by_stages(model, cuts, inputs, labels):
    """The losses and gradients of `model`, with a message at each of `cuts`, in both directions."""
    gradients = {k: np.full((len(inputs), *v.shape), np.nan, v.dtype)
                 for k, v in model.parameters.items()}  # fmt: skip
    x, tape = inputs, []
    for k, layer in enumerate(model.layers):
        x = sent(x) if k in cuts else x
        x, saved = layer.forward(model.parameters, x)
        tape.append(saved)
    losses, dy = softmax_cross_entropy(x, labels)
    for k, layer in reversed(list(enumerate(model.layers))):
        dy = layer.backward(model.parameters, tape[k], dy, gradients)
        dy = sent(dy) if k in cuts else dy
    return losses, gradients


@pytest.mark.parametrize("samples", [1, 2, 5, 64])
@pytest.mark.parametrize("name", ["lenet", "lenet of 8 x 8", "mlp"])
def test_every_cut_keeps_the_bits(name, samples):
    model = {
        "lenet": lambda: models.lenet(seed=2),
        "lenet of 8 x 8": lambda: models.lenet((1, 8, 8), channels=(32, 64)),
        "mlp": lambda: models.mlp([[1, 28, 28], 64, 32, 10]),
    }[name]()
    rng = np.random.default_rng(samples)
    inputs = rng.random((1, samples, *model.sample_shape), np.float32)
    labels = rng.integers(0, 10, (1, samples))
    expected = {k: np.empty((1, *v.shape), v.dtype) for k, v in model.parameters.items()}
    losses = model.piece_gradients((inputs, labels), expected)
    inner = range(1, len(model.layers))
    for cuts in [(cut,) for cut in inner] + [tuple(inner)]:
        found_losses, found = gradients_by_stages(model, cuts, inputs, labels)
        assert found_losses.tobytes() == losses.tobytes()
        for key, gradient in expected.items():
            assert found[key].tobytes() == gradient.tobytes(), (cuts, key)


def test_any_order_of_axes_travels_without_a_copy():
    rng = np.random.default_rng(0)
    for shape in [(), (0, 3), (1, 1, 5), (4, 1, 1), (2, 3, 4, 5), (2, 1, 3, 1)]:
        for axes in itertools.permutations(range(len(shape))):
            sent(rng.standard_normal(shape, np.float32).transpose(axes))


def test_a_slice_is_copied_in_its_order():
    whole = np.arange(60.0).reshape(3, 4, 5).transpose(1, 2, 0)
    repeated = np.broadcast_to(whole, (2, *whole.shape))
    for part in (whole[:, 1:3], whole[::2], whole[..., ::-1], repeated):
        buffer, shape, strides = to_wire(part)
        assert not np.shares_memory(buffer, part)
        arrived = from_wire(buffer.copy(), shape, strides)
        np.testing.assert_array_equal(arrived, part)
    assert to_wire(whole[:, 1:3])[2] == (16, 8, 64)


@pytest.mark.parametrize(
    ("size", "shape", "strides"),
    [(6, (2, 4), (16, 4)), (8, (2, 4), (20, 4)), (8, (2, 4), (-16, 4)), (0, (2, 4), (16, 4))],
)
def test_a_view_never_leaves_its_memory(size, shape, strides):
    with pytest.raises(ConfigError, match=r"shape \(2, 4\).*same plan and model"):
        from_wire(np.zeros(size, np.float32), shape, strides)
