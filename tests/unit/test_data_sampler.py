"""The sampler gives every sample once per epoch, even if ranks and batch size change."""

from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.data import Position, Sampler
from mpidist.errors import ConfigError


@settings(max_examples=200)
@given(
    count=st.integers(1, 41),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    phases=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(1, 7)), min_size=1, max_size=8
    ),
)
def test_every_epoch_is_covered_exactly_once(count, seed, shuffle, phases):
    """R66, R67, R109: any sequence of rank counts and global batch sizes, resumed in between."""
    position = Position()
    used = {0: [], 1: []}
    for size, global_batch, steps in cycle(phases):
        # Each phase is a new process that knows nothing but the saved position.
        sampler = Sampler(count, global_batch, seed, shuffle)
        position = Position.from_dict(position.as_dict())
        for _ in range(steps):
            epoch = position.epoch
            if epoch == 2:
                break
            indices, position = sampler.batch(position)
            parts = [sampler.local(indices, rank, size) for rank in range(size)]
            assert 1 <= len(indices) <= global_batch
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            np.testing.assert_array_equal(np.concatenate(parts), indices)
            used[epoch].extend(int(i) for part in parts for i in part)
        if position.epoch == 2:
            break
    assert position == Position(2, 0)
    for epoch, order in used.items():
        assert sorted(order) == list(range(count)), f"epoch {epoch}"
        np.testing.assert_array_equal(order, Sampler(count, 1, seed, shuffle).order(epoch))


def test_order_depends_on_seed_and_epoch_alone():
    a, b = Sampler(100, 7, seed=5), Sampler(100, 64, seed=5)
    np.testing.assert_array_equal(a.order(3), b.order(3))
    np.testing.assert_array_equal(a.order(3), np.random.default_rng((5, 3)).permutation(100))
    assert not np.array_equal(a.order(3), a.order(4))
    assert not np.array_equal(a.order(3), Sampler(100, 7, seed=6).order(3))
    np.testing.assert_array_equal(Sampler(5, 2, shuffle=False).order(9), np.arange(5))


def test_order_cannot_be_damaged():
    indices, _ = Sampler(10, 4).batch(Position())
    with pytest.raises(ValueError, match="read-only"):
        indices[0] = 3


@pytest.mark.parametrize(("count", "global_batch"), [(10, 3), (10, 5), (10, 10), (10, 64), (1, 1)])
def test_position_of_a_step(count, global_batch):
    """`position(step)` is where stepping arrives, and steps_per_epoch is how long it takes."""
    sampler = Sampler(count, global_batch)
    position = Position()
    for step in range(3 * sampler.steps_per_epoch + 1):
        assert sampler.position(step) == position
        assert (position.offset == 0) == (step % sampler.steps_per_epoch == 0)
        _, position = sampler.batch(position)


def test_local_batch_is_explicit():
    """R109: global and local batch are both to be asked for; ranks beyond the batch get none."""
    sampler = Sampler(100, 10)
    assert [sampler.local_batch(r, 4) for r in range(4)] == [3, 3, 2, 2]
    assert [sampler.local_batch(r, 12) for r in range(12)] == [1] * 10 + [0, 0]
    indices, _ = sampler.batch(Position())
    assert [len(sampler.local(indices, r, 4)) for r in range(4)] == [3, 3, 2, 2]
    assert len(sampler.local(indices, 11, 12)) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampler(0, 4), "count is 0, expected a whole number of at least 1"),
        (lambda: Sampler(10, 0), "global_batch is 0, expected"),
        (lambda: Sampler(10, -3), "global_batch is -3, expected"),
        (lambda: Sampler(10, 2.5), "global_batch is 2.5, expected a whole number"),
        (lambda: Sampler(10, 2, seed=-1), "seed is -1"),
        (lambda: Sampler(10, 2).batch(Position(0, 10)), "offset 10; expected.*below the 10"),
        (lambda: Sampler(10, 2).batch(Position(-1, 0)), "epoch -1"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
