"""Watch the other ranks of the node, and evict ranks that are stopped, hang or are late.

    main thread   checks the other ranks about every 5 ms while it waits for ranks, unless a lower
                  rank of the node waits, too
    watch thread  writes beats (signs of life). If all lower ranks of the node are stopped or dead,
                  it also checks the other ranks. It uses no MPI, so it works while the main threads
                  of all ranks are inside a call of MPI, such as Shrink

A rank watches only ranks of its own node, through shared memory (`node_board`), so no messages are
sent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from .. import events
from ..runtime import polling
from .deadline import Deadline
from .evict import cause_in_words, kill, update_stop, whom_to_evict
from .node_board import COMPUTE, OUTSIDE, PLAN, WAIT, NodeBoard, Record, state_of

#: Seconds between two checks by a waiting rank, and the largest fraction of its time for checks.
LOOK, SHARE = 0.005, 0.05
#: The number of the newest steps whose median time is used for the deadline "auto".
_STEPS = 64


class NodeWatch:
    """Watches the other ranks of this rank's node, and kills ranks that hold others up."""

    def __init__(self, board: NodeBoard, deadline: Deadline):
        self.board, self.deadline = board, deadline
        if polling.board is not None:
            polling.board.close()  # the watch of an earlier group
        self.next_look = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._last_step = self._fresh = time.monotonic()
        # Whether the next step is the first one, or the first one after a change of the group. Such
        # a step takes longer, because it makes plans.
        self._first = True
        #: Whether this rank repairs the group at the moment.
        self.repairs = False
        self._limits = deadline.limits((), True)
        self._looking = threading.Lock()
        self._stop = threading.Event()
        board.beat(self._fresh)
        board.show(OUTSIDE, self._fresh)
        self.show, self._alone = board.show, board.size == 1
        if not self._alone:
            polling.board = self
            self._thread = threading.Thread(target=self._run, name="mpidist-node", daemon=True)
            self._thread.start()

    # -- what this rank shows --------------------------------------------------------------

    def begin_wait(self, now: float) -> int:
        """Show the other ranks that this rank waits; return the number of what it did before."""
        self.next_look = now + LOOK
        return self.board.show(WAIT, now)

    def step_done(self, step: int) -> None:
        """Show the other ranks that this rank has done all steps before `step`."""
        now = time.monotonic()
        self.board.show_step(step, now)
        if not self._first:
            self._steps.append(now - self._last_step)
        self._last_step, self._first = now, False

    def begin_steps(self) -> None:
        """Show the other ranks that this rank begins steps, so that they notice if it is late."""
        self._last_step, self._first = time.monotonic(), True
        self.board.show(COMPUTE, self._last_step)

    def end_steps(self, phase: int = PLAN) -> None:
        """Show the other ranks that this rank does no more steps, and must not count as late."""
        self.board.show(phase, time.monotonic())

    def close(self) -> None:
        """End the watch: this rank no longer watches other ranks, and they no longer watch it."""
        if polling.board is self:
            polling.board = None
        self._stop.set()
        self.board.withdraw()

    # -- the others ------------------------------------------------------------------------

    def look(self, now: float, main: bool = True) -> None:
        """Check the ranks of the node if no lower rank does it, and kill some if needed."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            limits = self.deadline.limits(self._steps, self._first, self.repairs)
            self._limits = limits
            if now - self.board.last_beat() > limits.gap + limits.tick:
                self._fresh = now  # this process was stopped, or did not get the processor
            again = self._watch(now) if self._is_watcher(now, main) else now + LOOK
            spent = time.monotonic() - now
            self.next_look = min(max(now + LOOK, now + spent / SHARE), max(again, now + spent))
        finally:
            self._looking.release()

    def _is_watcher(self, now: float, main: bool) -> bool:
        """Return whether this rank must check, because no lower rank of the node does it."""
        for one in self.board.read(known=()):
            if one.rank >= self.board.rank:
                break
            looks = one.phase == WAIT if main else one.phase != OUTSIDE
            beats = now - one.beat < self._limits.gap + 2 * self._limits.tick
            if looks and beats and state_of(one) not in "TtX":
                return False
        return True

    def _watch(self, now: float) -> float:
        records = [self._noted(one, now) for one in self.board.read()]
        evictions, again = whom_to_evict(records, now, self._limits, self._fresh)
        for each in evictions:
            if each.rank != self.board.rank:
                # A rank may have changed its phase while its record was read, so read again.
                sure = [self._noted(one, now) for one in self.board.read()]
                if each in whom_to_evict(sure, now, self._limits, self._fresh)[0]:
                    victim = next(one for one in sure if one.rank == each.rank)
                    self._evict(victim, each.why, each.seconds)
        return again

    def _noted(self, one: Record, now: float) -> Record:
        new = update_stop(one, now, self._limits.gap)
        if (new.seen, new.last) != (one.seen, one.last):
            self.board.note_stop(new)
        return new

    def _evict(self, victim: Record, why: int, seconds: float) -> None:
        self.board.note_fate(victim.rank, why, seconds)
        if kill(victim):
            what = cause_in_words(why, seconds)
            events.emit("killed", killed=victim.rank, why=what, pid=victim.pid, step=victim.step)
        else:
            self.board.note_fate(victim.rank, 0, 0.0)  # the rank had already died by itself

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(self._limits.tick):
            now = time.monotonic()
            if now - self.board.last_beat() > self._limits.gap + self._limits.tick:
                self._fresh = now
            self.board.beat(now)
            self.look(now, main=False)


def _forget() -> None:
    """End the watch in a forked child process, which is not a rank."""
    polling.board = None


os.register_at_fork(after_in_child=_forget)
