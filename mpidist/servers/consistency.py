"""When a server may apply a push and answer a pull in the modes BSP, ASP and SSP.

Every worker has a clock: the number of steps that the worker has finished. A worker at clock c
works on step c. The worker enters step c when its first pull in step c is answered.

    SSP(1), 3 workers    worker 0  [0][1][2].......   enters 2 when the slowest has finished 1
                         worker 1  [ 0 ][ 1 ][ 2 ]    steps: no worker is ever more than
                         worker 2  [   0   ][   1     one step ahead of the slowest

========= ======================================= ==========================================
mode      a pull at clock c is answered           a push of clock c is applied
========= ======================================= ==========================================
BSP       when every live worker has finished     with all others of clock c, as one update,
          clock c - 1                             once every live worker has finished c
SSP(s)    when every live worker has finished     at once; with s = 0 in worker order once
          clock c - s - 1                         every live worker has finished c, so that
                                                  no slower worker pulls the update too early
ASP       at once                                 at once
========= ======================================= ==========================================

A live worker is one that has not left: it has neither finished training nor died. Pushes that a
worker has sent before it left are still applied. The class `ConsistencyGate` contains these rules
as one state machine, without MPI.

SSP: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server",
NIPS 2013.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

from ..errors import ConfigError, ProtocolError


@dataclass(frozen=True)
class Consistency:
    """Base class of the consistency modes.

    Attributes
    ----------
    bound : int or None
        How many steps the fastest worker may be ahead of the slowest worker; None means no bound.
    holds : bool
        Whether the server keeps the gradients of a step until every worker has finished the step.
    merges : bool
        Whether the gradients of all workers in one step make one update.
    streams : bool
        Whether a server may apply and answer large gradients piece by piece.
    asks_all : bool
        Whether a worker begins a step only when every server has answered it. Otherwise a worker
        asks only the servers that hold the parameters that it needs.
    survives : bool
        Whether an elastic run can go on in this mode after a death.
    """

    bound: ClassVar[int | None] = None
    holds: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    # Possible if no worker gets an answer before all workers have sent their pushes.
    streams: ClassVar[bool] = False
    # As in modes in which server number 0 alone decides when a worker may begin.
    asks_all: ClassVar[bool] = False
    survives: ClassVar[bool] = True

    def check(self, workers: int) -> None:
        """Raise ConfigError if the mode is not possible with this number of workers."""

    def gate(
        self, workers: int, server: int = 0, now: Callable[[], float] = time.monotonic
    ) -> ConsistencyGate:
        """Return the object by which server number `server` decides when workers may go on.

        ``now()`` returns the time in seconds, for modes that measure how fast workers are.
        """
        return ConsistencyGate(self, workers)


@dataclass(frozen=True)
class ASP(Consistency):
    """Asynchronous: no worker ever waits for another worker; every push is a separate update."""


@dataclass(frozen=True)
class BSP(Consistency):
    """Bulk-synchronous: the pushes of all workers in one clock (step) make one update."""

    bound = 0
    holds = True
    merges = True
    streams = True


@dataclass(frozen=True)
class SSP(Consistency):
    """Stale-synchronous: the fastest worker is at most `staleness` steps ahead of the slowest.

    With ``staleness=0`` workers wait as in BSP, but each push is a separate update.

    Raises
    ------
    ConfigError
        `staleness` is negative or not an integer.
    """

    staleness: int = 3

    def __post_init__(self):
        whole = isinstance(self.staleness, int) and not isinstance(self.staleness, bool)
        if not whole or self.staleness < 0:
            raise ConfigError(f"SSP: staleness is {self.staleness!r}; give an integer >= 0")
        object.__setattr__(self, "bound", self.staleness)  # the dataclass is frozen
        # With staleness 0, no worker may pull an update before all workers have finished the clock
        # of the update.
        object.__setattr__(self, "holds", self.staleness == 0)


class Apply(NamedTuple):
    """A server's next action: make one update from `pushes`, a list of (worker, its gradients)."""

    clock: int
    pushes: tuple[tuple[int, Any], ...]


class Drop(NamedTuple):
    """A server's next action: leave out `pushes`, a list of (worker, its late gradients)."""

    clock: int
    pushes: tuple[tuple[int, Any], ...]


class Answer(NamedTuple):
    """A server's next action: send `worker` the parameters for which it has asked."""

    worker: int
    # How many steps the worker is ahead of the slowest worker.
    gap: int
    # The request that is answered.
    item: Any


class Do(NamedTuple):
    """A server's next action: call the function `work`, after all earlier updates and answers."""

    work: Callable[[], None]


Action = Apply | Answer | Drop | Do


class ConsistencyGate:
    """Decides for one model on one server when gradients are applied and workers answered.

    The methods `push`, `tick` (the end of a step), `pull` and `leave` each record an event of a
    worker. They return the actions (`Apply`, `Drop`, `Answer` or `Do`) that the server may do now,
    in the order in which it must do them.

    Raises
    ------
    ProtocolError
        An event that is not allowed, such as a second push of a worker in one step.
    """

    def __init__(self, consistency: Consistency, workers: int):
        self.consistency = consistency
        self.clocks = [0] * workers
        self.live = [True] * workers
        self.pushed = [-1] * workers  # newest clock with a push, for each worker
        self.entered = [-1] * workers  # newest clock with an answered pull, for each worker
        self.held: dict[int, dict[int, Any]] = {}  # clock -> worker -> item
        self.waiting: dict[int, Any] = {}  # worker -> item, in order of arrival
        self.gaps: Counter[int] = Counter()
        #: Decisions to send to the other servers, in modes in which the first server decides.
        self.decisions: list = []
        #: Whether all pushes are applied or dropped once every worker has left.
        self.settled = True

    def begin_at(self, clocks: Sequence[int]) -> None:
        """Let each worker begin at its number of finished steps in `clocks`, instead of 0."""
        self.clocks[:] = clocks

    def mode_at(self, clock: int) -> Consistency:
        """Return the consistency mode of the step `clock`."""
        return self.consistency

    def changes(self) -> list[tuple[int, Consistency]]:
        """Return the modes after the first one, as pairs (first step of the mode, mode)."""
        return []

    def note_tick(self, worker: int) -> None:
        """Called when `worker` finishes its step; a subclass may measure the time."""

    def note_enter(self, worker: int) -> None:
        """Called when `worker` begins its step; a subclass may measure the time."""

    def slowest(self) -> int:
        """Return how many steps the slowest worker has finished; a huge number if all have left."""
        if False not in self.live:
            return min(self.clocks, default=sys.maxsize)  # takes half of the time
        return min(itertools.compress(self.clocks, self.live), default=sys.maxsize)

    def is_open(self, worker: int) -> bool:
        """Whether `worker` may get the parameters for its present step now."""
        bound = self.consistency.bound
        return bound is None or self.ahead(worker) <= bound

    def ahead(self, worker: int) -> int:
        """Return how many steps `worker` is ahead of the slowest worker that has not left."""
        return self.clocks[worker] - self.slowest()

    def blockers(self, worker: int) -> tuple[list[int], int]:
        """Return the workers that block `worker`, and how many must catch up before it goes on."""
        bound = self.consistency.bound
        lowest = self.clocks[worker] - (sys.maxsize if bound is None else bound)
        clocks = enumerate(self.clocks)
        behind = [other for other, clock in clocks if self.live[other] and clock < lowest]
        return behind, len(behind)

    def push(self, worker: int, item: Any = None, entered: bool = False) -> list[Action]:
        """Record gradients that `worker` sends; return updates that the server may make now."""
        # `item` is the push, for the returned actions.
        clock = self._present(worker, "push")
        if self.pushed[worker] == clock:
            raise refused(worker, f"second push in clock {clock}; call clock() first")
        # `entered`: another server has already answered a pull of the worker in this step.
        if not (entered or self._may_push(worker)):
            raise refused(worker, f"push in clock {clock} before it was let in; pull first")
        self.pushed[worker] = clock
        return self._taken(worker, clock, item)

    def _may_push(self, worker: int) -> bool:
        """Whether a pull of `worker` in its present step was answered, or could be answered now."""
        return self.entered[worker] == self.clocks[worker] or self.is_open(worker)

    def _taken(self, worker: int, clock: int, item: Any) -> list[Action]:
        """Return the update of an allowed push, or nothing if the mode keeps the push for later."""
        if not self.mode_at(clock).holds:
            return [Apply(clock, ((worker, item),))]
        self.held.setdefault(clock, {})[worker] = item
        return []

    def tick(self, worker: int) -> list[Action]:
        """Record that `worker` ends a step; return updates and answers that are possible now."""
        self._present(worker, "clock")
        self.clocks[worker] += 1
        return self._released()

    def pull(self, worker: int, item: Any = None) -> list[Action]:
        """Record that `worker` asks for parameters; return answers that the server may send now."""
        self._present(worker, "pull")
        self.waiting[worker] = item
        return self._answers()

    def leave(self, worker: int) -> list[Action]:
        """Record that `worker` left or died; return updates and answers possible now."""
        self._present(worker, "leave")
        self.live[worker] = False
        return self._released()

    def follow(self, decision: Any) -> list[Action]:
        """Record a decision of the first server; return the actions that this server may do now.

        In some modes, the first server decides for all servers which gradients are used.
        """
        raise ProtocolError(f"{self.consistency}: no server decides for the others: {decision}")

    def _present(self, worker: int, event: str) -> int:
        if not self.live[worker]:
            raise refused(worker, f"{event} after it has left")
        if worker in self.waiting:
            raise refused(worker, f"{event} while its pull waits")
        return self.clocks[worker]

    def _released(self) -> list[Action]:
        actions: list[Action] = []
        due: list[int] = []
        if self.held:
            slowest = self.slowest()
            due = [clock for clock in self.held if clock < slowest]
        for clock in sorted(due) if len(due) > 1 else due:
            held = self.held.pop(clock).items()
            pushes = tuple(held if len(held) == 1 else sorted(held, key=itemgetter(0)))
            if self.mode_at(clock).merges:
                actions.append(Apply(clock, pushes))
            else:
                actions += [Apply(clock, (push,)) for push in pushes]
        return actions + self._answers() if self.waiting else actions

    def _answers(self) -> list[Action]:
        if not self.waiting:
            return []
        free = [worker for worker in self.waiting if self.is_open(worker)]
        return [self._enter(worker, self.waiting.pop(worker)) for worker in free]

    def _enter(self, worker: int, item: Any) -> Answer:
        gap = self.ahead(worker)
        if self.entered[worker] != self.clocks[worker]:
            # A worker may pull twice in one clock, but the histogram counts each clock (step) once.
            self.entered[worker] = self.clocks[worker]
            self.gaps[gap] += 1
        return Answer(worker, gap, item)


def refused(worker: int, why: str) -> ProtocolError:
    """Return the error for an event of `worker` that is not allowed for the reason `why`."""
    return ProtocolError(f"worker {worker}: {why}")


class Simulation(NamedTuple):
    """How long workers wait in a simulated run; the result of `simulate`.

    Attributes
    ----------
    seconds : float
        How many seconds the simulated run takes.
    waited : tuple of float
        The seconds that each worker waited.
    gap : float
        How many steps a worker was ahead of the slowest worker when it began a step, on average.
    """

    seconds: float
    waited: tuple[float, ...]
    gap: float = 0.0


def simulate(
    delays: Sequence[Sequence[float]], consistency: Consistency, *, trip: float = 0.0
) -> Simulation:
    """Compute how long workers wait under `consistency`, from given step times, without MPI.

    The simulated servers take no time.

    Parameters
    ----------
    delays : sequence of sequences
        ``delays[worker][step]`` seconds of work; workers may have different numbers of steps.
    consistency : Consistency
    trip : float
        Seconds from a worker's push to the answer of its next pull, if the pull need not wait for
        other workers.
    """
    now = 0.0
    gate = consistency.gate(len(delays), now=lambda: now)
    done = [0] * len(delays)
    asked = [0.0] * len(delays)
    waited = [0.0] * len(delays)
    finished = [(0.0, worker) for worker in range(len(delays))]  # a heap of (time, worker)
    while finished:
        now, worker = heapq.heappop(finished)
        asked[worker] = now
        actions = [*gate.push(worker), *gate.tick(worker)] if done[worker] else []
        more = done[worker] < len(delays[worker])
        for action in actions + (gate.pull(worker) if more else gate.leave(worker)):
            if isinstance(action, Answer):
                free = action.worker
                waited[free] += now - asked[free]
                heapq.heappush(finished, (now + trip + delays[free][done[free]], free))
                done[free] += 1
    begun = sum(gate.gaps.values()) or 1
    gap = sum(gap * times for gap, times in gate.gaps.items()) / begun
    return Simulation(now, tuple(waited), gap)
