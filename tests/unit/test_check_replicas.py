"""The checksums of check_replicas, and which ranks its error names."""

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import installed

from mpidist.fault_tolerance.check_replicas import checksum, divergence


def test_every_bit_counts():
    """A flip of any bit of any element changes the checksum; so does another place or sign."""
    x = np.random.default_rng(0).standard_normal(50).astype("f4")
    seen = {checksum(x)}
    for bit in range(0, 50 * 32, 7):
        y = x.copy()
        y.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
        seen.add(checksum(y))
    assert len(seen) == 1 + len(range(0, 50 * 32, 7))
    assert checksum(x[::-1]) not in seen
    assert checksum(np.zeros(3)) != checksum(-np.zeros(3))


def test_layout_does_not_count():
    x = np.arange(60.0).reshape(5, 12)
    assert checksum(np.asfortranarray(x)) == checksum(x)
    assert checksum(np.repeat(x, 2, axis=1)[:, ::2]) == checksum(x)
    for odd in (np.empty((0, 3)), np.array(1.5), np.ones(3, ml_dtypes.bfloat16)):
        assert checksum(odd) == checksum(odd.copy())


def test_device_arrays_have_the_checksum_of_their_values():
    host = np.arange(30, dtype="f4")
    with installed() as cupy:
        assert checksum(cupy.asarray(host)) == checksum(host)


@pytest.mark.parametrize(
    ("ranks", "odd", "tensors", "text"),
    [
        ("aaba", (2,), ("w",), "rank 2's 'w' differs from the other 3 ranks;"),
        ("babab", (1, 3), ("w",), "ranks 1,3's 'w' differs from the other 3 ranks;"),
        ("aabc", (2, 3), ("w",), "ranks 2,3's 'w' differs from the other 2 ranks;"),
        ("aabb", (), ("w",), "'w' differs between ranks 0,1 and ranks 2,3;"),
        ("ab", (), ("w",), "'w' differs between both ranks;"),
        ("abc", (), ("w",), "'w' differs between all 3 ranks;"),
    ],
)
def test_the_most_are_right(ranks, odd, tensors, text):
    """Issue 3 point 6: rank and tensor; no side is accused where none has more."""
    error = divergence([{"v": "same", "w": each} for each in ranks], 300)
    assert (error.ranks, error.tensors) == (odd, tensors)
    assert str(error).startswith(f"replicas differ after step 300: {text}")
    assert error.everywhere


def test_several_tensors_and_missing_ones():
    good = {"a": "1", "b": "1", "c": "1"}
    error = divergence([good, {**good, "b": "2", "c": "2"}, good])
    assert "replicas differ: rank 1's 'b' and 1 more of 3 tensors differ" in str(error)
    assert error.tensors == ("b", "c")
    error = divergence([good, good, {"a": "1", "b": "1"}])
    assert error.ranks == (2,)
    assert error.tensors == ("c",)
