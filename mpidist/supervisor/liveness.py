"""Decide from the ranks' heartbeats (signs of life in files) whether to end the program."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..launch.heartbeat import Sign


class Limits(NamedTuple):
    """The time limits after which an attempt (a start of the program) must be ended, in seconds.

    - `heartbeat`: the longest time without a heartbeat of a rank.
    - `start`: the longest time until all ranks have begun, counted from the first rank's begin, or,
      if none has begun, from the start of the attempt. None means 300 s, and no limit before the
      first rank has begun.
    - `stall`: the longest time without a completed step; None for no limit.
    - `grace`: the time in which ranks must save and exit after a request to stop.
    - `launcher`: the longest time until the launcher starts the first process, and also the longest
      time that the launcher may still run after all ranks have ended. With None, both limits are 30
      s, but a launcher that queues jobs, as srun does, may take any time for the start.
    """

    heartbeat: float = 60.0
    start: float | None = None
    stall: float | None = None
    grace: float = 300.0
    launcher: float | None = None

    def interval(self, ranks: int) -> float:
        """Return the seconds between two checks of the heartbeat files of `ranks` ranks."""
        return min(0.5, self.heartbeat / 4) + ranks / 500


#: The default number of seconds in which all ranks must begin, after one rank has begun.
START = 300.0
#: Seconds in which the launcher must handle the death of a rank, and for which the launcher itself
#: may be stopped (SIGSTOP).
DEAD = 10.0
#: With a launcher that goes on when a rank dies: seconds in which the job must end after a rank has
#: ended with an error.
ALONE = 3.0
#: A launcher is killed if for this many seconds it starts no process, or goes on after all its
#: ranks have ended.
LAUNCHER = 30.0


class Launcher(NamedTuple):
    """The state of the launcher (such as mpiexec).

    `begun` says whether the launcher has started the program, and `stopped` whether the launcher is
    stopped by a signal (SIGSTOP).
    """

    begun: bool = True
    stopped: bool = False


_OK = Launcher()


class Vigil:
    """Watches the heartbeats of the ranks in one attempt, and decides whether to end the attempt.

    An attempt is one start of the program on all ranks. `dead_ends` says whether the other ranks
    cannot go on after the death of a rank, so that the attempt must end. `queues` says whether the
    launcher may wait, as srun does, before it starts a process. `dead` are the ranks on this host
    that were the first to die without an orderly exit. `stuck` are silent ranks on this host that
    must be killed, so that the other ranks can go on. `over` is true when each rank has died or
    written its exit code, and a few seconds have passed.
    """

    def __init__(
        self,
        ranks: int,
        limits: Limits,
        began: float,
        *,
        dead_ends: bool = True,
        queues: bool = False,
        host: str | None = None,
    ):
        self.ranks, self.limits, self.began = ranks, limits, began
        self.dead: list[Sign] = []
        self.stuck: list[Sign] = []
        self.over = False
        self._dead_ends = dead_ends
        self._patience = limits.launcher or LAUNCHER
        self._queues = queues
        self._unstarted = limits.launcher or (float("inf") if queues else LAUNCHER)
        self._host = socket.gethostname() if host is None else host
        self._last = began
        self._signs: dict[int, Sign] = {}
        self._accused: list[Sign] = []
        self._beats: dict[int, tuple[int, float]] = {}
        self._since: dict[str, float] = {}
        self._step, self._stepped = -1, began

    def note(self, signs: Sequence[Sign]) -> None:
        """Store `signs`, the newest heartbeats of the ranks, for the next decision."""
        self._signs.update({sign.rank: sign for sign in signs})

    @property
    def signs(self) -> list[Sign]:
        """The last heartbeat of each rank, in the order of the ranks."""
        return [self._signs[rank] for rank in sorted(self._signs)]

    def culprit(self) -> str:
        """Return the host whose ranks failed first, or "" if it is unknown."""
        heard = any(sign.heard for sign in self.signs)
        lost = [sign for sign in self.signs if heard and not sign.left and not sign.heard]
        first = [sign for sign in self.signs if sign.failed] or self._accused or lost
        hosts = {sign.host for sign in first}
        return hosts.pop() if len(hosts) == 1 else ""

    def look(
        self,
        told: Sequence[Sign],
        now: float,
        gone: Collection[int] = (),
        launcher: Launcher = _OK,
        begun: Mapping[int, int] = MappingProxyType({}),
    ) -> str:
        """Return why the attempt (start of the program) must end, or "" if it may continue.

        `told` are the newest heartbeats of the ranks. `gone` are the process IDs of the ranks on
        this host that had ended before the heartbeats were read. `begun` is {rank: process ID}, for
        the ranks on this host that have begun.
        """
        if not self._signs and (told or (self._queues and not launcher.begun)):
            self.began = now  # the first rank has begun, or the launcher still waits in its queue
        self.note(told)
        signs = self.signs
        if now - self._last > max(5.0, self.limits.heartbeat / 2):
            # `mpidist launch` itself was stopped for a while, so all times are counted from now.
            self._beats = {rank: (beat, now) for rank, (beat, _) in self._beats.items()}
            self._since.clear()
            self._stepped = self.began = now
        self._last = now
        there = [sign for sign in signs if not sign.left]
        if not self._dead_ends:
            there = self._living(signs, gone)
            if why := self._given_up(signs, there, gone, now, begun):
                return why
        silent = [sign for sign in there if self._silence(sign, now) > self.limits.heartbeat]
        if silent and not self._dead_ends:
            newest = max(sign.deaths for sign in signs)
            silent = [sign for sign in silent if sign.deaths == newest]
            self.stuck = [sign for sign in silent if sign.host == self._host]
            if len(silent) < len(there) and self.stuck == silent:
                silent = []  # the other ranks go on without the silent ranks
        if silent:
            self._accused = silent
            return f"{_named(silent)} gave no sign for {self.limits.heartbeat:g} s"
        # Only the first deaths are stored, because they may be the cause of later deaths.
        if self._dead_ends and not self.dead:
            self.dead = [s for s in there if s.pid in gone and s.host == self._host]
        if self._lasts("dead", bool(self.dead), now) > (0 if launcher.stopped else DEAD):
            self._accused = self.dead
            return f"{_named(self.dead)} is dead"
        if why := self._held_up(launcher, bool(signs), len(signs) == self.ranks and not there, now):
            return why
        late = self.limits.start or (START if signs else float("inf"))
        if len(signs) < self.ranks and now - self.began > late:
            return f"only {len(signs)} of {self.ranks} ranks began within {late:g} s"
        return self._stalled(signs, there, now)

    def _living(self, signs: Sequence[Sign], gone: Collection[int]) -> list[Sign]:
        """Return the heartbeats of the ranks that have neither ended nor died."""
        there = [sign for sign in signs if sign.code < 0]
        return [sign for sign in there if not (sign.pid in gone and sign.host == self._host)]

    def _given_up(
        self, signs, there, gone: Collection[int], now: float, begun: Mapping[int, int]
    ) -> str:
        """Return why the living ranks of an elastic run cannot go on; "" if they can."""
        if cannot := [sign for sign in signs if sign.gave_up]:
            return f"{_named(cannot)} could not go on after a death"
        died = [sign for sign in signs if sign.code < 0 and sign not in there]
        survived = max((sign.deaths for sign in there), default=len(died))
        if self._lasts("unnoticed", len(died) > survived, now) > self.limits.heartbeat:
            self._accused = died
            return f"{_named(died)} died, and the others did not go on without it"
        known = {sign.rank for sign in signs}
        unborn = [r for r, pid in begun.items() if pid in gone and r not in known]
        if self._lasts("unborn", bool(unborn), now) > ALONE:
            return f"rank {unborn[0]} ended before it had joined the others"
        alone = [s for s in signs if (s.failed or s.code > 0) and s.pid in gone and there]
        if self._lasts("alone", bool(alone), now) > ALONE:
            self._accused = alone
            return f"{_named(alone)} ended, and the others go on"
        ended = len(signs) == self.ranks and not there
        if ended and all(sign.code < 0 for sign in signs):
            return "all ranks have died"
        self.over = self._lasts("over", ended, now) > ALONE
        return ""

    def _silence(self, sign: Sign, now: float) -> float:
        beat, since = self._beats.get(sign.rank, (None, now))
        if beat != sign.beat:
            since = now
        self._beats[sign.rank] = sign.beat, since
        return now - since

    def _lasts(self, what: str, so: bool, now: float) -> float:
        """Return for how many seconds the condition `what` has been true; -1 if it is false now."""
        if not so:
            self._since.pop(what, None)
            return -1.0
        return now - self._since.setdefault(what, now)

    def _stalled(self, signs, there, now: float) -> str:
        step = max((-1 if sign.step is None else sign.step for sign in signs), default=-1)
        if step != self._step or not there:
            self._step, self._stepped = step, now
        if self.limits.stall is not None and step >= 0 and now - self._stepped > self.limits.stall:
            return f"no step after {step} for {self.limits.stall:g} s"
        return ""

    def _held_up(self, launcher: Launcher, told: bool, left: bool, now: float) -> str:
        if self._lasts("stopped", launcher.stopped, now) > DEAD:
            return f"the launcher is stopped (SIGSTOP), for {DEAD:g} s"
        unstarted = not (launcher.begun or told)
        if self._lasts("unstarted", unstarted, now) > self._unstarted:
            return f"the launcher has started nothing within {self._unstarted:g} s"
        if self._lasts("left", left, now) > self._patience:
            return f"all ranks have left, and the launcher goes on for {self._patience:g} s"
        return ""


def _named(signs: Sequence[Sign]) -> str:
    named = ", ".join(f"rank {sign.rank} on {sign.host}" for sign in signs[:4])
    return f"{named} and {len(signs) - 4} more" if len(signs) > 4 else named
