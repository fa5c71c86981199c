"""Find the rank that the other ranks wait for.

If one rank is slow, all others wait for it, so the whole step takes the same time on all ranks.
Therefore each rank measures only its times before the exchange: to load its data, and to compute
its gradients. Every ten steps the ranks exchange these times. A rank counts as slow if it is slow
in nearly all of 20 successive steps.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .. import events
from ..arrays import medians
from ..launch import binding
from ..runtime import polling
from ..runtime.polling import wait_until

#: The steps of one window, after which ranks exchange their times.
WINDOW = 10
#: A straggler needs at least FACTOR times as long as the median of the other ranks, and at least
#: LEAST seconds longer.
FACTOR, LEAST = 3.0, 0.005
#: The number of consecutive windows in which a rank must be slow.
AGAIN = 2

PHASES = ("data", "gradients")

#: The greatest number of cores of a host that are told apart. On a host with more cores, two cores
#: may count as one.
_CORES = 1024


class Straggler(NamedTuple):
    """A slow rank, the part of a step in which it is slow, and the seconds by which it is late."""

    rank: int
    phase: str
    lag: float


def find_stragglers(
    times: np.ndarray, phases: Sequence[str] = PHASES, factor: float = FACTOR
) -> list[Straggler]:
    """Return the slow ranks, given the times of all ranks in ten steps.

    ``times[rank, k]`` is how many seconds per step the rank spends in ``phases[k]``, a part of the
    step. A rank is slow if its time is more than `factor` times the median of the other ranks, and
    more than 5 ms longer.
    """
    totals = times.sum(axis=1)
    found = []
    for rank, total in enumerate(totals if len(totals) > 1 else ()):
        others = np.delete(times, rank, axis=0)
        usual = float(medians(others.sum(axis=1)))
        if total > factor * usual and total - usual > LEAST:
            phase = int(np.argmax(times[rank] - medians(others)))
            found.append(Straggler(rank, phases[phase], float(total - usual)))
    return found


def sharing(places: Sequence[tuple[int, frozenset[int]]]) -> frozenset[int]:
    """Return the ranks that must share cores; `places` has the machine and cores of each rank."""
    found: set[int] = set()
    for machine in {machine for machine, _ in places}:
        there = {rank: cores for rank, (where, cores) in enumerate(places) if where == machine}
        for bound in {*there.values(), frozenset().union(*there.values())}:
            inside = [rank for rank, cores in there.items() if cores <= bound]
            if len(inside) > len(bound):
                found.update(inside)
    return frozenset(found)


def crowded_ranks(comm) -> frozenset[int]:
    """Return the ranks of `comm` that have to share cores with others. Collective over `comm`."""
    if comm.size == 1:
        return frozenset()
    place = binding.rank_place({})
    mine = np.zeros(8 + _CORES // 8, np.uint8)
    mine[:8] = np.frombuffer(hashlib.sha256(place.machine.encode()).digest()[:8], np.uint8)
    bits = np.zeros(_CORES, np.uint8)
    bits[np.array(place.cores) % _CORES] = 1
    mine[8:] = np.packbits(bits)
    everyone = np.empty((comm.size, len(mine)), np.uint8)
    wait_until(comm.Iallgather(mine, everyone).Test)
    return sharing([
        (int.from_bytes(row[:8].tobytes(), "little"),
         frozenset(np.flatnonzero(np.unpackbits(row[8:])).tolist()))
        for row in everyone
    ])  # fmt: skip


class Window:
    """The times of the newest ten steps of one rank."""

    def __init__(self, phases: int = len(PHASES)):
        self._times = np.zeros((WINDOW, phases))
        self._steps = 0

    def note(self, *seconds: float) -> None:
        """Record how many seconds each phase of a step (such as loading data) took."""
        self._times[self._steps % WINDOW] = seconds
        self._steps += 1

    def take(self) -> np.ndarray | None:
        """Return, for each phase of a step, the third smallest of the times in ten steps.

        The result is None if fewer than ten steps were recorded since the last result.
        """
        if self._steps < WINDOW:
            return None
        self._steps = 0
        # The third smallest time: a disturbance in some of the ten steps has no effect.
        return np.sort(self._times, axis=0)[2].copy()


class Judge:
    """Decides which ranks to report as slow: those that were slow in 20 steps in a row."""

    def __init__(self, phases: Sequence[str] = PHASES):
        self.phases = phases
        self._seen: dict[int, int] = {}
        self.told: list[Straggler] = []

    def look(self, everyone: np.ndarray) -> list[Straggler]:
        """Return the ranks that were slow in the last ten steps and in the ten steps before."""
        found = find_stragglers(everyone, self.phases)
        self._seen = {one.rank: self._seen.get(one.rank, 0) + 1 for one in found}
        new = [one for one in found if self._seen[one.rank] == AGAIN]
        self.told += new
        return new


def record(one: Straggler) -> None:
    """Write a slow rank to the event log."""
    lag = round(one.lag * 1e3, 1)
    events.emit("straggler", straggler=one.rank, phase=one.phase, lag_ms=lag)


def report_straggler(one: Straggler, who: str, needed: float) -> None:
    """Print that the rank named in `who` is slow and needs `needed` seconds per step."""
    if events.VERBOSITY:
        print(
            f"mpidist: note: {who}: it needs {needed * 1e3:.1f} ms a step, {one.lag * 1e3:.1f} ms "
            f"more than they do, for its {one.phase}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


class Stragglers:
    """Finds slow ranks among the ranks of `comm`, which do their steps together. Collective."""

    def __init__(
        self,
        comm,
        phases: Sequence[str] = PHASES,
        ranks: Sequence[int] | None = None,
        crowded: frozenset[int] | None = None,
    ):
        self.comm, self.crowded = comm, crowded
        self.window, self.judge = Window(len(phases)), Judge(phases)
        self.ranks = range(comm.size) if ranks is None else ranks
        self.newest: np.ndarray | None = None
        self.windows = 0

    def share_cores(self) -> frozenset[int]:
        """Return those of `ranks` that share cores with others. The first call is collective."""
        if self.crowded is None:
            self.crowded = frozenset(self.ranks[rank] for rank in crowded_ranks(self.comm))
        return self.crowded

    def note(self, *seconds: float) -> None:
        """Record how many seconds each phase of a step took. Every tenth call is collective."""
        self.window.note(*seconds)
        self.look()

    def look(self) -> None:
        """After every tenth step, exchange the ranks' times and report slow ranks. Collective."""
        mine = self.window.take()
        if mine is None or self.comm.size == 1:
            return
        everyone = np.empty((self.comm.size, len(mine)))
        wait_until(self.comm.Iallgather(mine, everyone).Test)
        self.newest, self.windows = everyone, self.windows + 1
        found = self.judge.look(everyone)
        # All ranks have the same times, so either all ranks or none of them make this call.
        crowded = self.share_cores() if found else frozenset()
        for one in found:
            slow, named = one.rank, one._replace(rank=self.ranks[one.rank])
            if named.rank in crowded:
                continue
            if self.comm.rank in (0, slow):
                record(named)
            if self.comm.rank == slow:
                who = f"the others wait for rank {named.rank} on {socket.gethostname()}"
                report_straggler(named, who, float(mine.sum()))


class OwnTime:
    """Measures the time of the main thread, without the time that mpidist waits for other ranks."""

    def __init__(self):
        self._mark = (0.0, 0.0)
        self._own: float | None = None
        self.begin()

    def begin(self) -> None:
        """Start to measure the time of a step."""
        self._mark, self._own = (time.monotonic(), polling.waited), None

    def stop(self) -> float:
        """Return the seconds from `begin` to now, without the time that mpidist has waited.

        Another call of `stop` returns the same seconds, until `begin` is called again.
        """
        if self._own is None:
            began, waited = self._mark
            self._own = max(0.0, time.monotonic() - began - (polling.waited - waited))
        return self._own
