"""`mpidist bench counters`: what counting messages and bytes costs an allreduce.

Counters cannot be switched off, and a call only adds one to the count of what it ran, so there is
no function to leave out either. What counts in one call is timed by itself, over the time of the
call: exact to a thousandth on a noisy machine, but blind to what it does to caches.
"""

from __future__ import annotations

import timeit
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import events
from ..arena import Arena
from ..collectives.allreduce import plan
from ..context import Context, of
from ..events import Counters
from .bench_allreduce import calls_per_round
from .rounds import Candidate, interleave


def measure(comm, nbytes: int, rounds: int, algorithm: str = "auto") -> list[dict]:
    """Return a row for private arrays and one for an arena, float32. Collective over `comm`.

    Returns
    -------
    list of dict
        bytes, form, call_us, counting_us (alone), share (of the call).
    """
    n, context = max(1, nbytes // 4), of(comm)
    rows = []
    with Arena(comm, {"x": ((n,), "f4")}) as arena:
        for form, target, vector in (
            ("plan", (x := np.zeros(n, np.float32)), x),
            ("arena", arena, arena.flat),
        ):
            call = plan(comm, target, algorithm=algorithm)
            repeat = calls_per_round(comm, nbytes, call)
            turns = {"call": Candidate([call], [vector], [vector])}
            call_time = interleave(comm, turns, rounds=rounds, repeat=repeat)["call"].median
            seconds = _counting_alone(context, call)
            made: Any = call.plan  # type: ignore[attr-defined]
            # A short arena is reduced by plans of its vectors.
            if any(getattr(p, "short", None) for p in (made, *getattr(made, "plans", {}).values())):
                seconds += _alone("counters.messages_sent += 1", counters=Counters())
            rows.append(
                {
                    "bytes": n * 4,
                    "form": f"{call.algorithm} {form}",  # type: ignore[attr-defined]
                    "call_us": round(call_time * 1e6, 3),
                    "counting_us": round(seconds * 1e6, 4),
                    "share": round(seconds / call_time, 6),
                }
            )
    return rows


def _counting_alone(context: Context, call: Callable[[], object]) -> float:
    """Seconds of what one call counts and emits. Collective, as the call is."""
    kept, events.recent = events.recent, deque()
    before = sum(context.ran.values())
    call()
    counted, emitted = sum(context.ran.values()) - before, len(events.recent)
    events.recent = kept
    counts = Counters()
    names = {"context": context, "program": SimpleNamespace(counters=counts)}
    seconds = _alone("context.ran[program.counters] += 1", **names)
    del context.ran[counts]
    return counted * seconds + emitted * _alone("emit('x')", emit=events.emit)


def _alone(statement: str, **names) -> float:
    """Seconds of a statement, the least of several runs, without the loop around it. Local."""
    number = 20_000
    timed = min(timeit.repeat(statement, globals=names, number=number, repeat=7))
    empty = min(timeit.repeat("pass", number=number, repeat=7))
    return max(timed - empty, 0.0) / number
