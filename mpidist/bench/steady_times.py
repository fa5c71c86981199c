"""`mpidist simulate measure`: time successive allreduces, to compare with simulated times.

Successive calls are timed together as a block. Some networks let the first bytes pass faster than
the others (a token bucket); in a block, nearly all calls run at the lower bandwidth.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from ..collectives.allreduce import plan

#: A block of calls reduces at least this many bytes, which is many times the size of a token
#: bucket.
BLOCK_BYTES = 8 << 20


def calls(nbytes: int) -> int:
    """Return how many successive calls, each on `nbytes` bytes, are timed as one block."""
    return max(2, BLOCK_BYTES // nbytes)


def measure(comm, nbytes: int, name: str, *, blocks: int = 3) -> float:
    """Return the seconds of an in-place allreduce of `nbytes` float32 bytes by algorithm `name`.

    Collective over `comm`. Each block of successive calls is timed as a whole. The result is the
    median time of `blocks` blocks, divided by the number of calls in a block.
    """
    call = plan(comm, np.zeros(nbytes // 4, np.float32), algorithm=name)
    times = []
    # The first block opens connections and empties the token buckets.
    for _ in range(blocks + 1):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls(nbytes)):
            call()
        times.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return float(np.median(times[1:])) / calls(nbytes)
