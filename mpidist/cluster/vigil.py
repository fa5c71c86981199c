"""When does an attempt have to be ended? Judged from what its ranks tell; pure but for /proc."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..elastic.processes import runs
from ..elastic.pulse import Sign


class Limits(NamedTuple):
    """Seconds: without a beat, until all ranks begin, without a step, to save and leave.

    `start` None: only once one rank has begun; `stall` None: for ever.
    """

    heartbeat: float = 60.0
    start: float | None = None
    stall: float | None = None
    grace: float = 300.0

    def interval(self, ranks: int) -> float:
        """Seconds between two looks at so many ranks' files."""
        return min(0.5, self.heartbeat / 4) + ranks / 500


#: Until all ranks have begun once one has, if nothing else is said.
START = 300.0
#: A rank that is dead is left to the launcher for so long; so is a launcher whose ranks have left.
DEAD, LINGER = 10.0, 60.0


class Vigil:
    """What was seen of one attempt's ranks. Local.

    A file that cannot be read for a while, as it happens on shared file systems, is no rank that is
    missing: what it told last stands. Silence is counted on this host's clock, from looks; a look
    that comes late, because this process was stopped as well, counts for nothing.
    """

    def __init__(
        self,
        ranks: int,
        limits: Limits,
        began: float,
        *,
        dead_ends: bool = True,
        alive: Callable[[int], bool] = runs,
        host: str | None = None,
    ):
        self.ranks, self.limits, self.began = ranks, limits, began
        self._dead_ends, self._alive = dead_ends, alive
        self._host = socket.gethostname() if host is None else host
        self._last = began
        self._signs: dict[int, Sign] = {}
        self._accused: list[Sign] = []
        self._beats: dict[int, tuple[int, float]] = {}
        self._dead: dict[int, float] = {}
        self._step, self._stepped = -1, began
        self._all_left: float | None = None

    def note(self, signs: Sequence[Sign]) -> None:
        """Take what can be read now of what the ranks have told."""
        self._signs.update({sign.rank: sign for sign in signs})

    @property
    def signs(self) -> list[Sign]:
        """What each rank has told last, by rank."""
        return [self._signs[rank] for rank in sorted(self._signs)]

    def culprit(self) -> str:
        """Return the host whose ranks were the first to fail, "" where nobody can tell.

        A rank with an error of its own says so, and one without a sign was seen. One that is killed
        tells nothing; but then the launcher asks the others to end, and they tell that they heard.
        """
        heard = any(sign.heard for sign in self.signs)
        lost = [sign for sign in self.signs if heard and not sign.left and not sign.heard]
        first = [sign for sign in self.signs if sign.failed] or self._accused or lost
        hosts = {sign.host for sign in first}
        return hosts.pop() if len(hosts) == 1 else ""

    def look(self, told: Sequence[Sign], now: float) -> str:
        """Return why the attempt must end, or "" while all may be well."""
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
        dead = [sign for sign in there if self._gone(sign, now) > DEAD]
        if dead and self._dead_ends:
            self._accused = dead
            return f"{_named(dead)} is dead"
        late = self.limits.start or (START if signs else float("inf"))
        if len(signs) < self.ranks and now - self.began > late:
            return f"only {len(signs)} of {self.ranks} ranks began within {late:g} s"
        return self._stalled(signs, there, now) or self._lingers(signs, there, now)

    def _forget(self, now: float) -> None:
        self._beats = {rank: (beat, now) for rank, (beat, _) in self._beats.items()}
        self._dead.clear()
        self._stepped, self._all_left = now, None

    def _silence(self, sign: Sign, now: float) -> float:
        beat, since = self._beats.get(sign.rank, (None, now))
        if beat != sign.beat:
            since = now
        self._beats[sign.rank] = sign.beat, since
        return now - since

    def _gone(self, sign: Sign, now: float) -> float:
        """Seconds since a process of this host is known to be dead."""
        if sign.host != self._host or self._alive(sign.pid):
            return 0.0
        return now - self._dead.setdefault(sign.rank, now)

    def _stalled(self, signs, there, now: float) -> str:
        step = max((-1 if sign.step is None else sign.step for sign in signs), default=-1)
        if step != self._step or not there:
            self._step, self._stepped = step, now
        if self.limits.stall is not None and step >= 0 and now - self._stepped > self.limits.stall:
            return f"no step after {step} for {self.limits.stall:g} s"
        return ""

    def _lingers(self, signs, there, now: float) -> str:
        if there or len(signs) < self.ranks:
            self._all_left = None
            return ""
        if self._all_left is None:
            self._all_left = now
        if now - self._all_left > LINGER:
            return f"all ranks have left, and the launcher goes on for {LINGER:g} s"
        return ""


def _named(signs: Sequence[Sign]) -> str:
    named = ", ".join(f"rank {sign.rank} on {sign.host}" for sign in signs[:4])
    return f"{named} and {len(signs) - 4} more" if len(signs) > 4 else named
