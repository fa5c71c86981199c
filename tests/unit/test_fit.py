"""The fit finds the parameters from which times were computed (issue 3); the file of parameters."""

import json

import numpy as np
import pytest

from mpidist.advice import fit
from mpidist.errors import ConfigError
from mpidist.simulator.network_model import DEFAULT, NetworkModel, Problem, load, save
from mpidist.simulator.simulate import run

RNG = np.random.default_rng(3)


def noisy(seconds):
    """Two per cent either way, as medians of a quiet machine have."""
    return np.asarray(seconds) * (1 + 0.02 * RNG.uniform(-1, 1, len(seconds)))


def test_line_is_not_ruled_by_the_longest():
    sizes = 2.0 ** np.arange(10, 25)
    slope, constant = fit.line(sizes, noisy(3e-9 * sizes + 5e-5))
    assert slope == pytest.approx(3e-9, rel=0.03)
    assert constant == pytest.approx(5e-5, rel=0.05)


@pytest.mark.parametrize("gap", [8.4e-9, 42e-9])
def test_link_with_a_bucket(gap):
    """The shaped network of the tests: 1 MB at once, then 1 Gbit/s or 200 Mbit/s."""
    sizes = np.array(fit.LINK_SIZES, float)
    seconds = 3e-5 + np.maximum(sizes * 6e-10, (sizes - 1e6) * gap)
    found = fit.link(fit.LINK_SIZES, noisy(seconds), 3e-5)
    assert found == pytest.approx((gap, 1e6, 6e-10), rel=0.25)
    assert found[0] == pytest.approx(gap, rel=0.03)


@pytest.mark.parametrize("held_up", [(0, 5), (1, 12), (4, 10)])
def test_link_on_a_busy_machine(held_up):
    """Other work holds up two of the messages: a short and a long one, or two short ones."""
    sizes = np.array(fit.LINK_SIZES, float)
    seconds = noisy(3e-5 + np.maximum(sizes * 6e-10, (sizes - 6e5) * 8.4e-9))
    seconds[list(held_up)] *= 3
    gap, burst, _ = fit.link(fit.LINK_SIZES, seconds, 3e-5)
    assert gap == pytest.approx(8.4e-9, rel=0.05)
    assert burst == pytest.approx(6e5, rel=0.5)


def test_link_without_a_bucket():
    sizes = np.array(fit.LINK_SIZES, float)
    gap, burst, peak = fit.link(fit.LINK_SIZES, noisy(3e-5 + sizes * 1e-9), 3e-5)
    assert gap == pytest.approx(1e-9, rel=0.03)
    assert (burst, peak) == (0, 0)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_crossing(share):
    network = NetworkModel(latency=1e-5, gap=8e-9, burst=1e6, peak=5e-10)
    true = network._replace(crossing=share)
    seconds = [
        run([fit._exchanges(r, size) for r in (0, 1)], Problem(2, size, 1, true)) / 4
        for size in fit.CROSSING_SIZES
    ]
    assert fit.fit_crossing(fit.CROSSING_SIZES, seconds, network) == pytest.approx(share, abs=0.03)


def test_file_and_back(tmp_path):
    network = DEFAULT._replace(latency=3e-5, incoming=False)
    save(tmp_path / "p.json", network, mpi="Open MPI 5")
    assert load(tmp_path / "p.json") == network
    assert json.loads((tmp_path / "p.json").read_text())["mpi"] == "Open MPI 5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no parameters of a network"),
        ("{", "no parameters of a network"),
        ("[]", "no parameters of a network"),
        ('{"parameters": 3}', "no parameters of a network"),
        ('{"parameters": {"gpa": 1}}', "unknown parameter 'gpa'.*did you mean 'gap'"),
        ('{"parameters": {"gap": -1}}', "gap is -1, expected"),
        ('{"parameters": {"gap": NaN}}', "gap is nan, expected"),
        ('{"parameters": {"gap": "fast"}}', "gap is 'fast', expected"),
    ],
)
def test_bad_file_is_one_line(tmp_path, text, message):
    file = tmp_path / "p.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(file)
