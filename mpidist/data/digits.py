"""Handwritten digits without a download: the 1,797 images of 8 x 8 bundled with scikit-learn."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from ..registry import checked_whole
from .distortion import distorted
from .sources import ArraySource, Source


def digits(
    seed: int = 0, test: int = 360, distort: Mapping | None = None
) -> tuple[Source, ArraySource]:
    """Return (train, test) sources: images as float32 (n, 1, 8, 8) from 0 to 1, labels as int64.

    The test set has `test` samples, with every class as frequent as in the whole data set. `seed`
    chooses these samples; pass the same `seed` in all training runs, so that their test sets are
    equal. `distort` has keyword arguments for `Distorted`, which makes distorted copies of the
    training images: for example ``{"copies": 20, "shift": 0.5, "turn": 10, "scale": 0.1}``.

    Raises
    ------
    ConfigError
        When scikit-learn is not installed, or `test` is out of range.

    References
    ----------
    E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998, doi 10.24432/C50P49 (scikit-learn has the test part of this data set).
    """
    seed, test = checked_whole("digits: seed", seed, 0), checked_whole("digits: test", test, 1)
    table = _table()
    images = (table[:, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = table[:, 64].astype(np.int64)
    if test >= len(labels):
        raise ConfigError(f"digits: test is {test}, expected from 1 to {len(labels) - 1}")
    chosen = stratified(labels, test, seed)
    rest = np.setdiff1d(np.arange(len(labels)), chosen, assume_unique=True)
    train = ArraySource(images[rest], labels[rest])
    return distorted(train, distort), ArraySource(images[chosen], labels[chosen])


def _table() -> np.ndarray:
    """Return scikit-learn's table: a row per image, with 64 pixels from 0 to 16 and the label."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            "the digits data set comes with scikit-learn, which is not installed here: "
            'pip install "mpidist[examples]"'
        )
    # Importing scikit-learn takes each rank a second; reading the file takes a tenth of that.
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    bundle = load_digits()
    return np.column_stack([bundle.data, bundle.target])


def stratified(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return `count` random indices of `labels`, sorted; classes are as frequent as in `labels`."""
    rng = np.random.default_rng(seed)
    classes, sizes = np.unique(labels, return_counts=True)
    # The shares are rounded by the largest remainder method: round all shares down, then add one to
    # the shares that lost most by the rounding. Equal losses are decided by the class number.
    exact = sizes * count / len(labels)
    shares = np.floor(exact).astype(int)
    lost = np.argsort(shares - exact, kind="stable")
    shares[lost[: count - shares.sum()]] += 1
    picks = [
        rng.permutation(np.flatnonzero(labels == label))[:share]
        for label, share in zip(classes, shares, strict=True)
    ]
    return np.sort(np.concatenate(picks))
