"""The pool of buffers: operations share buffers, up to a limit; a full pool is reported (R41)."""

import numpy as np

from mpidist import events
from mpidist.runtime.buffer_pool import BufferPool, rounded


def test_sizes_are_few_and_waste_little():
    for n in range(1, 5000):
        assert n <= rounded(n) <= max(256, n * 1.25)
    assert len({rounded(n) for n in range(1 << 20, 1 << 21)}) <= 5
    assert rounded(1 << 20) == 1 << 20


def test_nearly_equal_shapes_share_a_buffer():
    pool = BufferPool()
    first = pool.take(1000, np.float32)
    assert (first.size, first.dtype) == (1000, np.float32)
    where = first.ctypes.data
    pool.give(first)
    second = pool.take(505, np.float64)
    assert second.ctypes.data == where
    assert pool.kept == 0
    other = pool.take(505, np.float64)
    assert other.ctypes.data != where


def test_an_empty_vector_is_a_buffer_too():
    pool = BufferPool()
    pool.give(pool.take(0, np.float32))
    assert pool.kept == 256


def test_what_is_kept_stays_below_the_limit_and_that_is_told():
    pool = BufferPool(limit=10_000)
    events.recent.clear()
    taken = [pool.take(1000 + 300 * k, np.uint8) for k in range(12)]
    for vector in taken:
        pool.give(vector)
        assert pool.kept <= 10_000
    assert [kind for _, kind, _ in events.recent] == ["buffer_pool_full"]
    pool.give(pool.take(20_000, np.uint8))
    assert pool.kept <= 10_000
    pool.close()
    assert pool.kept == 0
