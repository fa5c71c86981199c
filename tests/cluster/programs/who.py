"""Each rank prints one line with its rank, the size, the sum of all ranks, and its host."""

import socket

from mpi4py import MPI

comm = MPI.COMM_WORLD
total = comm.allreduce(comm.rank)
# One write per line, or the lines of several ranks mix.
print(
    f"rank {comm.rank} of {comm.size} sum {total} on {socket.gethostname()}\n", end="", flush=True
)
