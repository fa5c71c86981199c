"""While they train, workers of parameter servers agree on a step after which all stop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from ...runtime.polling import wait_until


class Agreement:
    """Workers agree on a clock (a number of finished steps) after which all of them stop.

    A worker that wants to stop sends a message to all others. Each worker then proposes its own
    clock plus `slack` steps, and a nonblocking allreduce computes the largest proposal, after which
    all workers stop.
    """

    _TAG = 7

    def __init__(
        self,
        workers: MPI.Comm,
        slack: int,
        progress: Callable[[], object],
        reached: int = 0,
        clock: int | None = None,
    ):
        self.comm, request = workers.Idup()
        wait_until(request.Test)
        self.slack, self.progress = slack, progress
        self.clock = clock
        self._reached, self._limit = reached, 0
        self._named: np.ndarray | None = None
        self._request = MPI.REQUEST_NULL
        self._notes: list = []

    def at(self, clock: int, wish: bool) -> bool:
        """Return whether this worker stops now, after `clock` steps. Call it once per step."""
        self._reached = clock
        if self.clock is None:
            self.listen(wish)
            if self._named is not None:
                if clock >= self._limit:
                    self.wait(self._request.Test)
                if self._request.Test():
                    self.clock = int(self._named[0])
        return self.clock is not None and clock >= self.clock

    def listen(self, wish: bool = False) -> None:
        """If a worker wants to stop, propose a step after which all workers stop.

        Returns at once.
        """
        if self._named is None and (wish or self.comm.Iprobe(MPI.ANY_SOURCE, self._TAG)):
            others = (rank for rank in range(self.comm.size) if rank != self.comm.rank)
            self._notes = [self.comm.Isend([b"", MPI.BYTE], r, self._TAG) for r in others]
            self._name(self._reached + self.slack)

    def _name(self, clock: int) -> None:
        self._limit = clock
        self._named = np.array([clock], np.int64)
        self._request = self.comm.Iallreduce(MPI.IN_PLACE, self._named, MPI.MAX)

    def wait(self, test: Callable[[], bool]) -> None:
        """Wait until ``test()`` is true; meanwhile, answer the requests of other ranks."""
        wait_until(lambda: test() or (self.progress(), False)[1])

    def memory(self) -> tuple:
        """Return the requests and arrays that MPI may still use, which the caller must keep."""
        return self._named, self._request, self._notes

    def close(self) -> None:
        """Receive all remaining messages and free the communicator. Collective over the workers."""
        if self._named is None:
            self._name(0)  # other workers may have begun the allreduce, which needs all workers
        self.wait(self._request.Test)
        told = np.array([bool(self._notes)], np.int64)
        self.wait(self.comm.Iallreduce(MPI.IN_PLACE, told, MPI.SUM).Test)
        for _ in range(int(told[0]) - bool(self._notes)):
            self.comm.Recv([bytearray(1), 0, MPI.BYTE], MPI.ANY_SOURCE, self._TAG)
        MPI.Request.Waitall(self._notes)
        self.comm.Free()
