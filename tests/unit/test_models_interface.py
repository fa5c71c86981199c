"""The properties of a model on which training code relies."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpidist import models
from mpidist.errors import ConfigError

MAKERS = {
    "logistic": lambda seed=0: models.logistic([1, 8, 8], 10, seed),
    "mlp": lambda seed=0: models.mlp([[1, 8, 8], 32, 10], seed),
    "lenet": lambda seed=0: models.lenet((1, 8, 8), 10, seed),
}


def batch(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random((n, 1, 8, 8), np.float32), rng.integers(0, 10, n)


def zeros(model):
    return {k: np.zeros_like(v) for k, v in model.parameters.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_parameters(name):
    model = MAKERS[name]()
    assert {*MAKERS, "tagger"} == set(models.MODELS), "which has labels of its own, and its tests"
    assert model.state == {}
    assert all(v.dtype == np.float32 and v.flags.c_contiguous for v in model.parameters.values())
    same, other = MAKERS[name](), MAKERS[name](seed=1)
    for key, value in model.parameters.items():
        np.testing.assert_array_equal(value, same.parameters[key])
        assert value.ndim == 1 or not np.array_equal(value, other.parameters[key])


@pytest.mark.parametrize("name", MAKERS)
def test_ready_in_backward_order_and_final(name):
    """R129: each name once, in reverse order, and nothing is written after its call."""
    model = MAKERS[name]()
    gradients, seen = zeros(model), {}

    def ready(key):
        assert key not in seen
        seen[key] = gradients[key].copy()

    model.loss_and_gradients(batch(5), gradients, ready)
    assert list(seen) == list(reversed(model.parameters))
    for key, value in seen.items():
        np.testing.assert_array_equal(value, gradients[key])
        assert np.any(value)


@pytest.mark.parametrize("name", MAKERS)
def test_parts_of_a_batch_add_up(name):
    """R109: gradients weighted by samples over any parts equal the whole, an empty part too."""
    model = MAKERS[name]()
    inputs, labels = batch(13)
    whole, total = zeros(model), zeros(model)
    loss = model.loss_and_gradients((inputs, labels), whole)
    sum_of_losses = 0.0
    for start, stop in ((0, 4), (4, 4), (4, 5), (5, 13)):
        part = {k: np.full_like(v, np.nan) for k, v in model.parameters.items()}
        order = []
        share = (stop - start) / 13
        sum_of_losses += share * model.loss_and_gradients(
            (inputs[start:stop], labels[start:stop]), part, order.append
        )
        assert order == list(reversed(model.parameters))
        for key in total:
            total[key] += share * part[key]
            assert stop > start or not np.any(part[key])
    assert sum_of_losses == pytest.approx(loss, rel=1e-5)
    for key in total:
        np.testing.assert_allclose(total[key], whole[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        *MAKERS.values(),
        lambda: models.lenet((1, 8, 8), 10, channels=(32, 64)),
        lambda: models.lenet((1, 28, 28), 10),
        lambda: models.lenet((2, 17, 20), 10, channels=(3, 4)),
    ],
)
def test_pieces_in_one_call_have_the_bits_of_single_calls(make):
    """Issue 3, point 5: what a piece gets does not depend on how many a rank holds."""
    model = make()
    rng = np.random.default_rng(4)
    size = sum(v.size for v in model.parameters.values())
    for pieces, samples in ((1, 4), (2, 4), (3, 1), (4, 4), (4, 5), (7, 2), (2, 16), (3, 0)):
        inputs = rng.random((pieces, samples, *model.sample_shape), np.float32)
        labels = rng.integers(0, 10, (pieces, samples))
        # Each gradient is a part of every row, as training has them.
        rows, several, start = np.full((pieces, size + 2), np.nan, np.float32), {}, 0
        for key, value in model.parameters.items():
            several[key] = rows[:, start : start + value.size].reshape(pieces, *value.shape)
            start += value.size
        losses = model.piece_gradients((inputs, labels), several)
        assert losses.shape == (pieces,)
        for piece, found in enumerate(rows[:, :-2]):
            alone = zeros(model)
            loss = model.loss_and_gradients((inputs[piece], labels[piece]), alone)
            assert loss == losses[piece]
            expected = np.concatenate([g.ravel() for g in alone.values()])
            assert found.tobytes() == expected.tobytes(), (pieces, samples, piece)


@pytest.mark.parametrize("name", MAKERS)
def test_parameters_and_gradients_may_be_views_of_one_buffer(name):
    """R129: training code replaces entries of the dict; the model follows at the next call."""
    model, reference = MAKERS[name](), MAKERS[name]()
    expected = zeros(reference)
    loss = reference.loss_and_gradients(batch(6), expected)
    size = sum(v.size for v in model.parameters.values())
    buffer, flat, start, gradients = np.empty(size, "f4"), np.empty(size, "f4"), 0, {}
    for key, value in model.parameters.items():
        view = buffer[start : start + value.size].reshape(value.shape)
        view[...] = value
        value[...] = np.nan
        model.parameters[key] = view
        gradients[key] = flat[start : start + value.size].reshape(value.shape)
        start += value.size
    assert model.loss_and_gradients(batch(6), gradients) == loss
    np.testing.assert_array_equal(flat, np.concatenate([g.ravel() for g in expected.values()]))
    scores = model.predict(batch(6)[0])
    buffer *= 2
    assert not np.array_equal(model.predict(batch(6)[0]), scores)


@pytest.mark.parametrize("name", MAKERS)
def test_inputs_are_left_alone(name):
    inputs, labels = batch(6)
    kept = inputs.copy()
    inputs.flags.writeable = labels.flags.writeable = False
    model = MAKERS[name]()
    model.loss_and_gradients((inputs, labels), zeros(model))
    model.predict(inputs)
    np.testing.assert_array_equal(inputs, kept)


@pytest.mark.parametrize("name", MAKERS)
def test_predict(name):
    """Scores in chunks equal scores sample by sample; none for no sample."""
    model = MAKERS[name]()
    inputs, _ = batch(300)
    scores = model.predict(inputs)
    assert scores.shape == (300, 10)
    assert scores.dtype == np.float32
    one = np.concatenate([model.predict(inputs[i : i + 1]) for i in (0, 127, 128, 299)])
    np.testing.assert_allclose(scores[[0, 127, 128, 299]], one, rtol=1e-4, atol=1e-5)
    assert model.predict(inputs[:0]).shape == (0, 10)
    integers = (inputs * 255).astype(np.uint8)
    np.testing.assert_array_equal(
        model.predict(integers), model.predict(integers.astype(np.float32))
    )


@pytest.mark.parametrize("shape", [(1, 4, 4), (1, 15, 16), (3, 16, 16), (1, 28, 28), (1, 32, 33)])
def test_lenet_for_any_image(shape):
    model = models.lenet(shape, 3)
    inputs = np.random.default_rng(0).random((2, *shape), np.float32)
    assert model.predict(inputs).shape == (2, 3)
    kernel = 3 if min(shape[1:]) < 16 else 5
    assert model.parameters["conv2.weight"].shape == (16, 6, kernel, kernel)
    if shape == (1, 28, 28):
        assert model.parameters["dense1.weight"].shape == (400, 120), "LeNet-5"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.lenet((1, 3, 8)), r"image_shape is \[1, 3, 8\].*at least 4"),
        (lambda: models.lenet((8, 8)), "expected .channels, height, width"),
        (lambda: models.lenet(channels=[6]), r"lenet: channels is \[6\], expected two"),
        (lambda: models.lenet(classes=1), "lenet: classes is 1, .* of at least 2"),
        (lambda: models.mlp([5]), r"mlp: sizes is \[5\], expected"),
        (lambda: models.mlp([5, 2.5]), "mlp: sizes is 2.5, expected a whole number"),
        (lambda: models.logistic("x", 3), "logistic: inputs is 'x'"),
        (lambda: models.from_settings("lennet", {}), "unknown model 'lennet'.*mean 'lenet'"),
        (lambda: models.from_settings("mlp", {}), "model 'mlp': setting 'sizes' is missing"),
        (lambda: models.from_settings("lenet", {"chanels": 1}), "did you mean 'channels'"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_bad_batches():
    model = models.lenet((1, 8, 8))
    inputs, labels = batch(4)
    for bad, message in [
        ((inputs[:, 0], labels), r"shape \(4, 8, 8\), expected \(n, 1, 8, 8\)"),
        ((inputs, labels[:3]), "4 inputs but 3 labels"),
        ((inputs, labels * 0 - 1), "labels run from -1 to -1, expected 0 to 9"),
        ((inputs, labels * 0 + 10), "labels run from 10 to 10"),
    ]:
        with pytest.raises(ConfigError, match=message):
            model.loss_and_gradients(bad, zeros(model))
    with pytest.raises(ConfigError, match=r"2 pieces of 2 inputs, but labels of shape \(2, 3\)"):
        model.piece_gradients(
            (inputs.reshape(2, 2, 1, 8, 8), labels.reshape(2, 2)[:, [0, 0, 0]]), {}
        )


def test_the_model_in_the_documentation():
    """The example of docs/models.md is a model: right gradients, in place, any batch."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names = {}
    exec(compile(code, "docs/models.md", "exec"), names)
    model = names["Line"](3)
    rng = np.random.default_rng(0)
    model.parameters = {"weight": rng.standard_normal(3), "bias": rng.standard_normal(1)}
    batch = rng.standard_normal((5, 3)), rng.standard_normal(5)
    gradients = {k: np.full_like(v, np.nan) for k, v in model.parameters.items()}
    spare = {k: v.copy() for k, v in gradients.items()}
    order = []
    loss = model.loss_and_gradients(batch, gradients, order.append)
    assert loss == pytest.approx(np.mean((model.predict(batch[0]) - batch[1]) ** 2))
    assert order == ["bias", "weight"]
    for key, value in model.parameters.items():
        for i in range(value.size):
            value[i] += 1e-6
            higher = model.loss_and_gradients(batch, spare)
            value[i] -= 1e-6
            assert (higher - loss) / 1e-6 == pytest.approx(gradients[key][i], abs=1e-4)
    assert model.loss_and_gradients((batch[0][:0], batch[1][:0]), gradients) == 0
    assert not any(g.any() for g in gradients.values())


STEPS = """
import resource
import numpy as np
from mpidist.models import mlp

model, faults = mlp([4, 4]), []
model.parameters
for _ in range(8):
    arrays = [np.ones(1 << 18, np.float32) for _ in range(8)]
    del arrays
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[3])
"""


def test_steps_use_the_memory_of_the_steps_before():
    """Without `keep_freed_memory`, each of these steps has 2,000 page faults."""
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400
