"""Distorted copies of samples are exact if possible, and do not depend on the rank that asks."""

import numpy as np
import pytest

from mpidist import data
from mpidist.data.distortion import Distorted, distort
from mpidist.errors import ConfigError


def images(n=6, height=8, width=7):
    return np.random.default_rng(0).random((n, 2, height, width), np.float32)


def moved(x, **amounts):
    names = ("down", "right", "turn", "tall", "broad")
    row = [amounts.get(name, 0.0) for name in names]
    return distort(x, np.tile(np.array(row, np.float32), (len(x), 1)))


def test_nothing_changes_nothing():
    x = images()
    np.testing.assert_array_equal(moved(x), x)
    assert moved(x[:0]).shape == (0, 2, 8, 7)


def test_whole_pixels():
    x = images()
    y = moved(x, down=2, right=-1)
    np.testing.assert_array_equal(y[:, :, 2:, :-1], x[:, :, :-2, 1:])
    assert not y[:, :, :2].any()
    assert not y[:, :, :, -1].any()


def test_half_a_pixel():
    x = images()
    y = moved(x, right=0.5)
    np.testing.assert_allclose(y[..., 1:], (x[..., 1:] + x[..., :-1]) / 2, rtol=1e-6)
    np.testing.assert_allclose(y[..., 0], x[..., 0] / 2, rtol=1e-6)


def test_quarter_turn():
    x = images(height=7, width=7)
    y = moved(x, turn=np.pi / 2)
    candidates = [np.rot90(x, k, axes=(2, 3)) for k in (1, -1)]
    assert min(np.abs(y - c).max() for c in candidates) < 1e-5


def test_scale():
    x = np.zeros((1, 1, 9, 9), np.float32)
    x[0, 0, 3:6, 3:6] = 1
    larger = moved(x, tall=0.5)[0, 0]
    assert larger[:, 4].sum() == pytest.approx(4.5, abs=0.6)
    assert larger[4].sum() == pytest.approx(3)


def test_source():
    """A pure function of the index, so any split over ranks and steps gives the same samples."""
    x, labels = images(), np.arange(6)
    source = Distorted(data.ArraySource(x, labels), 4, shift=1, turn=10, scale=0.1)
    assert isinstance(source, data.Source)
    assert len(source) == 24
    everything = source.take(np.arange(24))
    np.testing.assert_array_equal(everything[1], np.tile(labels, 4))
    assert everything[0].dtype == np.float32
    for chosen in ([3], [23, 0, 9, 9], []):
        part = source.take(np.array(chosen, int))
        np.testing.assert_array_equal(part[0], everything[0][chosen])
        np.testing.assert_array_equal(part[1], everything[1][chosen])
    copies = everything[0].reshape(4, *x.shape)
    assert not np.allclose(copies[0], copies[1])
    assert np.abs(copies - x).mean() < np.abs(x - x[::-1]).mean(), "still the same images"
    again = Distorted(data.ArraySource(x, labels), 4, shift=1, turn=10, scale=0.1)
    np.testing.assert_array_equal(again.take(np.arange(24))[0], everything[0])


def test_sources_with_copies():
    train, test = data.from_settings(
        "digits", {"distort": {"copies": 3, "shift": 0.5, "turn": 10, "scale": 0.1}}
    )
    assert (len(train), len(test)) == (3 * 1437, 360)
    np.testing.assert_array_equal(test.arrays[0], data.digits()[1].arrays[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"copies": 0}, "copies is 0, expected a whole number of at least 1"),
        ({"copies": 2, "shift": -1}, "shift is -1, expected 0 <= shift"),
        ({"copies": 2, "scale": 1}, "scale is 1, expected"),
        ({"copies": 2, "trun": 1}, "unknown setting 'trun'.*did you mean 'turn'"),
        ({"shift": 1}, "setting 'copies' is missing"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        data.digits(distort=settings)
