"""Decide when pushes are applied and pulls answered, if a model's mode changes in training.

    clock      0   1   2   3   4   5   6
    mode       SSP(3)......    BSP.......      all workers set BSP in clock 2
    waits          of SSP(3)   of BSP

A gate is a state machine that decides for one model on one server when pushes are applied and pulls
answered. A gate uses no MPI. A clock is a step of a worker, and a tick is the message that ends it.

Each clock has one mode for all workers. The mode decides when the pulls of the clock are answered,
and when its pushes are applied. All workers set a new mode in the same clock c, and the new mode
begins with clock c + 1. Each worker sends the new mode to the server before its tick of clock c. So
the gate knows the mode of each clock before the first worker comes to this clock, and no worker
waits for an agreement.

If the pushes of clock c are held, because the mode of clock c is BSP or SSP(0), the pulls of clock
c + 1 also wait until these pushes are applied, even if the new mode would not wait. Otherwise a
worker could get parameters that lack its own push. So all workers begin the first clock after BSP
with the same parameters.

A change of the mode does not affect waiting pushes and pulls: no push is lost or applied twice. In
every order of events, no worker is further ahead of the slowest worker than the mode of its clock
allows; the tests check this.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from ..consistency import Action, Answer, Consistency, ConsistencyGate


class ChangingGate(ConsistencyGate):
    """Decides when pushes are applied and pulls answered, if a model's consistency mode changes.

    A model begins with the `ConsistencyGate` of its first mode. At the first change, a
    `ChangingGate` takes the place of that gate.

    Parameters
    ----------
    gate : ConsistencyGate
        The gate of the mode so far. The `ChangingGate` takes over its clocks, pushes and pulls.
    server : int
        The number of the server.
    now : callable
        ``now()`` returns the time in seconds.
    """

    def __init__(
        self, gate: ConsistencyGate, server: int = 0, now: Callable[[], float] = time.monotonic
    ):
        super().__init__(gate.consistency, 0)
        self._server, self._now = server, now
        self._starts, self._gates = [0], [gate]
        self._share(gate, self)

    def change(self, consistency: Consistency, clock: int) -> None:
        """Use the mode `consistency` from `clock` (step) on.

        Calls must be in the order of their clocks.
        """
        gate = consistency.gate(len(self.clocks), self._server, self._now)
        self._share(self, gate)
        self._starts.append(clock)
        self._gates.append(gate)
        self.consistency = consistency

    @staticmethod
    def _share(source: ConsistencyGate, target: ConsistencyGate) -> None:
        """Let two gates have the same clocks, pushes and pulls."""
        for name in ("clocks", "live", "pushed", "entered", "held", "waiting", "gaps"):
            setattr(target, name, getattr(source, name))

    def _gate(self, clock: int) -> ConsistencyGate:
        """Return the gate with the rules of a clock."""
        return self._gates[bisect_right(self._starts, clock) - 1]

    def mode_at(self, clock: int) -> Consistency:
        """Return the consistency mode of a clock (step)."""
        return self._gate(clock).consistency

    def changes(self) -> list[tuple[int, Consistency]]:
        """Return the modes after the first one, as pairs (first clock of the mode, mode)."""
        modes = (gate.consistency for gate in self._gates)
        return list(zip(self._starts, modes, strict=True))[1:]

    def is_open(self, worker: int) -> bool:
        """Whether a pull of `worker` in its present step is answered now."""
        return not self._has_held(worker) and self._gate(self.clocks[worker]).is_open(worker)

    def _has_held(self, worker: int) -> bool:
        """Whether pushes of the previous clock, which `worker` must get, are not applied yet."""
        clock = self.clocks[worker]
        return clock > 0 and self.mode_at(clock - 1).holds and self.ahead(worker) > 0

    def blockers(self, worker: int) -> tuple[list[int], int]:
        """Return (workers for which the pull of `worker` waits, number of them that must go on).

        The pull can be answered only after this number of these workers have each sent another
        message.
        """
        if not self._has_held(worker):
            return self._gate(self.clocks[worker]).blockers(worker)
        clocks = enumerate(self.clocks)
        behind = [w for w, clock in clocks if self.live[w] and clock < self.clocks[worker]]
        return behind, len(behind)

    def tick(self, worker: int) -> list[Action]:
        """Record that `worker` has finished its present step."""
        self._gate(self.clocks[worker]).note_tick(worker)
        return super().tick(worker)

    def _enter(self, worker: int, item: Any) -> Answer:
        self._gate(self.clocks[worker]).note_enter(worker)
        return super()._enter(worker, item)
