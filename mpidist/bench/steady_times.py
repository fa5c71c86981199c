"""`mpidist simulate measure`: calls one after the other, as the simulator predicts them.

A block of calls is timed as a whole, until a token bucket of a shaped network has long been
emptied: the steady state. The slowest rank's time counts, and of several blocks the median.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from ..collectives.allreduce import plan

#: Bytes that a block of calls reduces at least: many times what a bucket holds.
BLOCK_BYTES = 8 << 20


def calls(nbytes: int) -> int:
    """Return how many calls make a block."""
    return max(2, BLOCK_BYTES // nbytes)


def measure(comm, nbytes: int, name: str, *, blocks: int = 3) -> float:
    """Return the seconds of one call in a block of them; float32, in place, from a plan.

    Collective over `comm`.
    """
    call = plan(comm, np.zeros(nbytes // 4, np.float32), algorithm=name)
    times = []
    # The first block makes connections and empties the buckets.
    for _ in range(blocks + 1):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls(nbytes)):
            call()
        times.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return float(np.median(times[1:])) / calls(nbytes)
