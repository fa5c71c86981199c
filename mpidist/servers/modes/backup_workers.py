"""Backup workers: steps that do not wait for the slowest k of n workers. Uses no MPI.

    BackupWorkers(1), 3 workers    worker 0  [0][1][2].    a step is done when 2 of 3 workers have
                                   worker 1  [ 0][1][2]    finished it; worker 2 was late for
                                   worker 2  [   0   |2]   step 0, passes over 1 and goes on with 2

A step is also called a round. A round is done when n - k workers have finished it; if fewer workers
are left, all of them must finish it. The update of a round uses the mean of the gradients of these
workers. A push for a round that is already done is late: it is counted but not applied, and the
answer to the worker's next pull says so. The pull also moves the worker to the present round, so
that it is not late in all later rounds, too. The pull of a worker that is not late is answered when
its round is done. So every applied gradient was computed from the newest parameters.

With several servers, the pushes may arrive in another order on each server. Therefore the first
server decides for all servers which pushes count, and sends its decisions to the other servers, in
the order in which it makes them:

    first server   close round 4 with workers 0, 2 | worker 0 enters 5 | worker 2 enters 5 | ...
    other server   waits until it has the pushes of 0 and 2, applies them; answers 0; answers 2

The other servers decide nothing. To carry out a decision, a server waits only for messages that
workers have sent before the decision, so servers and workers cannot wait for each other in a
circle.

After a server has let a late worker into a round, and before it has written the answer, it may
close this round. In this case the answer already has the update of the round, and the worker's push
for the round is late and is not applied.

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

CLOSE, ENTER, END = 0, 1, 2


@dataclass(frozen=True)
class BackupWorkers(Consistency):
    """Bulk-synchronous, but a step does not wait for the `count` slowest workers.

    With n workers, the first ``n - count`` pushes of a step make one update by the weighted mean of
    their gradients. Later pushes of the step are counted but not applied, and their workers
    continue with the present step, so that their ``client.finished`` (the number of finished or
    skipped steps) grows by more than 1. If fewer than ``n - count`` workers are left, a step waits
    for all of them. Which workers are late depends on their speed, so two runs do not end with the
    same bits. ``BackupWorkers(0)`` equals BSP.

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
        """Raise ConfigError if a step would not wait for any of `workers` workers."""
        if self.count >= workers:
            raise ConfigError(
                f"BackupWorkers: count={self.count} of {workers} workers leaves none to wait for; "
                f"give at most {workers - 1}"
            )

    def gate(
        self, workers: int, server: int = 0, now: Callable[[], float] = time.monotonic
    ) -> ConsistencyGate:
        """Return the state machine that carries out this mode on server number `server`.

        On server 0 it is a `BackupGate`, which decides which pushes count. On the other servers it
        is a `FollowingGate`, which obeys the decisions of server 0.
        """
        return FollowingGate(self, workers) if server else BackupGate(self, workers)


class Decision(NamedTuple):
    """A decision of the first server about one round (step), which it sends to the other servers.

    A decision has one of three kinds. CLOSE: the round `clock` is done, and the pushes of the
    workers in the decision make its update. ENTER: the worker in the decision begins the round
    `clock`. END: no worker is left that could close a round.
    """

    kind: int
    clock: int
    workers: tuple[int, ...] = ()


class BackupGate(ConsistencyGate):
    """Decides on the first server when a step is done, and which pushes count, in `BackupWorkers`.

    All servers must use the pushes of the same workers. So the server with number 0 decides for all
    servers, and sends its decisions to the others, which have a `FollowingGate`. A step is also
    called a round.

    Attributes
    ----------
    round : int
        The present step. The clock of a worker is the step on which it works. This clock is below
        `round` if the worker is late, and above `round` if the worker has finished the round.
    decisions : list of Decision
        New decisions. The server removes them from the list and sends them to the other servers.
    """

    def __init__(self, consistency: BackupWorkers, workers: int):
        super().__init__(consistency, workers)
        self.round = 0
        self._needed = workers - consistency.count
        self._finished: set[int] = set()  # workers that have finished the present round

    def is_open(self, worker: int) -> bool:
        """Whether a pull of `worker` is answered now.

        A pull is answered now if its worker is late, or is at the present step.
        """
        return self.clocks[worker] <= self.round

    def blockers(self, worker: int) -> tuple[list[int], int]:
        """Return (workers that have not finished the present step, how many of them must do so).

        The pull of `worker` waits for these workers.
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
        """Record that `worker` has finished its present step.

        Returns the actions (such as updates and answers) that are allowed now.
        """
        if self._present(worker, "clock") == self.round:
            self._finished.add(worker)
        self.clocks[worker] += 1
        return self._moved()

    def pull(self, worker: int, item: Any = None) -> list[Action]:
        """Record that `worker` asks for the parameters of its present step.

        `item` is the pull. Returns the actions (updates and answers) that are allowed now.
        """
        self._present(worker, "pull")
        if self.entered[worker] == self.clocks[worker]:
            return [self._enter(worker, item)]  # a second pull in the same step
        self.waiting[worker] = item
        return self._moved()

    def leave(self, worker: int) -> list[Action]:
        """Record that `worker` has finished training or died.

        Returns the actions (such as updates and answers) that are allowed now.

        The worker's push of the present step still counts.
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

    def _begin(self, worker: int) -> Answer:
        """Let `worker` begin the present round."""
        self.clocks[worker] = self.round
        return self._enter(worker, self.waiting.pop(worker))


class FollowingGate(BackupGate):
    """Applies pushes and answers pulls on the other servers as the first server has decided.

    All servers except the first one use a `FollowingGate` under `BackupWorkers`. It decides
    nothing; it gets each `Decision` of the first server by `follow`.
    """

    def __init__(self, consistency: BackupWorkers, workers: int):
        super().__init__(consistency, workers)
        self._script: deque[Decision] = deque()
        self.settled = False

    def blockers(self, worker: int) -> tuple[list[int], int]:
        """Return no workers, because only the first server knows for whom `worker` waits."""
        return [], 0

    def follow(self, decision: Decision) -> list[Action]:
        """Record a decision of the first server; return the updates and answers that it allows."""
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
