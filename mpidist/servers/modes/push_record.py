"""What a server records about each worker: its pushes, and copies of the parameters that it got.

The age of a push is the number of updates between the worker's pull and its push. The server counts
pushes of each age, and dropped pushes.
"""

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
    """Counts, for one model on one server, what happened to the gradients of each worker."""

    def __init__(self, model: str, workers: int, server: int = 0):
        self.model = model
        self._warns = [server == 0] * workers
        # The age of each worker's newest applied push: the updates between its pull and its push.
        self.newest = [-1] * workers
        # For each age, how many pushes had this age.
        self.staleness: Counter[int] = Counter()
        self.applied, self.dropped = [0] * workers, [0] * workers
        # For each worker, the sum of the factors that a policy for stale gradients gave its pushes.
        self.weight = [0.0] * workers
        self._in_a_row = [0] * workers

    def note(self, worker: int, age: int, factor: float = 1.0) -> None:
        """Count gradients of `worker` that were applied, and that were `age` updates old."""
        self.newest[worker] = age
        self.staleness[age] += 1
        self.applied[worker] += 1
        # By which a policy for stale gradients has multiplied the weight.
        self.weight[worker] += factor
        self._in_a_row[worker] = 0

    def drop(self, worker: int, rank: int, why: str) -> None:
        """Count dropped gradients of `worker`; warn once if many in a row were dropped."""
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
        """Return the counts, ages and weights of the pushes, for `ServerGroup.report`."""
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
    """Copies of the parameters that each worker has got from one server, for `DelayCompensated`."""

    def __init__(self, shard: ServerShard, workers: int):
        self._shard = shard
        self.kept: list[dict[str, np.ndarray]] = [{} for _ in range(workers)]

    def keep(self, worker: int, parts: Sequence[ShardPart]) -> None:
        """Copy the parameters, listed in `parts`, that `worker` gets now."""
        shard, copies = self._shard, self.kept[worker]
        for part in parts:
            key = shard.key(part)
            if part.rows is None or key not in copies:
                copies[key] = shard.parameters[key].copy()
            else:
                shard.rows_of(part, copies)[part.local_rows(shard.layout)] = shard.values(part)

    def correct(self, worker: int, parts: Parts, policy: Stale) -> None:
        """Change gradients of `worker` in place, as the policy for stale gradients wants it.

        `policy` compares the present parameters with those that the worker got last. Gradients of
        parameters that the worker has not got yet do not change.
        """
        copies = self.kept[worker]
        for part, gradient in parts:
            if self._shard.key(part) in copies:
                now, before = (self._shard.values(part, of) for of in (None, copies))
                gradient[...] = policy.compensated(gradient, now.ravel(), before.ravel())
