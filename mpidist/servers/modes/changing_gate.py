"""Decide when pushes are applied and pulls are answered if a model's mode changes in training.

    clock      0   1   2   3   4   5   6
    mode       SSP(3)....  BSP...........      all workers set BSP in clock 2

A clock is a step of a worker. All workers set a new mode in the same clock c, and the new mode
begins with clock c + 1. Each worker sends the new mode to the server before it finishes clock c, so
the server knows the mode of each clock before the first worker comes to this clock. No push is lost
or applied twice. If the old mode is BSP or SSP(0), a worker begins clock c + 1 only when the pushes
of all workers in clock c are applied.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from ..consistency import Action, Answer, Consistency, ConsistencyGate


# If the pushes of clock c are held (BSP, SSP(0)), the pulls of clock c + 1 wait for them in any
# mode. Otherwise a worker could get parameters that lack its own push.
class ChangingGate(ConsistencyGate):
    """Decides when gradients are applied and pulls are answered, for a model whose mode changes.

    A consistency mode, such as BSP, says for whom a worker waits. At the first change of the mode,
    a `ChangingGate` replaces `gate`, the `ConsistencyGate` of the first mode. It takes over the
    number of finished steps of each worker, the pushes that are not applied yet, and the pulls that
    are not answered yet.
    """

    def __init__(
        self, gate: ConsistencyGate, server: int = 0, now: Callable[[], float] = time.monotonic
    ):
        super().__init__(gate.consistency, 0)
        self._server, self._now = server, now
        self._starts, self._gates = [0], [gate]
        self._share(gate, self)

    def change(self, consistency: Consistency, clock: int) -> None:
        """Use the mode `consistency` for step number `clock` and later steps.

        Each call must name a later step than the call before.
        """
        gate = consistency.gate(len(self.clocks), self._server, self._now)
        self._share(self, gate)
        self._starts.append(clock)
        self._gates.append(gate)
        self.consistency = consistency

    @staticmethod
    def _share(source: ConsistencyGate, target: ConsistencyGate) -> None:
        """Let two gates have the same clocks (numbers of finished steps), pushes and pulls."""
        for name in ("clocks", "live", "pushed", "entered", "held", "waiting", "gaps"):
            setattr(target, name, getattr(source, name))

    def _gate(self, clock: int) -> ConsistencyGate:
        """Return the gate with the rules of the step number `clock`."""
        return self._gates[bisect_right(self._starts, clock) - 1]

    def mode_at(self, clock: int) -> Consistency:
        """Return the consistency mode of the step `clock`."""
        return self._gate(clock).consistency

    def changes(self) -> list[tuple[int, Consistency]]:
        """Return the modes after the first one, as pairs (first step of the mode, mode)."""
        modes = (gate.consistency for gate in self._gates)
        return list(zip(self._starts, modes, strict=True))[1:]

    def is_open(self, worker: int) -> bool:
        """Whether `worker` may get the parameters for its present step now."""
        return not self._has_held(worker) and self._gate(self.clocks[worker]).is_open(worker)

    def _has_held(self, worker: int) -> bool:
        """Whether pushes of the previous clock, which `worker` must get, are not applied yet."""
        clock = self.clocks[worker]
        return clock > 0 and self.mode_at(clock - 1).holds and self.ahead(worker) > 0

    def blockers(self, worker: int) -> tuple[list[int], int]:
        """Return the workers that block `worker`, and how many must catch up before it goes on."""
        if not self._has_held(worker):
            return self._gate(self.clocks[worker]).blockers(worker)
        clocks = enumerate(self.clocks)
        behind = [w for w, clock in clocks if self.live[w] and clock < self.clocks[worker]]
        return behind, len(behind)

    def tick(self, worker: int) -> list[Action]:
        """Record that `worker` has ended its step; return the actions that are possible now.

        An action makes an update (`Apply`), or sends a worker the parameters for which it waits
        (`Answer`).
        """
        self._gate(self.clocks[worker]).note_tick(worker)
        return super().tick(worker)

    def _enter(self, worker: int, item: Any) -> Answer:
        self._gate(self.clocks[worker]).note_enter(worker)
        return super()._enter(worker, item)
