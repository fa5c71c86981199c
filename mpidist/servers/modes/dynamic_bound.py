"""DSSP: bounded staleness with a bound that follows the speed of the workers. Uses no MPI.

DSSP lets a worker go up to `high` steps ahead if this saves waiting time, and otherwise up to `low`
steps:

    low = 1, high = 3     a worker pauses once       others may be up to 3 steps ahead
                          a worker is always slow    others may be up to 1 step ahead, and so
                                                     compute with newer parameters

If a worker is more than `low` and at most `high` steps ahead, a rule decides:

median   A work time is the time from the answer of a pull to the end of the worker's step. The
         server computes the median and the mean of the last 31 work times of each worker. The
         worker may go on if the median of the slowest worker is at most twice its own median. It
         may also go on if the mean of the slowest worker is at most twice its own mean. A worker
         with fewer than 16 work times does not count as slow.
paper    The rule of Zhao et al.: when the fastest worker wants to be more than `low` steps ahead,
         the server predicts when this worker and the slowest worker will push next. It uses the
         times of the two newest pushes of each worker. Then it lets the fastest worker make up to
         ``high - low`` further steps. Their number is chosen so that, after them, the fastest
         worker pushes as close as possible to a push of the slowest worker.

With several servers, only the first server uses the rule, and the other servers use the bound
`high`.

Zhao, An, Liu, Chen, "Dynamic stale synchronous parallel distributed training for deep learning",
ICDCS 2019, arXiv 1908.11848.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ConfigError
from ...registry import checked_whole, look_up
from ..consistency import Action, Answer, Consistency, ConsistencyGate

# The mean counts besides the median, because on busy hosts some steps take 1 ms and others 20 ms,
# so that the median is 1 or 20 ms by chance.
_TIMES, _ALIKE = 31, 2.0


@dataclass(frozen=True)
class DSSP(Consistency):
    """Dynamic stale-synchronous: SSP whose bound (`low` to `high`) follows the workers' speeds.

    If all workers are usually about equally fast, a worker may be up to `high` steps ahead of the
    slowest worker. If the slowest worker is always clearly slower, the other workers may be up to
    `low` steps ahead of it. So short pauses of a worker do not delay the other workers, and a
    worker that is always slow does not make the other workers compute with old parameters. With
    ``low == high`` this is SSP.

    Zhao et al., "Dynamic stale synchronous parallel distributed training for deep learning", ICDCS
    2019, arXiv 1908.11848.

    Parameters
    ----------
    low, high : int
        `low` is the bound if the slowest worker is always slow, and `high` is the largest bound.
    rule : "median" or "paper"
        How the server chooses the bound: from how long each worker has worked on its last 31 steps
        ("median"), or from the times of its two newest pushes, as in the paper ("paper").

    Raises
    ------
    ConfigError
        `low` or `high` is negative or not a whole number, `low` is above `high`, or the rule is
        unknown.
    """

    low: int = 2
    high: int = 8
    rule: str = "median"

    asks_all = True

    def __post_init__(self):
        for name in ("low", "high"):
            whole = checked_whole(f"DSSP: {name}", getattr(self, name), 0)
            object.__setattr__(self, name, whole)  # the dataclass is frozen
        if self.low > self.high:
            raise ConfigError(f"DSSP: low={self.low} is above high={self.high}; give low <= high")
        look_up(RULES, self.rule, "rule of DSSP")
        object.__setattr__(self, "bound", self.high)
        object.__setattr__(self, "holds", self.high == 0)

    def gate(
        self, workers: int, server: int = 0, now: Callable[[], float] = time.monotonic
    ) -> ConsistencyGate:
        """Return the gate of server number `server`, an object that decides when workers may go on.

        ``now()`` returns the time in seconds.
        """
        # Only server 0 changes the bound; the other servers use SSP with the constant bound `high`.
        return ConsistencyGate(self, workers) if server else DynamicGate(self, workers, now)


class Rule(Protocol):
    """A rule of the mode `DSSP`: decides whether a worker that is far ahead may go on.

    The rule decides for a worker that is more than `low` and at most `high` steps ahead of the
    slowest worker.
    """

    def may_pass(self, gate: DynamicGate, worker: int) -> bool:
        """Return whether `worker`, which waits for parameters, may begin its next step now."""


class DynamicGate(ConsistencyGate):
    """Decides on the first server in the mode `DSSP` when workers may go on.

    It measures how long each worker works on a step. The rule of the mode uses these times to
    decide how far a worker may be ahead of the slowest worker.
    """

    # One server is enough: a worker begins a step only when all servers have answered its pull.
    def __init__(self, consistency: DSSP, workers: int, now: Callable[[], float]):
        super().__init__(consistency, workers)
        self.low, self.high = consistency.low, consistency.high
        # The last work times of each worker in seconds, from the answer of its pull to the end of
        # its step.
        self.work: list[deque[float]] = [deque(maxlen=_TIMES) for _ in range(workers)]
        # When the two newest steps of each worker were finished.
        self.ticks: list[deque[float]] = [deque(maxlen=2) for _ in range(workers)]
        self._rule: Rule = RULES[consistency.rule](workers)
        self._now = now
        self._began: list[float | None] = [None] * workers

    def is_open(self, worker: int) -> bool:
        """Whether `worker` may get the parameters for its present step now."""
        ahead = self.ahead(worker)
        if ahead <= self.low or self.entered[worker] == self.clocks[worker]:
            return True
        return ahead <= self.high and self._rule.may_pass(self, worker)

    def blockers(self, worker: int) -> tuple[list[int], int]:
        """Return the slowest workers, and 1: `worker` waits until one of them catches up."""
        # The rule looks only at the slowest workers.
        return self.last(), 1

    def tick(self, worker: int) -> list[Action]:
        """Record that `worker` has ended its step; return the actions that are possible now.

        An action makes an update (`Apply`), or sends a worker the parameters for which it waits
        (`Answer`). The time that the worker has worked on the step is recorded, too.
        """
        self.note_tick(worker)
        return super().tick(worker)

    def note_tick(self, worker: int) -> None:
        """Record how long `worker` has worked on the step that it finishes now."""
        now, began = self._now(), self._began[worker]
        if worker not in self.waiting and began is not None:
            self.work[worker].append(now - began)
        self._began[worker] = None
        self.ticks[worker].append(now)

    def _enter(self, worker: int, item: Any) -> Answer:
        self.note_enter(worker)
        return super()._enter(worker, item)

    def note_enter(self, worker: int) -> None:
        """Record the time at which `worker` begins its step."""
        if self.entered[worker] != self.clocks[worker]:
            self._began[worker] = self._now()

    def last(self) -> list[int]:
        """Return the workers that have finished the fewest steps, of those that have not left."""
        slowest = self.slowest()
        live = itertools.compress(range(len(self.clocks)), self.live)
        return [worker for worker in live if self.clocks[worker] == slowest]


class MedianRule:
    """The rule "median" of `DSSP`: compares a worker's usual step time with the slowest worker's.

    A worker that is more than `low` steps ahead goes on if the slowest worker usually needs at most
    twice as long for a step.
    """

    def __init__(self, workers: int):
        pass

    def may_pass(self, gate: DynamicGate, worker: int) -> bool:
        """Whether the slowest worker's usual work time is at most twice that of `worker`.

        The usual work time is the median or the mean of the times that the worker needed for its
        last steps.
        """
        import statistics  # not at the top: it imports decimals and fractions

        mine = gate.work[worker] or (0.0,)
        # A slowest worker that has done only a few steps counts as fast enough.
        known = [gate.work[other] for other in gate.last() if len(gate.work[other]) > _TIMES // 2]
        return all(
            statistics.median(others) <= _ALIKE * statistics.median(mine)
            or statistics.fmean(others) <= _ALIKE * statistics.fmean(mine)
            for others in known
        )


class PaperRule:
    """The rule "paper" of `DSSP`: the fastest worker may go beyond the bound `low` for some steps.

    The rule, by Zhao et al., predicts how many steps are best, from the times of the newest pushes.
    """

    def __init__(self, workers: int):
        self.granted = [0] * workers
        self._refused = [-1] * workers  # the clock in which a worker was refused

    def may_pass(self, gate: DynamicGate, worker: int) -> bool:
        """Whether `worker` may go on, though it is more than `low` steps ahead of the slowest.

        If `worker` is the fastest worker, the rule chooses a number of steps beyond `low` for it.
        Each call that returns true uses up one of these steps.
        """
        clock = gate.clocks[worker]
        if self._refused[worker] == clock:
            return False  # the worker waits until it is at most `low` steps ahead
        live = itertools.compress(gate.clocks, gate.live)
        if not self.granted[worker] and clock == max(live):
            self.granted[worker] = self._steps(gate, worker)
        if not self.granted[worker]:
            self._refused[worker] = clock
            return False
        self.granted[worker] -= 1
        return True

    @staticmethod
    def _steps(gate: DynamicGate, worker: int) -> int:
        """Return after how many more steps `worker` will wait least for the slowest worker."""
        mine, others = gate.ticks[worker], gate.ticks[gate.last()[0]]
        if len(mine) < 2 or len(others) < 2:
            return 0
        most = gate.high - gate.low
        pushes = [mine[1] + steps * (mine[1] - mine[0]) for steps in range(most + 1)]
        arrivals = [others[1] + steps * (others[1] - others[0]) for steps in range(1, most + 2)]
        nearest = [min(abs(push - arrival) for arrival in arrivals) for push in pushes]
        return nearest.index(min(nearest))


#: How DSSP chooses between its two bounds. A new rule is a class with `Rule.may_pass`.
RULES: dict[str, Callable[[int], Rule]] = {"median": MedianRule, "paper": PaperRule}
