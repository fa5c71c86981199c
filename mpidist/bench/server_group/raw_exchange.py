"""One step of workers and servers in plain mpi4py, with which `push_pull` is compared.

Each worker sends each server its part of the gradient. Each server adds up the parts, makes the
same update as `sgd`, and sends its part of the parameters to all workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from ...partition import BlockPartition

_PUSH, _ANSWER = 1, 2


class RawExchange:
    """The messages of one step for `n` float32 parameters. Each call is collective over `comm`."""

    def __init__(self, comm: MPI.Comm, workers: Sequence[int], servers: Sequence[int], n: int):
        self.comm, self.workers, self.servers = comm, workers, servers
        self.bounds = [BlockPartition(n, len(servers)).range(k) for k in range(len(servers))]
        if comm.rank in workers:
            self.gradient, self.parameters = np.ones(n, np.float32), np.zeros(n, np.float32)
        if comm.rank in servers:
            start, stop = self.bounds[servers.index(comm.rank)]
            self.part = np.zeros(stop - start, np.float32)
            self.pushes = np.zeros((len(workers), stop - start), np.float32)

    def __call__(self) -> None:
        """Send and receive the messages of one step."""
        comm, receives, sends = self.comm, [], []
        if comm.rank in self.workers:
            for server, (start, stop) in zip(self.servers, self.bounds, strict=True):
                receives.append(comm.Irecv(self.parameters[start:stop], server, _ANSWER))
        if comm.rank in self.servers:
            pushes = [
                comm.Irecv(buffer, worker, _PUSH)
                for worker, buffer in zip(self.workers, self.pushes, strict=True)
            ]
        if comm.rank in self.workers:
            for server, (start, stop) in zip(self.servers, self.bounds, strict=True):
                sends.append(comm.Isend(self.gradient[start:stop], server, _PUSH))
        if comm.rank in self.servers:
            MPI.Request.Waitall(pushes)
            for push in self.pushes[1:]:
                self.pushes[0] += push
            self.pushes[0] *= 1e-3 / len(self.workers)
            self.part -= self.pushes[0]
            sends += [comm.Isend(self.part, worker, _ANSWER) for worker in self.workers]
        MPI.Request.Waitall(receives + sends)
