"""Backup workers: steps that do not wait for the slowest k of n workers. Uses no MPI.

    BackupWorkers(1), 3 workers    worker 0  [0][1][2].    a step is done when 2 of 3 workers have
                                   worker 1  [ 0][1][2]    finished it; worker 2 was late for
                                   worker 2  [   0   |2]   step 0, passes over 1 and goes on with 2

A step, which is also called a round, is done when n - k workers have finished it. The first server
decides for all servers which gradients count:

    first server   close round 4 with workers 0, 2 | worker 0 enters 5 | worker 2 enters 5 | ...
    other server   waits until it has the pushes of 0 and 2, applies them; answers 0; answers 2

Chen et al., "Revisiting distributed synchronous SGD", 2016, arXiv 1604.00981.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import ConfigError
from ...registry import checked_whole
from ..consistency import Action, Answer, Apply, Consistency, ConsistencyGate, Drop

# To carry out a decision, a server waits only for messages sent before the decision. So servers and
# workers cannot wait for each other in a circle.
CLOSE, ENTER, END = 0, 1, 2


@dataclass(frozen=True)
class BackupWorkers(Consistency):
    """Bulk-synchronous, but a step does not wait for the `count` slowest workers.

    With n workers, the first ``n - count`` pushes of a step make one update by the weighted mean of
    their gradients. If fewer workers than these still train, a step waits for all of them. Later
    pushes of the step are counted but not applied. The late workers continue with the present step,
    so their ``client.finished`` (the number of finished or skipped steps) grows by more than 1.
    Which workers are late depends on their speed, so two runs do not end with the same bits.
    ``BackupWorkers(0)`` equals BSP.

    Chen et al., "Revisiting distributed synchronous SGD", 2016, arXiv 1604.00981.

    Parameters
    ----------
    count : int
        The number of workers for which a step does not wait. It must be less than the number of
        workers.

    Raises
    ------
    ConfigError
        `count` is negative or not a whole number; or, when a model is added, `count` is not less
        than the number of workers.
    """

    count: int = 1

    holds = True
    merges = True
    asks_all = True
    survives = False

    def __post_init__(self):
        whole = checked_whole("BackupWorkers: count", self.count, 0)
        object.__setattr__(self, "count", whole)  # the dataclass is frozen

    def check(self, workers: int) -> None:
        """Raise ConfigError unless `count` is below `workers`, the number of all workers."""
        if self.count >= workers:
            raise ConfigError(
                f"BackupWorkers: count={self.count} of {workers} workers leaves none to wait for; "
                f"give at most {workers - 1}"
            )

    def gate(
        self, workers: int, server: int = 0, now: Callable[[], float] = time.monotonic
    ) -> ConsistencyGate:
        """Return the gate of server number `server`, an object that decides when workers may go on.

        The gate of the first server decides for all servers, and the other gates follow it.
        """
        return FollowingGate(self, workers) if server else BackupGate(self, workers)


class Decision(NamedTuple):
    """A decision of the first server about one step, which it sends to the other servers.

    CLOSE: the step `clock` is done, and the gradients of `workers` make its update. ENTER: the one
    worker in `workers` begins the step `clock`. END: no worker is left.
    """

    kind: int
    clock: int
    workers: tuple[int, ...] = ()


class BackupGate(ConsistencyGate):
    """Decides on the first server in the mode `BackupWorkers`, in which some workers may be late.

    It decides when a step is done, which gradients of the step make its update, and which gradients
    are dropped because they are late.
    """

    def __init__(self, consistency: BackupWorkers, workers: int):
        super().__init__(consistency, workers)
        # The present step. The clock of a late worker is below it; that of a worker that has
        # finished the step is above it.
        self.round = 0
        self._needed = workers - consistency.count
        self._finished: set[int] = set()  # workers that have finished the present round

    def is_open(self, worker: int) -> bool:
        """Whether `worker` may get the parameters for the present step now.

        A worker that has finished the present step waits until enough other workers have finished
        it. A worker that is still in this step or in an earlier step does not wait.
        """
        return self.clocks[worker] <= self.round

    def blockers(self, worker: int) -> tuple[list[int], int]:
        """Return the workers that have not finished the step, and for how many the step waits.

        The step waits for only some of them, because in this mode some workers may be late.
        """
        working = self._working()
        return working, min(self._needed - len(self._finished), len(working))

    def _may_push(self, worker: int) -> bool:
        """Whether `worker` has entered its present step; the first step needs no pull."""
        return self.clocks[worker] in (0, self.entered[worker])

    def _taken(self, worker: int, clock: int, item: Any) -> list[Action]:
        """Hold a push until its round is closed; drop it if it is late."""
        if clock < self.round:
            return [Drop(clock, ((worker, item),))]
        self.held.setdefault(clock, {})[worker] = item
        return self._moved()

    def tick(self, worker: int) -> list[Action]:
        """Record that `worker` has ended its step; return the actions that are possible now.

        An action makes an update (`Apply`), leaves out late gradients (`Drop`), or sends a worker
        the parameters for which it waits (`Answer`).
        """
        if self._present(worker, "clock") == self.round:
            self._finished.add(worker)
        self.clocks[worker] += 1
        return self._moved()

    def pull(self, worker: int, item: Any = None) -> list[Action]:
        """Record that `worker` asks for parameters; return the actions that are possible now.

        An action makes an update (`Apply`), leaves out late gradients (`Drop`), or sends a worker
        the parameters for which it waits (`Answer`).
        """
        self._present(worker, "pull")
        if self.entered[worker] == self.clocks[worker]:
            return [self._enter(worker, item)]  # a second pull in the same step
        self.waiting[worker] = item
        return self._moved()

    def leave(self, worker: int) -> list[Action]:
        """Record that `worker` left or died; return the actions that are possible now.

        An action makes an update (`Apply`), leaves out late gradients (`Drop`), or sends a worker
        the parameters for which it waits (`Answer`).
        """
        self._present(worker, "leave")
        self.live[worker] = False
        if worker in self.held.get(self.round, ()):
            self._finished.add(worker)
        return self._moved()

    def _working(self) -> list[int]:
        clocks = enumerate(self.clocks)
        return [worker for worker, clock in clocks if self.live[worker] and clock <= self.round]

    def _moved(self) -> list[Action]:
        """Close the round if it is done, and answer the pulls that may be answered."""
        actions: list[Action] = []
        if self._finished and (len(self._finished) >= self._needed or not self._working()):
            taken = tuple(sorted(self._finished & self.held.get(self.round, {}).keys()))
            self.decisions.append(Decision(CLOSE, self.round, taken))
            actions += self._close(taken)
        for worker in [worker for worker in self.waiting if self.is_open(worker)]:
            self.decisions.append(Decision(ENTER, self.round, (worker,)))
            actions.append(self._begin(worker))
        if not any(self.live):
            self.decisions.append(Decision(END, self.round))
        return actions

    def _close(self, taken: tuple[int, ...]) -> list[Action]:
        """Apply the pushes of the workers in `taken`, drop the others, begin the next round."""
        clock, held = self.round, self.held.pop(self.round, {})
        late = sorted(held.keys() - set(taken))
        self.round += 1
        self._finished.clear()
        actions: list[Action] = [Apply(clock, tuple((w, held[w]) for w in taken))]
        if late:
            actions.append(Drop(clock, tuple((w, held[w]) for w in late)))
        return actions

    # The round may be closed before the answer is written. The answer then has the update of the
    # round, and the push of `worker` for the round is late.
    def _begin(self, worker: int) -> Answer:
        """Let `worker` begin the present round."""
        self.clocks[worker] = self.round
        return self._enter(worker, self.waiting.pop(worker))


class FollowingGate(BackupGate):
    """Repeats the first server's decisions on another server, in the mode `BackupWorkers`.

    The first server decides which gradients make the update of a step, and when a worker is
    answered. The other servers then do the same.
    """

    def __init__(self, consistency: BackupWorkers, workers: int):
        super().__init__(consistency, workers)
        self._script: deque[Decision] = deque()
        self.settled = False

    def blockers(self, worker: int) -> tuple[list[int], int]:
        """Return an empty list and 0, because only the first server decides when workers go on."""
        return [], 0

    def follow(self, decision: Decision) -> list[Action]:
        """Record a decision of the first server; return the actions that are possible now.

        An action makes an update (`Apply`), leaves out late gradients (`Drop`), or sends a worker
        the parameters for which it waits (`Answer`). An action is possible when the pushes or the
        pull that it needs have arrived.
        """
        self._script.append(decision)
        return self._moved()

    def _moved(self) -> list[Action]:
        actions: list[Action] = []
        while self._script and self._is_possible(self._script[0]):
            kind, _, workers = self._script.popleft()
            if kind == CLOSE:
                actions += self._close(workers)
            elif kind == ENTER:
                actions.append(self._begin(workers[0]))
            else:
                self.settled = True
        return actions

    def _is_possible(self, decision: Decision) -> bool:
        """Whether the pushes (or the pull) that a decision needs have arrived."""
        here = self.held.get(self.round, {}) if decision.kind == CLOSE else self.waiting
        return all(worker in here for worker in decision.workers)
