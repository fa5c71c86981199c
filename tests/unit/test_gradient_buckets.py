"""The division of gradients into buckets that are sent together (R100)."""

import pytest

from mpidist.errors import ConfigError
from mpidist.gradients.gradient_buckets import LEAST, MOST, bucket_bytes, cut_buckets


@pytest.mark.parametrize("limit", [1, 10, 25, 100, 10_000])
def test_every_tensor_is_in_one_bucket_in_order(limit):
    sizes = [3, 50, 0, 7, 7, 7, 100, 1]
    buckets = cut_buckets(sizes, limit)
    assert [k for first, last in buckets for k in range(first, last)] == list(range(len(sizes)))
    for first, last in buckets[1:-2]:
        assert sum(sizes[first:last]) >= limit
        assert sum(sizes[first : last - 1]) < limit


def test_the_first_and_the_last_are_a_quarter():
    """Until the first leaves the wire is idle, and nothing hides the last."""
    assert cut_buckets([5] * 20, 40) == [(0, 2), (2, 10), (10, 18), (18, 20)]
    assert cut_buckets([5] * 16, 40) == [(0, 2), (2, 10), (10, 14), (14, 16)]


def test_no_tensors_no_buckets():
    assert cut_buckets([], 10) == []


def test_auto_is_a_sixteenth_within_bounds():
    assert bucket_bytes("auto", 0) == LEAST
    assert bucket_bytes("auto", 16 << 20) == 1 << 20
    assert bucket_bytes("auto", 16 << 30) == MOST
    assert bucket_bytes(12, 1 << 30) == 12


@pytest.mark.parametrize("wanted", [0, -1, "big", 1.5, True, None])
def test_bad_sizes_are_refused(wanted):
    with pytest.raises(ConfigError, match="bucket_bytes"):
        bucket_bytes(wanted, 100)
