"""`mpidist bench counters`: what counting messages and bytes costs an allreduce.

Counters cannot be switched off, so they are measured in two ways. *Alone*: the statements that
count in one call, timed by themselves, over the time of the call; exact to a thousandth on a noisy
machine, but blind to what they do to caches. *With / without*: the same calls on a context whose
counters take nothing, both in interleaved rounds. (Not with another `Counters.add`: Python compiles
all that uses a class anew when the class changes, which cost more than the counting.) Calls of
short vectors add one to an attribute instead, which can only be timed alone.
"""

from __future__ import annotations

import timeit
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial

import numpy as np

from .. import events
from ..arena import Arena
from ..collectives.allreduce import plan
from ..context import Context, of
from ..events import Counters
from .bench_allreduce import calls_per_round
from .ratios import ratio
from .rounds import Candidate, interleave


def measure(comm, nbytes: int, rounds: int, algorithm: str = "auto") -> list[dict]:
    """Return a row for private arrays and one for an arena, float32. Collective over `comm`.

    Returns
    -------
    list of dict
        bytes, form, call_us, counting_us (alone), share (of the call), and with_without (median of
        the rounds' ratios) with its 95 % interval (low, high), None for short vectors.
    """
    n, context = max(1, nbytes // 4), of(comm)
    silent = partial(_replaced, context, "sent", _Silent())
    rows = []
    with Arena(comm, {"x": ((n,), "f4")}) as arena:
        for form, target, vector in (
            ("plan", (x := np.zeros(n, np.float32)), x),
            ("arena", arena, arena.flat),
        ):
            call = plan(comm, target, algorithm=algorithm)
            pair = {
                "with": Candidate([call], [vector], [vector]),
                "without": Candidate([call], [vector], [vector], around=silent),
            }
            repeat = calls_per_round(comm, nbytes, call)
            times = interleave(comm, pair, rounds=rounds, repeat=repeat)
            seconds = _counting_alone(context, call)
            short = getattr(call.plan, "short", None) is not None  # type: ignore[attr-defined]
            if short:
                seconds += _alone("counters.messages_sent += 1", counters=Counters())
            middle, low, high = ratio(times["with"], times["without"])
            rows.append(
                {
                    "bytes": n * 4,
                    "form": f"{call.algorithm} {form}",  # type: ignore[attr-defined]
                    "call_us": round(times["with"].median * 1e6, 3),
                    "counting_us": round(seconds * 1e6, 4),
                    "share": round(seconds / times["with"].median, 6),
                    "with_without": None if short else round(middle, 4),
                    "low": None if short else round(low, 4),
                    "high": None if short else round(high, 4),
                }
            )
    return rows


class _Silent(Counters):
    """Takes part in everything and counts nothing."""

    def add(self, other: Counters) -> None:
        """Forget `other`."""


class _Recorder(Counters):
    """Remembers what was added."""

    def add(self, other: Counters) -> None:
        """Remember `other`."""
        self.__dict__.setdefault("added", []).append(other)


@contextmanager
def _replaced(owner, name: str, value: object) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _counting_alone(context: Context, call: Callable[[], object]) -> float:
    """Seconds of what one call adds and emits. Collective, as the call is."""
    recorder, emitted = _Recorder(), deque[object]()
    with _replaced(context, "sent", recorder), _replaced(events, "recent", emitted):
        call()
    # Large totals, as a job has them: they are no longer integers that Python keeps ready.
    total = Counters(*[1 << 40] * len(fields(Counters)))
    added = recorder.__dict__.get("added", [])
    seconds = sum(_alone("total.add(one)", total=total, one=one) for one in added)
    return seconds + len(emitted) * _alone("emit('x')", emit=events.emit)


def _alone(statement: str, **names) -> float:
    """Seconds of a statement, the least of several runs, without the loop around it. Local."""
    number = 20_000
    timed = min(timeit.repeat(statement, globals=names, number=number, repeat=7))
    empty = min(timeit.repeat("pass", number=number, repeat=7))
    return max(timed - empty, 0.0) / number
