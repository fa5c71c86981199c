"""The launcher's half of a hand-over: an attempt with more ranks gets ready while one trains.

    old attempt   trains ............... last step, state ....... leaves
    launcher      starts   ready: asks                     decides
    new attempt   . . . gets ready, waits . . . . . . . . . . . . restores, trains

As long as the launcher has not decided, the old attempt has the run, and the new one can be given
up at any time. The ranks' half is `fault_tolerance.hand_over`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ..launch import heartbeat
from ..launch.heartbeat import Sign

#: Seconds between two looks for the state of the old ranks, while they are asked for it.
EVERY = 0.002
#: Seconds that the old ranks have to leave, once the new ones go on.
LEAVE = 15.0


class Waiting(Protocol):
    """An attempt that gets ready: a `RunningAttempt`. `pending` is a signal for it, for later."""

    folder: Path
    ranks: int
    pending: int | None

    @property
    def signs(self) -> Sequence[Sign]:
        """The heartbeats of its ranks."""

    def fault(self, now: float) -> str:
        """Return the reason for which it cannot go on, or ""."""

    def end(self) -> None:
        """End all its processes."""


W = TypeVar("W", bound=Waiting)


class Growth(Generic[W]):
    """A hand-over of the run in `folder` of the old attempt to the `new` one, which waits.

    `more` is how many ranks more the user has asked for. `asked`: whether the old ranks have been
    asked for their state. `gone`: whether the launcher has decided that the new ranks go on.
    """

    def __init__(self, folder: Path, new: W, more: int):
        self.folder, self.new, self.more = folder, new, more
        self.asked = self.gone = False

    def look(self, old: Sequence[Sign], now: float) -> str:
        """Ask for the state if the new ranks are ready; return why they are given up, or "".

        `old` are the heartbeats of the old ranks.
        """
        if self.gone:
            return ""
        if why := self.new.fault(now):
            return why
        # Old ranks that have left their loop are about to end, and the signal that asks them would
        # end whatever they still do.
        ready = heartbeat.has(self.new.folder, heartbeat.READY)
        if not self.asked and ready and heartbeat.has(self.folder, heartbeat.CAN):
            where = heartbeat.IN_STORE
            if len(self.new.signs) == self.new.ranks:  # some may not be seen here yet
                where = place_of_state(old, self.new.signs)
            (self.folder / heartbeat.ASKED).write_text(where, encoding="utf-8")
            self.asked = True
        return ""

    def listen(self, numbers: Collection[int], seconds: float):
        """Wait for a signal, as `signal.sigtimedwait` does, but decide as soon as it can be done.

        Returns after `seconds`, or when a decision was made.
        """
        if not self.asked or self.gone:
            return signal.sigtimedwait(numbers, seconds)
        until = time.monotonic() + seconds
        while True:
            heard = signal.sigtimedwait(numbers, EVERY)
            if heard is not None or time.monotonic() > until or self._decide():
                return heard

    def _decide(self) -> bool:
        with suppress(OSError):  # a shared file system may fail for a while
            if heartbeat.has(self.folder, heartbeat.HANDED):
                where = (self.folder / heartbeat.HANDED).read_text(encoding="utf-8")
                return bool(where) and self.take_over(where)
        return False

    def take_over(self, where: str) -> bool:
        """Let the new ranks go on, from the state in `where`; return whether they do."""
        if not self.gone and not self.new.fault(time.monotonic()):
            self.gone = heartbeat.make_decision(self.folder, where)
        return self.gone

    def call_off(self) -> bool:
        """Let the old ranks keep the run and end the new ones, if it is not too late."""
        if self.gone:
            return False
        if self.asked:
            with suppress(OSError):  # then the old ranks make it, when they have waited in vain
                heartbeat.make_decision(self.folder, heartbeat.KEPT)
        self.new.end()
        return True


def place_of_state(old: Sequence[Sign], new: Sequence[Sign]) -> str:
    """Return where the old ranks leave the state: in memory, if all ranks share it. Pure."""
    hosts = {sign.host for sign in (*old, *new)}
    return heartbeat.IN_MEMORY if len(hosts) == 1 else heartbeat.IN_STORE
