"""How long each worker's steps took, and which fraction of this time was communication.

    step    | data | gradients          | exchange of gradients   |
              ----- computation ------    ---- communication -----

Communication is the time from the end of a worker's computation to the end of the step. It does not
include messages that are sent while gradients are still computed.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence

from .. import events

#: The upper ends of the bins of a histogram, in milliseconds. The last bin has no upper end.
EDGES_MS = tuple(unit * 10.0**power for power in range(-1, 6) for unit in (1, 2, 5))

#: A warning is printed if communication takes a larger share of the time of the steps than this, in
#: a run of at least this many steps and seconds.
SHARE_BOUND, LEAST_STEPS, LEAST_SECONDS = 0.5, 20, 10.0


class StepTimes:
    """Collects how long each step of this worker computed and communicated."""

    def __init__(self) -> None:
        self.steps, self.compute, self.data, self.exchange = 0, 0.0, 0.0, 0.0
        self._counts = [0] * (len(EDGES_MS) + 1)

    def note(self, data: float, compute: float, exchange: float) -> None:
        """Record the seconds of one step: waiting for data, computation, and communication."""
        self.steps += 1
        self.data += data
        self.compute += compute
        self.exchange += exchange
        self._counts[bisect_left(EDGES_MS, 1e3 * (data + compute + exchange))] += 1

    def facts(self, rank: int) -> dict:
        """Return a dict with the times of this worker (rank `rank`), for `summarize_steps`."""
        return {
            "rank": rank,
            "steps": self.steps,
            "data_seconds": round(self.data, 6),
            "compute_seconds": round(self.compute, 6),
            "exchange_seconds": round(self.exchange, 6),
            "share": _share([self.data + self.compute], [self.exchange]),
            "counts": list(self._counts),
        }


def summarize_steps(workers: Sequence[dict]) -> dict:
    """Return a dict for the summary of a run: how much of the step times was communication.

    In the result, ``edges_ms`` lists the upper ends of the bins of a histogram in milliseconds, and
    the dict of each worker has ``counts``: how many of its steps were in each bin. The last number
    of ``counts`` is for steps longer than the last of these upper ends.
    """
    used = [any(each["counts"][bin] for each in workers) for bin in range(len(EDGES_MS) + 1)]
    first = used.index(True) if any(used) else 0
    last = len(used) - used[::-1].index(True) if any(used) else 0
    edges = [float(f"{edge:.6g}") for edge in EDGES_MS[first:last]]
    busy = [each["data_seconds"] + each["compute_seconds"] for each in workers]
    return {
        "share": _share(busy, [each["exchange_seconds"] for each in workers]),
        "edges_ms": edges,
        "workers": [
            {**each, "counts": each["counts"][first : first + len(edges) + 1]} for each in workers
        ],
    }


def warn_of_share(times: dict, seconds: float) -> str:
    """Print and return a warning if too much of the steps' time was communication; "" if not."""
    steps = max((each["steps"] for each in times["workers"]), default=0)
    if times["share"] <= SHARE_BOUND or steps < LEAST_STEPS or seconds < LEAST_SECONDS:
        return ""
    text = (
        f"sending and waiting for other ranks took {times['share']:.2f} of the time of the steps, "
        f"more than {SHARE_BOUND:g}: a larger global batch or fewer ranks may be faster; "
        "`mpidist advise servers JOB.toml` compares allreduce with servers"
    )
    events.emit("communication_share", share=times["share"], bound=SHARE_BOUND)
    if events.VERBOSITY:
        print(f"mpidist: {text}", file=sys.stderr, flush=True)
    return text


def _share(busy: Sequence[float], exchange: Sequence[float]) -> float:
    total = sum(busy) + sum(exchange)
    return round(sum(exchange) / total, 4) if total else 0.0
