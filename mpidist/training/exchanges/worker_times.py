"""Find slow workers of parameter servers, without a collective call of the workers.

Each worker adds the times of its steps to a request that it sends to the first server anyway. The
first server compares the times of all workers:

    worker 0   ten steps . . | push+clock+pull, 4.0 ms a step   -> server
    worker 1   ten steps . . . . . . | push+clock+pull, 54 ms   -> server: worker 1 is slow
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ...fault_tolerance.stragglers import Judge, Window, record, report_straggler


class OwnTimes:
    """Collects the times of this worker's steps, and sends them to the first server."""

    def __init__(self, client):
        self.client, self._window = client, Window()

    def note(self, *seconds: float) -> None:
        """Record how many seconds each phase of a step (such as loading data) took."""
        self._window.note(*seconds)
        mine = self._window.take()
        if mine is not None:
            data, gradients = (int(1e9 * phase) for phase in mine)
            self.client.requests.note = data, max(1, gradients)


class Times:
    """The times of all workers, collected on the first server, which reports slow workers."""

    def __init__(self, workers: Sequence[int], hosts: Sequence[str], crowded: Collection[int] = ()):
        self.workers, self.hosts, self.crowded = list(workers), hosts, crowded
        self.judge = Judge()
        self._newest: dict[int, tuple[int, int]] = {}

    def take(self, rank: int, note: tuple[int, int]) -> None:
        """Store the times of a worker; if all workers have sent new times, report slow ones."""
        self._newest[rank] = note
        if len(self._newest) < len(self.workers) or len(self.workers) == 1:
            return
        everyone = np.array([self._newest[rank] for rank in self.workers]) / 1e9
        self._newest.clear()
        for one in self.judge.look(everyone):
            rank = self.workers[one.rank]
            if rank not in self.crowded:
                named = one._replace(rank=rank)
                record(named)
                who = f"rank {rank} on {self.hosts[rank]} is slower than the other workers"
                report_straggler(named, who, float(everyone[one.rank].sum()))
