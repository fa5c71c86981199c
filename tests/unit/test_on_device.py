"""Arrays on a device where a host array was expected: converted, or refused in one line."""

from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest

from mpidist.errors import ConfigError
from mpidist.models import layers, lenet
from mpidist.models.tagger import gap, hit_at_one
from mpidist.servers.layout.row_selection import Selection
from mpidist.training.checks import check_loss, check_model


@pytest.fixture
def cupy():
    with fake_cupy.installed() as module:
        yield module


def test_a_loss_on_a_device_becomes_a_number(cupy):
    """The losses of an epoch are one NumPy array, which takes no device arrays."""
    for values in (0.5, [0.5]):
        loss = check_loss(cupy.asarray(np.array(values, "f4")))
        assert (type(loss), loss) == (float, 0.5)
    with pytest.raises(ConfigError, match="expected the mean loss"):
        check_loss(cupy.asarray(np.ones(2)))


def test_rows_on_a_device(cupy):
    tensor = SimpleNamespace(name="t", shape=(5, 2), open=None)
    rows = Selection("m", SimpleNamespace(tensors=[tensor])).rows("t", cupy.asarray([4, 1]))
    assert isinstance(rows, np.ndarray)
    assert (rows.dtype, rows.tolist()) == (np.int64, [4, 1])


def test_scores_on_a_device(cupy):
    scores, labels = np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([[0, 1], [0, 1]])
    assert hit_at_one(cupy.asarray(scores), cupy.asarray(labels)) == 0.5
    assert gap(cupy.asarray(scores), cupy.asarray(labels)) == gap(scores, labels)


def test_a_model_half_on_a_device_is_refused(cupy):
    here, there = np.ones(2), cupy.asarray(np.ones(2))
    for parameters in ({"a": here, "b": here}, {"a": there, "b": there}):
        model = SimpleNamespace(parameters=parameters, state={"n": here}, loss_and_gradients=len)
        check_model(model, False)
    model.parameters = {"a": here, "b": there}
    with pytest.raises(ConfigError, match="'a' is on the host, 'b' on a device; move all to one"):
        check_model(model, False)


class Strict:
    """NumPy, whose matrix product takes its result as CuPy's does: by keyword only."""

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, *, out=None):
        return np.matmul(a, b, out=out)


def test_products_are_written_as_cupy_demands(monkeypatch):
    monkeypatch.setattr(layers, "array_module", lambda x: Strict())
    model = lenet([1, 8, 8], 3, channels=[2, 3], hidden=[5, 4])
    gradients = {name: np.full_like(array, 9) for name, array in model.parameters.items()}
    batch = np.random.default_rng(1).standard_normal((4, 1, 8, 8)).astype("f4"), np.arange(4) % 3
    loss = model.loss_and_gradients(batch, gradients)
    monkeypatch.undo()
    again = {name: np.zeros_like(array) for name, array in model.parameters.items()}
    assert model.loss_and_gradients(batch, again) == loss
    assert all((gradients[name] == array).all() for name, array in again.items())
