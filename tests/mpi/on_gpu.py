"""Helpers of the tests on a real GPU, which also run with NumPy (fixture `xp`)."""

from contextlib import nullcontext
from functools import cache

import numpy as np

#: Cycles of a GPU that take about 20 ms.
CYCLES = 30_000_000
SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def same(x, expected, **tolerance):
    """Assert the values of a host or device array."""
    if tolerance:
        np.testing.assert_allclose(host(x).astype("f8"), expected, **tolerance)
    else:
        np.testing.assert_array_equal(host(x), expected)


def other_stream(xp):
    """A context in whose stream the work goes on that waits for no other stream."""
    return nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True)


@cache
def _spin(xp):
    return xp.RawKernel(SPIN, "spin")


def busy(xp):
    """Let the current stream be busy for some time: what follows in it is not done at once."""
    if hasattr(xp, "RawKernel"):
        _spin(xp)((1,), (1,), (np.int64(CYCLES),))


def late(xp, values):
    """An array of these values that the current stream has still to write."""
    x = xp.zeros(values.shape, values.dtype)
    given = xp.asarray(values)
    busy(xp)
    x[...] = given
    return x
