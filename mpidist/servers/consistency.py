"""When a push may be applied and a pull may be answered: BSP, ASP and SSP, with no MPI in sight.

Every worker has a clock: the number of steps that it has finished. A worker at clock c works on
step c; it enters the step when its first pull there is answered, and it finishes it with a tick.

    SSP(1), 3 workers    worker 0  [0][1][2].......   enters 2 when the slowest has finished 1
                         worker 1  [ 0 ][ 1 ][ 2 ]    steps: nobody ever works more than
                         worker 2  [   0   ][   1     one step ahead of the slowest

========= ======================================= ==========================================
mode      a pull at clock c is answered           a push of clock c is applied
========= ======================================= ==========================================
BSP       when every live worker has finished     with all others of clock c, as one update,
          clock c - 1                             once every live worker has finished c
SSP(s)    when every live worker has finished     at once; with s = 0 once every live worker
          clock c - s - 1                         has finished c, so that no slower worker
                                                  sees it early, in worker order
ASP       at once                                 at once
========= ======================================= ==========================================

A worker that has left (finished or died) no longer counts among the live ones; its pushes do.

A `ConsistencyGate` is the whole state machine. A server feeds it events in the order in which it
meets them and carries out the actions that it returns, in that order; the tests feed it every order
there is.

SSP: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
NIPS 2013.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import ConfigError, ProtocolError


@dataclass(frozen=True)
class Consistency:
    """What the modes have in common.

    Attributes
    ----------
    bound : int or None
        Steps that the fastest worker may be ahead of the slowest; None is no bound.
    holds : bool
        A push waits until every live worker has finished its clock.
    merges : bool
        All pushes of one clock make one update.
    """

    bound: ClassVar[int | None] = None
    holds: ClassVar[bool] = False
    merges: ClassVar[bool] = False


@dataclass(frozen=True)
class ASP(Consistency):
    """Asynchronous: no worker ever waits, and every push is an update of its own."""


@dataclass(frozen=True)
class BSP(Consistency):
    """Bulk-synchronous: one update per clock, made of the pushes of all workers."""

    bound = 0
    holds = True
    merges = True


@dataclass(frozen=True)
class SSP(Consistency):
    """Stale-synchronous: the fastest worker is at most `staleness` clocks ahead.

    With ``staleness=0`` it follows the same path as BSP, a push at a time.

    Raises
    ------
    ConfigError
        `staleness` is negative or no integer.
    """

    staleness: int = 3

    def __post_init__(self):
        whole = isinstance(self.staleness, int) and not isinstance(self.staleness, bool)
        if not whole or self.staleness < 0:
            raise ConfigError(f"SSP: staleness is {self.staleness!r}; give an integer >= 0")

    @property
    def bound(self) -> int:  # type: ignore[override]
        """The staleness."""
        return self.staleness

    @property
    def holds(self) -> bool:  # type: ignore[override]
        """Only without staleness must nobody see a push before its clock is over."""
        return self.staleness == 0


class Apply(NamedTuple):
    """Make one update of `pushes`, a tuple of (worker, item) in worker order."""

    clock: int
    pushes: tuple[tuple[int, Any], ...]


class Answer(NamedTuple):
    """Answer the pull `item` of `worker`, which is `gap` clocks ahead of the slowest."""

    worker: int
    gap: int
    item: Any


class ConsistencyGate:
    """The clocks of one model on one server, and what they hold back.

    Each event returns the actions that it sets free, to be carried out in order. Updates come
    before answers, so an answered worker sees all that its clock promises.

    Raises
    ------
    ProtocolError
        An event that its worker cannot send: a second push in one clock, a push before the worker
        was let into the clock, a second pull while one waits, anything after leaving.
    """

    def __init__(self, consistency: Consistency, workers: int):
        self.consistency = consistency
        self.clocks = [0] * workers
        self.live = [True] * workers
        self.pushed = [-1] * workers  # newest clock with a push, per worker
        self.entered = [-1] * workers  # newest clock with an answered pull, per worker
        self.held: dict[int, dict[int, Any]] = {}  # clock -> worker -> item
        self.waiting: dict[int, Any] = {}  # worker -> item, in order of arrival
        self.gaps: Counter[int] = Counter()

    def slowest(self) -> int | None:
        """Smallest clock of the live workers; None when all have left."""
        return min(itertools.compress(self.clocks, self.live), default=None)

    def is_open(self, worker: int) -> bool:
        """Whether `worker` may work on its clock now. Once open it stays open until it ticks."""
        bound = self.consistency.bound
        return bound is None or self.ahead(worker) <= bound

    def ahead(self, worker: int) -> int:
        """Clocks that `worker`, a live one, is ahead of the slowest."""
        slowest = self.slowest()
        return 0 if slowest is None else self.clocks[worker] - slowest

    def push(self, worker: int, item: Any = None) -> list[Apply | Answer]:
        """Take one push of `worker` in its present clock."""
        clock = self._present(worker, "push")
        if self.pushed[worker] == clock:
            raise ProtocolError(
                f"worker {worker}: second push in clock {clock}; call clock() first"
            )
        if not self.is_open(worker):
            raise ProtocolError(
                f"worker {worker}: push in clock {clock} before it was let in; pull"
            )
        self.pushed[worker] = clock
        if not self.consistency.holds:
            return [Apply(clock, ((worker, item),))]
        self.held.setdefault(clock, {})[worker] = item
        return []

    def tick(self, worker: int) -> list[Apply | Answer]:
        """`worker` has finished its clock."""
        self._present(worker, "clock")
        self.clocks[worker] += 1
        return self._released()

    def pull(self, worker: int, item: Any = None) -> list[Apply | Answer]:
        """`worker` asks for the parameters in its present clock."""
        self._present(worker, "pull")
        self.waiting[worker] = item
        return self._answers()

    def leave(self, worker: int) -> list[Apply | Answer]:
        """`worker` has finished or died: no other worker waits for it from now on."""
        self._present(worker, "leave")
        self.live[worker] = False
        return self._released()

    def _present(self, worker: int, event: str) -> int:
        if not self.live[worker]:
            raise ProtocolError(f"worker {worker}: {event} after it has left")
        if worker in self.waiting:
            raise ProtocolError(f"worker {worker}: {event} while its pull waits")
        return self.clocks[worker]

    def _released(self) -> list[Apply | Answer]:
        slowest = self.slowest()
        actions: list[Apply | Answer] = []
        for clock in sorted(self.held):
            if slowest is not None and clock >= slowest:
                break
            pushes = tuple(sorted(self.held.pop(clock).items(), key=lambda pair: pair[0]))
            if self.consistency.merges:
                actions.append(Apply(clock, pushes))
            else:
                actions.extend(Apply(clock, (push,)) for push in pushes)
        return actions + self._answers()

    def _answers(self) -> list[Apply | Answer]:
        free = [worker for worker in self.waiting if self.is_open(worker)]
        return [self._enter(worker, self.waiting.pop(worker)) for worker in free]

    def _enter(self, worker: int, item: Any) -> Answer:
        gap = self.ahead(worker)
        if self.entered[worker] != self.clocks[worker]:
            # A second pull in the same clock is not a second step: the histogram counts steps.
            self.entered[worker] = self.clocks[worker]
            self.gaps[gap] += 1
        return Answer(worker, gap, item)


class Simulation(NamedTuple):
    """Outcome of `simulate`: seconds to the end, and seconds that each worker waited."""

    seconds: float
    waited: tuple[float, ...]


def simulate(
    delays: Sequence[Sequence[float]], consistency: Consistency, *, trip: float = 0.0
) -> Simulation:
    """Run the clocks of `consistency` over given step times, without MPI and without waiting.

    What a run with these delays would take if messages and servers cost only `trip`.

    Parameters
    ----------
    delays : sequence of sequences
        ``delays[worker][step]`` seconds of work; workers may have different numbers of steps.
    consistency : Consistency
    trip : float
        Seconds from a worker's push to the answer that lets it go on, if nothing holds it.
    """
    gate = ConsistencyGate(consistency, len(delays))
    done = [0] * len(delays)
    asked = [0.0] * len(delays)
    waited = [0.0] * len(delays)
    finished = [(0.0, worker) for worker in range(len(delays))]  # a heap of step ends
    now = 0.0

    def run(actions):
        for action in actions:
            if isinstance(action, Answer):
                worker = action.worker
                waited[worker] += now - asked[worker]
                work = delays[worker][done[worker]]
                done[worker] += 1
                heapq.heappush(finished, (now + trip + work, worker))

    while finished:
        now, worker = heapq.heappop(finished)
        if done[worker]:
            run(gate.push(worker))
            run(gate.tick(worker))
        asked[worker] = now
        run(gate.pull(worker) if done[worker] < len(delays[worker]) else gate.leave(worker))
    return Simulation(now, tuple(waited))
