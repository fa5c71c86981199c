"""How `mpidist launch` gives a run more ranks: a new attempt starts while the old one trains.

When the new ranks are ready, the old ranks leave them the state of the run. This is a hand-over:

    old attempt   trains ............... last step, state ....... leaves
    launcher      starts   ready: asks                     decides
    new attempt   . . . gets ready, waits . . . . . . . . . . . . restores, trains

Until the launcher has decided, the old attempt owns the run, and the launcher can end the new
attempt at any time. `fault_tolerance.hand_over` has the ranks' part in the hand-over.
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

#: Seconds between two checks whether the old ranks have handed over their state.
EVERY = 0.002
#: Seconds in which the old ranks must end after the new ranks have taken over.
LEAVE = 15.0


class Waiting(Protocol):
    """An attempt that is starting: the part of `RunningAttempt` that `Growth` uses.

    `pending` is a signal that came while the attempt waited, and that it must handle later.
    """

    folder: Path
    ranks: int
    pending: int | None

    @property
    def signs(self) -> Sequence[Sign]:
        """The heartbeats of the attempt's ranks."""

    def fault(self, now: float) -> str:
        """Return the reason for which the attempt must be given up; "" if there is none."""

    def end(self) -> None:
        """End all processes of the attempt."""


W = TypeVar("W", bound=Waiting)


class Growth(Generic[W]):
    """Replaces the running attempt (the old one) by a new attempt with more ranks.

    `folder` is the folder of the old attempt. `new` is the new attempt, which starts, and then
    waits until the old ranks leave it the state of the run. `more` is the number of additional
    ranks that the user has asked for. `asked` says whether the old ranks have been asked for their
    state. `gone` says whether the launcher has decided that the new ranks continue the run.
    """

    def __init__(self, folder: Path, new: W, more: int):
        self.folder, self.new, self.more = folder, new, more
        self.asked = self.gone = False

    def look(self, old: Sequence[Sign], now: float) -> str:
        """If the new ranks are ready, ask the old ranks for their state.

        Returns a reason to give up the new ranks, or "" if there is none. `old` are the heartbeats
        of the old ranks.
        """
        if self.gone:
            return ""
        if why := self.new.fault(now):
            return why
        # The file CAN exists only while the old ranks are in their training loop. Afterwards they
        # must not be asked, because the signal that asks them would interrupt their last work.
        ready = heartbeat.has(self.new.folder, heartbeat.READY)
        if not self.asked and ready and heartbeat.has(self.folder, heartbeat.CAN):
            where = heartbeat.IN_STORE
            # The heartbeats of some new ranks may not be visible here yet.
            if len(self.new.signs) == self.new.ranks:
                where = place_of_state(old, self.new.signs)
            (self.folder / heartbeat.ASKED).write_text(where, encoding="utf-8")
            self.asked = True
        return ""

    def listen(self, numbers: Collection[int], seconds: float):
        """Wait for a signal, as `signal.sigtimedwait` does, and for the state of the old ranks.

        As soon as the old ranks have left their state, decide that the new ranks continue the run.
        Returns the signal, or None after `seconds` or when the decision was made.
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
        """Decide that the new ranks continue from the state in `where`; return whether they do."""
        if not self.gone and not self.new.fault(time.monotonic()):
            self.gone = heartbeat.make_decision(self.folder, where)
        return self.gone

    def call_off(self) -> bool:
        """End the new ranks, so that the old ranks keep the run; return False if it is too late."""
        if self.gone:
            return False
        if self.asked:
            # If the file cannot be written, the old ranks make the decision when they have waited
            # too long.
            with suppress(OSError):
                heartbeat.make_decision(self.folder, heartbeat.KEPT)
        self.new.end()
        return True


def place_of_state(old: Sequence[Sign], new: Sequence[Sign]) -> str:
    """Return where the old ranks leave the state: in memory if all ranks are on one host. Pure."""
    hosts = {sign.host for sign in (*old, *new)}
    return heartbeat.IN_MEMORY if len(hosts) == 1 else heartbeat.IN_STORE
