"""Which worker of parameter servers is slow? They run apart, and never meet to compare their times.

So each tells the first server, in the next request that it sends there anyway, and that one judges:

    worker 0   ten steps . . | push+clock+pull, 4.0 ms a step   -> server
    worker 1   ten steps . . . . . . | push+clock+pull, 54 ms   -> server: worker 1 is slow
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ...fault_tolerance.stragglers import Judge, Window, record, report_straggler


class OwnTimes:
    """A worker's times, sent to the first server together with requests."""

    def __init__(self, client):
        self.client, self._window = client, Window()

    def note(self, *seconds: float) -> None:
        """Take what a step needed in each phase before its push; every tenth is told."""
        self._window.note(*seconds)
        mine = self._window.take()
        if mine is not None:
            data, gradients = (int(1e9 * phase) for phase in mine)
            self.client.note = data, max(1, gradients)


class Times:
    """The workers' times as the first server knows them; it reports slow workers.

    `hosts` are those of all ranks, `crowded` the ranks that share cores, who are not named. It
    looks when each worker has told a new window: a slow one tells fewer than the others where
    nobody waits for it.
    """

    def __init__(self, workers: Sequence[int], hosts: Sequence[str], crowded: Collection[int] = ()):
        self.workers, self.hosts, self.crowded = list(workers), hosts, crowded
        self.judge = Judge()
        self._newest: dict[int, tuple[int, int]] = {}

    def take(self, rank: int, note: tuple[int, int]) -> None:
        """Take the nanoseconds per step of the worker that is `rank`."""
        self._newest[rank] = note
        if len(self._newest) < len(self.workers) or len(self.workers) == 1:
            return
        everyone = np.array([self._newest[rank] for rank in self.workers]) / 1e9
        self._newest.clear()
        for one in self.judge.look(everyone):
            named = one._replace(rank=self.workers[one.rank])
            if named.rank in self.crowded:
                continue
            record(named)
            who = f"rank {named.rank} on {self.hosts[named.rank]} is slower than the other workers"
            report_straggler(named, who, float(everyone[one.rank].sum()))
