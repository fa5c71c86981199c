"""Which rank do the others wait for? Each rank reports its own time per step.

Waiting is everybody's but the slow one's, so what counts is the time that a rank needs before it
comes to the exchange: for its data and for its gradients. Every ten steps the ranks tell each other
two numbers. Any rank is late now and then: a slow rank is one that is slow in nearly all steps of
two windows in a row. Where ranks share cores they take turns, and which of them is late says
nothing about a rank or a host: these are never named.
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
from ..launch import binding
from ..runtime import polling
from ..runtime.polling import wait_until

#: Steps between two looks.
WINDOW = 10
#: A straggler needs so many times as long as the median of the others, and so many seconds more.
FACTOR, LEAST = 3.0, 0.005
#: Looks in a row that must agree.
AGAIN = 2

PHASES = ("data", "gradients")

#: Cores of a host that ranks tell each other of; of more, two may count as one.
_CORES = 1024


class Straggler(NamedTuple):
    """A rank that the others wait for: in which phase, and how many seconds longer per step."""

    rank: int
    phase: str
    lag: float


def find_stragglers(times: np.ndarray, phases: Sequence[str] = PHASES) -> list[Straggler]:
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
            found.append(Straggler(rank, phases[phase], float(total - usual)))
    return found


def sharing(places: Sequence[tuple[int, frozenset[int]]]) -> frozenset[int]:
    """Return the ranks that must share cores, from (machine, cores it may use) of each. Pure.

    More ranks than there are cores to which all of them are bound take turns on these; so do all
    ranks of a machine where they are more than all the cores that they may use.
    """
    found: set[int] = set()
    for machine in {machine for machine, _ in places}:
        there = {rank: cores for rank, (where, cores) in enumerate(places) if where == machine}
        for bound in {*there.values(), frozenset().union(*there.values())}:
            inside = [rank for rank, cores in there.items() if cores <= bound]
            if len(inside) > len(bound):
                found.update(inside)
    return frozenset(found)


def crowded_ranks(comm) -> frozenset[int]:
    """Return the ranks of `comm` that share cores, the same on all of them. Collective."""
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
    """Times of a rank's newest steps."""

    def __init__(self, phases: int = len(PHASES)):
        self._times = np.zeros((WINDOW, phases))
        self._steps = 0

    def note(self, *seconds: float) -> None:
        """Take what a step needed in each phase."""
        self._times[self._steps % WINDOW] = seconds
        self._steps += 1

    def take(self) -> np.ndarray | None:
        """Return seconds per step in each phase, once there are steps enough, and begin anew.

        The third fastest of ten: what the system took away in some of them does not count.
        """
        if self._steps < WINDOW:
            return None
        self._steps = 0
        return np.sort(self._times, axis=0)[2].copy()


class Judge:
    """Tells who is slow, once: when `AGAIN` looks in a row agree, until it is well again."""

    def __init__(self, phases: Sequence[str] = PHASES):
        self.phases = phases
        self._seen: dict[int, int] = {}
        self.told: list[Straggler] = []

    def look(self, everyone: np.ndarray) -> list[Straggler]:
        """Take a window of all ranks; return what is new."""
        found = find_stragglers(everyone, self.phases)
        self._seen = {one.rank: self._seen.get(one.rank, 0) + 1 for one in found}
        new = [one for one in found if self._seen[one.rank] == AGAIN]
        self.told += new
        return new


def record(one: Straggler) -> None:
    """Write a straggler into the event log."""
    lag = round(one.lag * 1e3, 1)
    events.emit("straggler", straggler=one.rank, phase=one.phase, lag_ms=lag)


def report_straggler(one: Straggler, who: str, needed: float) -> None:
    """Report that rank `who` is slow and needs so many seconds a step."""
    if events.VERBOSITY:
        print(
            f"mpidist: note: {who}: it needs {needed * 1e3:.1f} ms a step, {one.lag * 1e3:.1f} ms "
            f"more than they do, for its {one.phase}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


class Stragglers:
    """Ranks that do each step together and tell each other their times. Collective over `comm`.

    `ranks` are their names in what is told, by default those of `comm`; `crowded` those that share
    cores (`crowded_ranks`), by default found out when there is a first one to name.
    """

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

    def note(self, *seconds: float) -> None:
        """Take what a step needed in each phase before its exchange; every tenth is collective."""
        self.window.note(*seconds)
        self.look()

    def look(self) -> None:
        """Tell each other, where a window is full. Collective."""
        mine = self.window.take()
        if mine is None or self.comm.size == 1:
            return
        everyone = np.empty((self.comm.size, len(mine)))
        wait_until(self.comm.Iallgather(mine, everyone).Test)
        found = self.judge.look(everyone)
        # All ranks have seen the same times, so all of them come here or none.
        if found and self.crowded is None:
            self.crowded = frozenset(self.ranks[rank] for rank in crowded_ranks(self.comm))
        for one in found:
            slow, named = one.rank, one._replace(rank=self.ranks[one.rank])
            if named.rank in (self.crowded or ()):
                continue
            if self.comm.rank in (0, slow):
                record(named)
            if self.comm.rank == slow:
                who = f"the others wait for rank {named.rank} on {socket.gethostname()}"
                report_straggler(named, who, float(mine.sum()))


class OwnTime:
    """Time that the main thread did not spend waiting inside mpidist."""

    def __init__(self):
        self._mark = (0.0, 0.0)
        self._own: float | None = None
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._mark, self._own = (time.monotonic(), polling.waited), None

    def stop(self) -> float:
        """Return the seconds since `begin`, or until the first call of this since then."""
        if self._own is None:
            began, waited = self._mark
            self._own = max(0.0, time.monotonic() - began - (polling.waited - waited))
        return self._own
