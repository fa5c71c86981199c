"""Clipping by the global norm: its formula, its wrapper, and the cases in which it is refused."""

import math

import ml_dtypes
import numpy as np
import pytest

from mpidist import optim
from mpidist.errors import ConfigError
from mpidist.optim.optimizer import PIECE


def tree(scale=1.0, dtype="f4"):
    rng = np.random.default_rng(3)
    return {
        "w": (scale * rng.standard_normal((40, 30))).astype(dtype),
        "b": (scale * rng.standard_normal(30)).astype(dtype),
        "long": (scale * rng.standard_normal(PIECE + 5)).astype(dtype),
        "none": np.empty(0, dtype),
    }


def exact(gradients):
    return math.sqrt(math.fsum(float(v) ** 2 for g in gradients.values() for v in g.reshape(-1)))


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", ml_dtypes.bfloat16])
def test_what_is_too_long_is_shortened_in_place(dtype):
    gradients = tree(dtype=dtype)
    before = {name: g.copy() for name, g in gradients.items()}
    norm = optim.global_norm(gradients)
    assert norm == pytest.approx(exact(before), rel=1e-12)
    assert optim.clip_by_global_norm(gradients, norm / 2) == norm
    for name, g in gradients.items():
        assert g.dtype == before[name].dtype
        np.testing.assert_allclose(g.astype("f8"), before[name].astype("f8") / 2, rtol=1e-2)
    if dtype == "f8":
        assert optim.global_norm(gradients) == pytest.approx(norm / 2, rel=1e-12)


def test_what_is_short_enough_stays_to_the_bit():
    gradients = tree()
    before = {name: g.copy() for name, g in gradients.items()}
    optim.clip_by_global_norm(gradients, 1e9)
    assert all(np.array_equal(gradients[name], before[name]) for name in before)
    # Squares beyond the range of the dtype are no reason to lose the gradient.
    large = {"h": np.full(4, 60_000, np.float16)}
    assert optim.clip_by_global_norm(large, 1.0) == 120_000
    np.testing.assert_allclose(large["h"], 0.5, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_number_stays_for_the_loss_to_tell(bad):
    gradients = {"w": np.array([1.0, bad]), "v": np.ones(2)}
    assert not math.isfinite(optim.clip_by_global_norm(gradients, 0.1))
    assert (gradients["v"] == 1).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_the_wrapper_is_the_same_and_leaves_gradients_alone(scale):
    """Issue 3 point 6: an update with `clipped` equals clipping by hand and then the update."""
    inner = optim.momentum(0.1)
    wrapped = optim.clipped(inner, 1.0)
    ours, theirs = tree(), tree()
    states = inner.init(ours), wrapped.init(theirs)
    for step in range(3):
        gradients = tree(scale * (step + 1))
        kept = {name: g.copy() for name, g in gradients.items()}
        wrapped.update(gradients, states[1], theirs, weight=0.5)
        assert all(np.array_equal(gradients[name], kept[name]) for name in kept)
        optim.clip_by_global_norm(gradients, 1.0)
        inner.update(gradients, states[0], ours, weight=0.5)
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_cuts_of_the_memory_do_not_change_the_norm():
    """The same bits from a view as from an array, whatever its strides."""
    x = np.random.default_rng(0).standard_normal((300, 700)).astype("f4")
    wide = np.zeros((300, 1400), "f4")
    wide[:, ::2] = x
    assert optim.global_norm({"x": wide[:, ::2]}) == optim.global_norm({"x": x})


def test_job_files_know_it():
    made = optim.from_settings("sgd", {"lr": 0.1, "clip_norm": 2})
    assert made.settings["clip_norm"] == 2.0
    assert (made.name, made.elementwise) == ("sgd", False)
    assert optim.from_settings("sgd", {"lr": 0.1}).elementwise
    for wrong in (0, -1.0, "x", True, float("nan")):
        with pytest.raises(ConfigError, match="max_norm is"):
            optim.from_settings("sgd", {"lr": 0.1, "clip_norm": wrong})
