"""Make each accuracy run of docs/models.md with one seed; ``accuracy_runs.py`` uses five seeds."""

import accuracy_runs
import numpy as np
import pytest


def fewer_copies(recipe, copies, epochs):
    """The recipe on fewer copies, to save time."""
    return {**recipe, "distort": {**recipe["distort"], "copies": copies}, "epochs": epochs}


@pytest.mark.parametrize("copies", [5, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_lenet_on_digits(copies):
    """R13: the bundled digits, 1,437 to train and 360 to test; the recipe has 20 copies: 6 s."""
    train, test = accuracy_runs.sources("digits")
    recipe = fewer_copies(accuracy_runs.RECIPES["digits"], copies, epochs=5)
    accuracy, loss, _ = accuracy_runs.run(train, test, recipe, seed=0)
    assert accuracy >= 0.97
    assert loss < 0.1


def test_lenet_on_mnist10k(data_dir):
    """R13: 8,000 real images to train and 2,000 to test, an eighth of the recipe's steps."""
    train, test = accuracy_runs.sources("mnist10k", data_dir)
    recipe = fewer_copies(accuracy_runs.RECIPES["mnist10k"], 2, epochs=1)
    accuracy, _, _ = accuracy_runs.run(train, test, recipe, seed=0)
    assert accuracy >= 0.955


@pytest.mark.exhaustive
def test_delayed_gradients_on_digits():
    """The recipe stands pushes of 4 workers that are 4 pushes old: what ASP does to it."""
    train, test = accuracy_runs.sources("digits")
    recipe = fewer_copies(accuracy_runs.RECIPES["digits"], 4, epochs=6)
    accuracy, _, _ = accuracy_runs.run(train, test, recipe, seed=0, workers=4, stale=4)
    assert accuracy >= 0.96


def test_small_models_on_digits():
    """Logistic regression and a perceptron learn too, each as well as it can."""
    train, test = accuracy_runs.sources("digits")
    for name, settings, floor in [
        ("logistic", {"inputs": [1, 8, 8], "classes": 10}, 0.93),
        ("mlp", {"sizes": [[1, 8, 8], 64, 10]}, 0.95),
    ]:
        changes = {"model": (name, settings), "distort": None, "lr": 0.1, "epochs": 30}
        recipe = {**accuracy_runs.RECIPES["digits"], **changes}
        accuracy, loss, _ = accuracy_runs.run(train, test, recipe, seed=0)
        assert accuracy >= floor, name
        assert np.isfinite(loss)
