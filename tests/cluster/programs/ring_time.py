"""Measure the time of md.allreduce on float32: ``ring_time.py BYTES REPEATS ALGORITHM...``.

Rank 0 prints a JSON line for each algorithm, with the seconds of each repeat on the slowest rank.
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI

import mpidist as md

comm = MPI.COMM_WORLD
n, repeats = int(sys.argv[1]) // 4, int(sys.argv[2])
x = np.empty(n, np.float32)
for algorithm in sys.argv[3:]:
    seconds = []
    for _ in range(repeats + 1):
        x.fill(comm.rank + 1)
        comm.Barrier()
        begin = time.perf_counter()
        md.allreduce(comm, x, algorithm=algorithm)
        seconds.append(comm.allreduce(time.perf_counter() - begin, MPI.MAX))
    assert (x == comm.size * (comm.size + 1) // 2).all()
    if comm.rank == 0:
        # The first one makes the plan and, in TCP, the connections.
        print(json.dumps({"algorithm": algorithm, "seconds": seconds[1:]}), flush=True)
