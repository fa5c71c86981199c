"""Run cases in which ranks make different calls, one after another; print a line per rank and case.

Each case has its own communicator, because a communicator cannot be used after a mismatch.
"""

import sys
import time

import numpy as np
from mpi4py import MPI

import mpidist as md

ODD = MPI.COMM_WORLD.rank == 2


def warm(comm, algorithm, *arrays):
    """Make the plans beforehand: later calls find them in the cache."""
    for x in arrays:
        md.allreduce(comm, x, algorithm=algorithm)


# What stands above the `yield` is not timed.


def dtype(comm, algorithm):
    yield
    md.allreduce(comm, np.ones(10, "f8" if ODD else "f4"), algorithm=algorithm)


def dtype_cached(comm, algorithm):
    warm(comm, algorithm, np.ones(10, "f4"), np.ones(10, "f8"))
    yield
    md.allreduce(comm, np.ones(10, "f8" if ODD else "f4"), algorithm=algorithm)


def count(comm, algorithm):
    yield
    md.allreduce(comm, np.ones(20 if ODD else 10), algorithm=algorithm)


def count_cached(comm, algorithm):
    warm(comm, algorithm, np.ones(10), np.ones(300_000))
    yield
    md.allreduce(comm, np.ones(300_000 if ODD else 10), algorithm=algorithm)


def order(comm, algorithm):
    a, b = np.ones(10), np.ones(20)
    warm(comm, algorithm, a, b)
    yield
    for x in (b, a) if ODD else (a, b):
        md.allreduce(comm, x, algorithm=algorithm)


def op(comm, algorithm):
    warm(comm, algorithm, np.ones(3))
    yield
    md.allreduce(comm, np.ones(3), "max" if ODD else "sum", algorithm=algorithm)


def kind(comm, algorithm):
    warm(comm, algorithm, np.ones(1000))
    yield
    if ODD:
        md.broadcast(comm, np.ones(1000))
    else:
        md.allreduce(comm, np.ones(1000), algorithm=algorithm)


def algorithm(comm, _):
    yield
    md.allreduce(comm, np.ones(1000), algorithm="ring" if ODD else "tree")


def nonblocking(comm, algorithm):
    warm(comm, algorithm, np.ones(3))
    yield
    handles = [md.iallreduce(comm, np.ones(4000 + ODD)), md.iallreduce(comm, np.ones(5))]
    for handle in handles:
        handle.wait()


def left(comm, algorithm):
    warm(comm, algorithm, np.ones(3))
    yield
    if ODD:
        sys.exit()
    md.allreduce(comm, np.ones(3), algorithm=algorithm)


for word in sys.argv[1:]:
    case, _, name = word.partition(":")
    comm = MPI.COMM_WORLD.Dup()
    steps = globals()[case](comm, name)
    next(steps)
    start = time.monotonic()
    try:
        next(steps, None)
    except md.MismatchError as error:
        seconds = time.monotonic() - start
        print(f"<{word}> rank {comm.rank} after {seconds:.1f} s: {error}", flush=True)
    else:
        print(f"<{word}> rank {comm.rank}: no error", flush=True)
