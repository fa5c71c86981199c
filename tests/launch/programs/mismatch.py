"""Ranks that do not agree; prints one line per rank."""

import sys
import time

import numpy as np
from mpi4py import MPI

import mpidist as md

case = sys.argv[1]
world = MPI.COMM_WORLD
odd = world.rank == 2
algorithm = sys.argv[2] if len(sys.argv) > 2 else "auto"


def warm(*arrays):
    """Make the plans beforehand: later calls find them in the cache."""
    for x in arrays:
        md.allreduce(world, x, algorithm=algorithm)


start = None
try:
    if case == "dtype":
        start = time.monotonic()
        md.allreduce(world, np.ones(10, "f8" if odd else "f4"), algorithm=algorithm)
    elif case == "dtype_cached":
        warm(np.ones(10, "f4"), np.ones(10, "f8"))
        start = time.monotonic()
        md.allreduce(world, np.ones(10, "f8" if odd else "f4"), algorithm=algorithm)
    elif case == "count":
        start = time.monotonic()
        md.allreduce(world, np.ones(20 if odd else 10), algorithm=algorithm)
    elif case == "count_cached":
        warm(np.ones(10), np.ones(300_000))
        start = time.monotonic()
        md.allreduce(world, np.ones(300_000 if odd else 10), algorithm=algorithm)
    elif case == "order":
        a, b = np.ones(10), np.ones(20)
        warm(a, b)
        start = time.monotonic()
        for x in (b, a) if odd else (a, b):
            md.allreduce(world, x, algorithm=algorithm)
    elif case == "op":
        warm(np.ones(3))
        start = time.monotonic()
        md.allreduce(world, np.ones(3), "max" if odd else "sum", algorithm=algorithm)
    elif case == "kind":
        warm(np.ones(1000))
        start = time.monotonic()
        if odd:
            md.broadcast(world, np.ones(1000))
        else:
            md.allreduce(world, np.ones(1000), algorithm=algorithm)
    elif case == "algorithm":
        start = time.monotonic()
        md.allreduce(world, np.ones(1000), algorithm="ring" if odd else "tree")
    elif case == "nonblocking":
        warm(np.ones(3))
        start = time.monotonic()
        handles = [md.iallreduce(world, np.ones(4000 + odd)), md.iallreduce(world, np.ones(5))]
        for handle in handles:
            handle.wait()
    elif case == "left":
        warm(np.ones(3))
        start = time.monotonic()
        if not odd:
            md.allreduce(world, np.ones(3), algorithm=algorithm)
except md.MismatchError as error:
    print(f"rank {world.rank} after {time.monotonic() - start:.1f} s: {error}", flush=True)
else:
    print(f"rank {world.rank}: no error", flush=True)
