"""A time limit for the repair after a death: a rank whose repair takes too long ends itself.

In a repair, the living ranks form a new communicator, in these phases:

    MEET      wait for all living ranks           10 s and three times the longest step so far
    SHRINK    make a smaller communicator          5 s
    REBUILD   new communicators, and the state     5 s and 10 s for each GB of state

If another rank dies meanwhile, Open MPI 5.0.11 may hang in a phase, and a blocked MPI call cannot
be cancelled. So a thread measures the time and ends the process when a phase takes too long.
`mpidist launch` then starts the job again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from ..errors import RankFailure
from ..launch import heartbeat
from ..runtime.before_exit import wait_for_the_reader

#: The limit of each phase in seconds, without the times that depend on steps and state.
PHASES = {"MEET": 10.0, "SHRINK": 5.0, "REBUILD": 5.0}
#: The assumed seconds of the longest step while fewer than two steps are done; and the assumed
#: bytes of state that are sent per second.
UNKNOWN_STEP, STATE_RATE = 20.0, 100e6


class RepairDeadline:
    """A context manager that ends this process if a phase of a repair takes too long."""

    def __init__(self, who: str, state_bytes: int):
        self._who, self._state_seconds = who, state_bytes / STATE_RATE
        self._changed = threading.Condition()
        self._phase, self._until = "", float("inf")
        longest = heartbeat.longest_step()
        self._step_seconds = UNKNOWN_STEP if longest is None else longest

    def __enter__(self) -> RepairDeadline:
        threading.Thread(target=self._watch, name="mpidist-repair", daemon=True).start()
        self.begin("MEET")
        return self

    def __exit__(self, *_) -> None:
        self.begin("end")

    def begin(self, phase: str) -> None:
        """Begin a phase of the repair.

        MEET, SHRINK and REBUILD have a time limit, other names none.
        """
        more = {"MEET": 3 * self._step_seconds, "REBUILD": self._state_seconds}.get(phase, 0.0)
        with self._changed:
            self._phase = phase
            self._until = time.monotonic() + PHASES.get(phase, float("inf")) + more
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while self._phase != "end":
                left = self._until - time.monotonic()
                if left <= 0:
                    self._give_up()
                self._changed.wait(None if left == float("inf") else left)

    def _give_up(self) -> None:
        text = f"{self._who} could not go on after a death: {self._phase} took too long; it ends"
        os.write(2, f"mpidist: error: {text}\n".encode())
        if heartbeat.give_up():
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.flush()
        wait_for_the_reader()
        os._exit(RankFailure.exit_code)
