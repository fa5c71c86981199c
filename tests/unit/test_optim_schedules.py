"""Learning-rate schedules equal their formulas."""

import math

import pytest

from mpidist import optim
from mpidist.errors import ConfigError


def test_constant():
    assert [optim.constant(0.3)(s) for s in (0, 7, 1e9)] == [0.3] * 3


def test_cosine():
    rate = optim.cosine(0.4, steps=110, warmup=10, final=0.1)
    assert rate(0) == pytest.approx(0.04)
    assert rate(9) == pytest.approx(0.4)
    assert rate(10) == pytest.approx(0.4)
    assert rate(60) == pytest.approx(0.25)
    assert rate(35) == pytest.approx(0.1 + 0.3 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rate(110) == rate(5000) == pytest.approx(0.1)
    rates = [rate(s) for s in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


def test_cosine_never_exceeds_lr_at_fractions():
    """A server sees fractions of a step (R109); the warm-up must not overshoot between them."""
    rate = optim.cosine(0.4, steps=20, warmup=3)
    assert max(rate(i / 8) for i in range(200)) == pytest.approx(0.4)


def test_step_decay():
    rate = optim.step_decay(1.0, every=10, factor=0.5)
    assert [rate(s) for s in (0, 9, 10, 19, 20, 35)] == [1, 1, 0.5, 0.5, 0.25, 0.125]
    assert rate(sum([0.1] * 100)) == 0.5, "a sum of shares is just below 10"
    warm = optim.step_decay(1.0, every=10, factor=0.5, warmup=4)
    assert [warm(s) for s in (0, 1, 3, 4, 10)] == [0.25, 0.5, 1, 1, 0.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.cosine(0.1, steps=0), "steps is 0, expected a whole number of at least 1"),
        (lambda: optim.cosine(0.1, steps=5, warmup=5), "expected fewer than steps"),
        (lambda: optim.cosine(0.1, steps=2.5), "steps is 2.5, expected a whole number"),
        (lambda: optim.step_decay(0.1, every=3, factor=1.5), "factor is 1.5"),
        (lambda: optim.constant(float("inf")), "lr is inf"),
        (lambda: optim.constant(True), "lr is True"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
