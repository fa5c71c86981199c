"""Make the first calls of a job in two threads: on one communicator, or on a communicator for each.

The argument is "one" or "two", the number of communicators; the program prints each rank's results.
"""

import sys
import threading
import time

import numpy as np
from mpi4py import MPI

import mpidist as md

world = MPI.COMM_WORLD
got = {}


def call(key, comm, wait):
    time.sleep(wait)
    try:
        got[key] = int(md.allreduce(comm, np.ones(3))[0])
    except md.MpidistError as error:
        got[key] = f"{type(error).__name__}: {error}"


def begin(*given):
    thread = threading.Thread(target=call, args=given)
    thread.start()
    return thread


comm, other = world.Dup(), world.Dup()
if sys.argv[1] == "one":
    first = []
    if world.rank == 1:
        first = [begin("first", comm, 0)]
        begin("second", comm, 0.3).join()
    world.Barrier()  # the others come when the second thread has got its answer
    if not first:
        call("first", comm, 0)
else:
    # In another order on each rank.
    first = [begin(k, each, 0.2 * ((k + world.rank) % 2)) for k, each in enumerate((comm, other))]
for thread in first:
    thread.join()
assert md.allreduce(comm, np.ones(3))[0] == world.size
# One write for a line: other ranks' go to the same pipe.
sys.stdout.write(f"rank {world.rank}: {sorted(got.items())}\n")
