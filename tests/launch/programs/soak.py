"""Random collectives for a while; memory must not grow (R41): mpiexec -n 4 python soak.py 120."""

import resource
import sys
import time

import numpy as np
from mpi4py import MPI

import mpidist as md
from mpidist.collectives.algorithms import ALLREDUCE

world = MPI.COMM_WORLD
seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
names = ["auto", "native", *ALLREDUCE]
rng = np.random.default_rng(0)  # the same choices on every rank
stop = time.monotonic() + seconds
halfway = 0
count = 0
while True:
    over = world.bcast(time.monotonic() > stop)
    if over:
        break
    comm = world.Split(int(rng.integers(2)), world.rank) if rng.random() < 0.1 else world.Dup()
    for _ in range(50):
        x = np.full(int(rng.integers(0, 20_000)), comm.rank + 1.0)
        md.allreduce(comm, x, algorithm=names[rng.integers(len(names))])
        assert (x == comm.size * (comm.size + 1) / 2).all()
        count += 1
    md.free(comm)
    comm.Free()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if time.monotonic() < stop - seconds / 2:
        halfway = used
grown = world.allreduce(used - halfway, MPI.MAX) / 1024
if world.rank == 0:
    print(f"{count} collectives in {seconds:.0f} s; memory grew {grown:.1f} MiB in the second half")
sys.exit(int(grown > 30))
