"""The shuffle needs no permutation in memory, and gives every record exactly once (issue 4)."""

import numpy as np
import pytest

from mpidist.data import Position, Sampler
from mpidist.data.sampler import PERMUTED
from mpidist.data.shuffle import Bijection
from mpidist.errors import ConfigError


@pytest.mark.parametrize("count", [*range(1, 70), 255, 256, 257, 1000, 4096, 4097, 65535, 100_003])
def test_it_is_a_bijection(count):
    for key in ((0, 0), (0, 1), (7, 3)):
        images = Bijection(count, key)(np.arange(count))
        assert images.dtype == np.int64
        np.testing.assert_array_equal(np.sort(images), np.arange(count))


def test_pieces_are_parts_of_the_whole():
    """What a place maps to does not depend on what it is asked for with."""
    bijection = Bijection(10_007, (3, 1))
    whole = bijection(np.arange(10_007))
    for places in ([], [17], [9, 9, 10_006], range(5000, 5100)):
        places = np.array(places, np.int64)
        np.testing.assert_array_equal(bijection(places), whole[places])


def test_a_thousand_million_million_records():
    """No memory and no 32-bit number anywhere: places beyond 2^49 of 10^15 records."""
    count = 10**15
    bijection = Bijection(count, (1, 2))
    images = bijection(np.arange(count - 5000, count))
    assert len(set(images.tolist())) == 5000
    assert images.min() >= 0
    assert count * 0.99 < images.max() < count


@pytest.mark.parametrize("count", [1000, 4097, 60_000])
def test_it_looks_like_a_shuffle(count):
    """Where a record goes is even over all places, and neighbours part; the bounds are 5 sigma."""
    images = np.array([Bijection(count, (0, e))(np.arange(count)) for e in range(64)])
    cells = np.array([np.bincount(row[: count // 2] * 16 // count, minlength=16) for row in images])
    expected = count / 32
    chi2 = ((cells.sum(0) - 64 * expected) ** 2 / (64 * expected)).sum()
    assert chi2 < 15 + 5 * np.sqrt(30)
    for lag in (1, 2, 64):
        a, b = images[:, :-lag].ravel(), images[:, lag:].ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(a.size) + 2 / count
    # As many records stay where they are as of any shuffle: 1 per epoch, Poisson.
    assert 64 - 5 * 8 < (images == np.arange(count)).sum() < 64 + 5 * 8
    # Two epochs, and two seeds one apart, have nothing to do with each other.
    for a, b in ((images[0], images[1]), (images[0], Bijection(count, (1, 0))(np.arange(count)))):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(count)


def test_the_order_is_part_of_a_checkpoint():
    """It may never change: these are the first places of format 1."""
    assert Bijection(1000, (0, 0))(np.arange(8)).tolist() == FIRST
    large = Sampler(PERMUTED + 1, 8)
    assert large.shuffle == "bijection"
    assert Sampler(PERMUTED, 8).shuffle == "permutation"


FIRST = [856, 401, 99, 877, 337, 414, 821, 546]


def test_the_sampler_keeps_windows_of_it():
    """Batches over the borders of windows, and larger than one, are the order in pieces."""
    count = 40_000
    order = Bijection(count, (5, 0))(np.arange(count))
    for batch in (7, 1000, 16384, 20_000, 50_000):
        sampler, position, used = Sampler(count, batch, 5, "bijection"), Position(), []
        while position.epoch == 0:
            indices, position = sampler.batch(position)
            used.append(indices)
        np.testing.assert_array_equal(np.concatenate(used), order)
        assert not indices.flags.writeable
        np.testing.assert_array_equal(sampler.order(0), order)


def test_no_memory_for_a_large_data_set():
    sampler = Sampler(10**12, 64, seed=1)
    indices, _ = sampler.batch(Position(3, 10**11))
    assert len(set(indices.tolist())) == 64


def test_unknown_shuffle():
    with pytest.raises(ConfigError, match="shuffle is 'sorted', expected 'permutation', 'bij"):
        Sampler(10, 2, shuffle="sorted")
