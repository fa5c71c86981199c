"""Print digests of MPI's own allreduce of 8 bytes and 64 KiB, which show the order of additions."""

import hashlib

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
digests = []
for n in (2, 1 << 14):
    x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
    total = np.empty_like(x)
    comm.Allreduce(x, total)
    digests.append(hashlib.sha256(total.tobytes()).hexdigest()[:12])
if comm.rank == 0:
    print(*digests)
