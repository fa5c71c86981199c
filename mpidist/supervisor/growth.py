"""How `mpidist launch` gives a run more ranks: a new attempt starts while the old one trains.

An attempt is one start of the program on all ranks. When the new ranks are ready, the old ranks
leave them the state of the training run, and end. This is a hand-over:

    old attempt   trains ............... last step, state ....... leaves
    launcher      starts   ready: asks                     decides
    new attempt   . . . gets ready, waits . . . . . . . . . . . . restores, trains

"Launcher" here is `mpidist launch`. Until the launcher has decided, only the old attempt may write
to the run's folder, and the launcher can end the new attempt at any time.
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
    """A new start of the program, which waits to continue the training run of the old one.

    `pending` is a signal that came while the new start waited, and that it must handle later.
    """

    folder: Path
    ranks: int
    pending: int | None

    @property
    def signs(self) -> Sequence[Sign]:
        """The newest heartbeat (sign of life) of each of the new ranks."""

    def fault(self, now: float) -> str:
        """Return why these new ranks can no longer take over the run; "" if they can."""

    def end(self) -> None:
        """End all processes of the new attempt (start of the program)."""


W = TypeVar("W", bound=Waiting)


class Growth(Generic[W]):
    """Lets a new attempt (start of the program) with more ranks continue a run that still trains.

    `folder` is the folder of the old attempt, `new` the new attempt, and `more` the number of
    additional ranks that the user has asked for. `asked` says whether the old ranks have been asked
    for the state. `gone` is true when the old ranks must end, because the new ranks have taken over
    the run.
    """

    def __init__(self, folder: Path, new: W, more: int):
        self.folder, self.new, self.more = folder, new, more
        self.asked = self.gone = False

    def look(self, old: Sequence[Sign], now: float) -> str:
        """If the new ranks are ready, ask the old ranks for their state.

        Returns a reason to give up the new ranks, or "".
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
        """Wait for a signal to `mpidist launch`, or until the old ranks have handed over the state.

        As soon as the old ranks have handed over the state, decide that the new ranks continue the
        run. Returns the signal, or None after the decision or after `seconds`.
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
        """Decide that the new ranks continue the run; return whether they do.

        `where` says where the state is, in memory or in the store. The result is false if the new
        ranks have failed, or if the old ranks have decided before to keep the run.
        """
        if not self.gone and not self.new.fault(time.monotonic()):
            self.gone = heartbeat.make_decision(self.folder, where)
        return self.gone

    def call_off(self) -> bool:
        """End the new ranks, so that the old ranks keep the run; return whether it worked."""
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
    """Return where the old ranks must put the state of the run for the new ranks.

    The place is memory if all ranks, old and new, are on one host, and otherwise the checkpoint
    store.
    """
    hosts = {sign.host for sign in (*old, *new)}
    return heartbeat.IN_MEMORY if len(hosts) == 1 else heartbeat.IN_STORE
