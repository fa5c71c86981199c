"""Which rank do the others wait for? From each rank's own time per step, told and not guessed.

Waiting is everybody's but the slow one's, so what counts is the time that a rank needs before it
comes to the exchange: for its data and for its gradients. Every ten steps the ranks tell each other
two numbers. More ranks than cores take turns, and any of them is late now and then: a slow rank is
one that is slow in nearly all steps of two windows in a row.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import events

#: Steps between two looks.
WINDOW = 10
#: A straggler needs so many times as long as the median of the others, and so many seconds more.
FACTOR, LEAST = 3.0, 0.005
#: Looks in a row that must agree.
AGAIN = 2

PHASES = ("data", "gradients")


class Straggler(NamedTuple):
    """A rank that the others wait for: in which phase, and how many seconds longer per step."""

    rank: int
    phase: str
    lag: float


def find(times: np.ndarray) -> list[Straggler]:
    """Return the stragglers among the ranks of one window. Pure.

    Parameters
    ----------
    times : array (ranks, phases)
        Seconds per step that each rank has needed in each phase.
    """
    totals = times.sum(axis=1)
    found = []
    for rank, total in enumerate(totals):
        others = np.delete(times, rank, axis=0)
        usual = float(np.median(others.sum(axis=1)))
        if total > FACTOR * usual and total - usual > LEAST:
            phase = int(np.argmax(times[rank] - np.median(others, axis=0)))
            found.append(Straggler(rank, PHASES[phase], float(total - usual)))
    return found


class Stragglers:
    """Notes this rank's times and tells of ranks that are slow. Collective over `comm`."""

    def __init__(self, comm):
        self.comm = comm
        self._times = np.zeros((WINDOW, len(PHASES)))
        self._steps = 0
        self._waited = 0.0
        self._seen: dict[int, int] = {}
        self.told: list[Straggler] = []

    def note(self, waited: float, seconds: float) -> None:
        """Take the times of a step; every tenth is collective.

        `waited` for data since the run began, and the `seconds` of this step before its exchange.
        """
        data = waited - self._waited
        self._waited = waited
        self._times[self._steps % WINDOW] = data, max(0.0, seconds - data)
        self._steps += 1
        if self._steps % WINDOW == 0 and self.comm.size > 1:
            self._look()

    def _look(self) -> None:
        # The third fastest step of ten: what the system took away in some of them does not count.
        mine = np.sort(self._times, axis=0)[2].copy()
        everyone = np.empty((self.comm.size, len(PHASES)))
        self.comm.Allgather(mine, everyone)
        found = find(everyone)
        self._seen = {one.rank: self._seen.get(one.rank, 0) + 1 for one in found}
        self._tell([one for one in found if self._seen[one.rank] == AGAIN], everyone)

    def _tell(self, slow: Sequence[Straggler], everyone: np.ndarray) -> None:
        for one in slow:
            self.told.append(one)
            lag = round(one.lag * 1e3, 1)
            if self.comm.rank in (0, one.rank):
                events.emit("straggler", straggler=one.rank, phase=one.phase, lag_ms=lag)
            if self.comm.rank == one.rank and events.VERBOSITY:
                host, needed = socket.gethostname(), everyone[one.rank].sum() * 1e3
                print(
                    f"mpidist: note: the others wait for rank {one.rank} on {host}: it needs "
                    f"{needed:.1f} ms a step, {lag:.1f} ms more than they do, for its {one.phase}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
