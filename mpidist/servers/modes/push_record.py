"""A server's records about the pushes of each worker: ages, dropped pushes, pulled parameters."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ... import events
from ..layout.routing import ShardPart
from ..shards import Parts, ServerShard
from .stale_gradients import Stale

#: If this many pushes of a worker in a row were dropped, a warning is printed, once.
DROPPED_IN_A_ROW = 20


class PushRecord:
    """Counts, for one model on one server, what happened to the pushes of each worker.

    Attributes
    ----------
    newest : list of int
        The age (staleness) of each worker's newest applied push; -1 before its first push.
    staleness : Counter
        For each age, how many pushes had this age.
    applied, dropped : list of int
        How many pushes of each worker were applied, and how many were dropped.
    weight : list of float
        For each worker, the sum over its applied pushes of the factors by which a policy for stale
        gradients has multiplied their weights.
    """

    def __init__(self, model: str, workers: int, server: int = 0):
        self.model = model
        self._warns = [server == 0] * workers
        self.newest = [-1] * workers
        self.staleness: Counter[int] = Counter()
        self.applied, self.dropped = [0] * workers, [0] * workers
        self.weight = [0.0] * workers
        self._in_a_row = [0] * workers

    def note(self, worker: int, age: int, factor: float = 1.0) -> None:
        """Count a push of `worker` that was applied.

        `age` is its staleness: how many updates the server made between the worker's pull and this
        push. `factor` is the number by which a policy for stale gradients has multiplied its
        weight.
        """
        self.newest[worker] = age
        self.staleness[age] += 1
        self.applied[worker] += 1
        self.weight[worker] += factor
        self._in_a_row[worker] = 0

    def drop(self, worker: int, rank: int, why: str) -> None:
        """Count a dropped push of `worker`; warn once if many consecutive pushes were dropped.

        `rank` and `why` are the worker's rank and the reason, for the warning.
        """
        self.dropped[worker] += 1
        self._in_a_row[worker] += 1
        if not self._warns[worker] or self._in_a_row[worker] < DROPPED_IN_A_ROW:
            return
        self._warns[worker] = False
        events.emit("pushes_dropped", model=self.model, rank=rank, pushes=DROPPED_IN_A_ROW)
        if events.VERBOSITY:
            print(
                f"mpidist: model {self.model!r}: the last {DROPPED_IN_A_ROW} pushes of rank {rank} "
                f"were all dropped ({why}), so its work is lost; give it fewer samples, or "
                "another policy or mode",
                file=sys.stderr,
                flush=True,
            )

    def facts(self) -> dict:
        """Return a dict of these counts, for `ServerGroup.report`."""
        return {
            "staleness": dict(self.staleness),
            "applied": list(self.applied),
            "dropped": list(self.dropped),
            "weights": [
                total / times if times else 0.0
                for total, times in zip(self.weight, self.applied, strict=True)
            ],
        }


class PulledCopies:
    """Copies of the parameters that each worker has pulled from one server, for `DelayCompensated`.

    This policy corrects an old gradient by how far the parameters have moved since its worker's
    pull.

    Parameters
    ----------
    shard : ServerShard
        The server's part of the model.
    workers : int
        The number of workers.

    Attributes
    ----------
    kept : list of dict
        For each worker, a dict from the name of each array in `shard` to the values that the worker
        has pulled.
    """

    def __init__(self, shard: ServerShard, workers: int):
        self._shard = shard
        self.kept: list[dict[str, np.ndarray]] = [{} for _ in range(workers)]

    def keep(self, worker: int, parts: Sequence[ShardPart]) -> None:
        """Copy the parameters, listed in `parts`, that `worker` pulls now."""
        shard, copies = self._shard, self.kept[worker]
        for part in parts:
            key = shard.key(part)
            if part.rows is None or key not in copies:
                copies[key] = shard.parameters[key].copy()
            else:
                shard.rows_of(part, copies)[part.local_rows(shard.layout)] = shard.values(part)

    def correct(self, worker: int, parts: Parts, policy: Stale) -> None:
        """Correct a push's gradients in place by `policy`, if `worker` has pulled before.

        `parts` are the gradients of the push.
        """
        copies = self.kept[worker]
        for part, gradient in parts:
            if self._shard.key(part) in copies:
                now, before = (self._shard.values(part, of) for of in (None, copies))
                gradient[...] = policy.compensated(gradient, now.ravel(), before.ravel())
