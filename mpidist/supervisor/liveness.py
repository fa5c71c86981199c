"""When does an attempt have to be ended? Judged from what its ranks tell. Pure."""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..launch.heartbeat import Sign


class Limits(NamedTuple):
    """Seconds: without a beat, until all ranks begin, without a step, to save and leave.

    With `start` None its limit counts only once one rank has begun. With `stall` None there is no
    such limit. `launcher` limits two times: until it has started anything, and from the end of
    all ranks to its own end; None is `LAUNCHER`.
    """

    heartbeat: float = 60.0
    start: float | None = None
    stall: float | None = None
    grace: float = 300.0
    launcher: float | None = None

    def interval(self, ranks: int) -> float:
        """Seconds between two checks of the files of so many ranks."""
        return min(0.5, self.heartbeat / 4) + ranks / 500


#: Until all ranks have begun once one has, if nothing else is said.
START = 300.0
#: A rank that is dead is left to the launcher for so long; so is a launcher that is stopped.
DEAD = 10.0
#: For a launcher that starts nothing, or does not end after its ranks.
LAUNCHER = 30.0


class Launcher(NamedTuple):
    """What is seen of the launcher itself: it has started something; it is stopped (SIGSTOP)."""

    begun: bool = True
    stopped: bool = False


AT_WORK = Launcher()


class Vigil:
    """What was seen of one attempt's ranks.

    A file that cannot be read for a while, as it happens on shared file systems, is no rank that is
    missing: what it told last stands. Silence is counted on this host's clock, from looks; a look
    that comes late, because this process was stopped as well, counts for nothing.

    `dead_ends`: the launcher does not go on without a rank. `queues`: it may have to wait, as srun
    does, before it can start anything. `ended` has those of this host's processes that are gone,
    and `dead` the first ranks among them that have not left.
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
        self._dead_ends = dead_ends
        self._patience = limits.launcher or LAUNCHER
        self._unstarted = limits.launcher or (float("inf") if queues else LAUNCHER)
        self._host = socket.gethostname() if host is None else host
        self._last = began
        self._signs: dict[int, Sign] = {}
        self._accused: list[Sign] = []
        self._beats: dict[int, tuple[int, float]] = {}
        self._since: dict[str, float] = {}
        self._step, self._stepped = -1, began

    def note(self, signs: Sequence[Sign]) -> None:
        """Take what can be read now of what the ranks have told."""
        self._signs.update({sign.rank: sign for sign in signs})

    @property
    def signs(self) -> list[Sign]:
        """What each rank has told last, by rank."""
        return [self._signs[rank] for rank in sorted(self._signs)]

    def culprit(self) -> str:
        """Return the host whose ranks failed first; "" if that is not known.

        A rank with an error of its own says so, and one without a sign was seen. One that is killed
        tells nothing; but then the launcher asks the others to end, and they tell that they heard.
        """
        heard = any(sign.heard for sign in self.signs)
        lost = [sign for sign in self.signs if heard and not sign.left and not sign.heard]
        first = [sign for sign in self.signs if sign.failed] or self._accused or lost
        hosts = {sign.host for sign in first}
        return hosts.pop() if len(hosts) == 1 else ""

    def look(
        self,
        told: Sequence[Sign],
        now: float,
        ended: Collection[int] = (),
        launcher: Launcher = AT_WORK,
    ) -> str:
        """Return why the attempt must end, or "" while all may be well.

        `ended` is of before the files of what is `told` were read: who leaves says so first.
        """
        self.note(told)
        signs = self.signs
        if now - self._last > max(5.0, self.limits.heartbeat / 2):
            self._forget(now)
        self._last = now
        there = [sign for sign in signs if not sign.left]
        silent = [sign for sign in there if self._silence(sign, now) > self.limits.heartbeat]
        if silent:
            self._accused = silent
            return f"{_named(silent)} gave no sign for {self.limits.heartbeat:g} s"
        if self._dead_ends and not self.dead:  # the first ones: others may be killed for them
            self.dead = [s for s in there if s.pid in ended and s.host == self._host]
        if self._lasts("dead", bool(self.dead), now) > (0 if launcher.stopped else DEAD):
            self._accused = self.dead
            return f"{_named(self.dead)} is dead"
        if why := self._held_up(launcher, bool(signs), len(signs) == self.ranks and not there, now):
            return why
        late = self.limits.start or (START if signs else float("inf"))
        if len(signs) < self.ranks and now - self.began > late:
            return f"only {len(signs)} of {self.ranks} ranks began within {late:g} s"
        return self._stalled(signs, there, now)

    def _forget(self, now: float) -> None:
        self._beats = {rank: (beat, now) for rank, (beat, _) in self._beats.items()}
        self._since.clear()
        self._stepped = now

    def _silence(self, sign: Sign, now: float) -> float:
        beat, since = self._beats.get(sign.rank, (None, now))
        if beat != sign.beat:
            since = now
        self._beats[sign.rank] = sign.beat, since
        return now - since

    def _lasts(self, what: str, so: bool, now: float) -> float:
        """Seconds for which it has been so, -1 while it is not."""
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
