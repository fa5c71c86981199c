"""Prints rank, size, the sum of all ranks and the host: every rank one line."""

import socket

from mpi4py import MPI

comm = MPI.COMM_WORLD
total = comm.allreduce(comm.rank)
# One write per line, or the lines of several ranks mix.
print(
    f"rank {comm.rank} of {comm.size} sum {total} on {socket.gethostname()}\n", end="", flush=True
)
