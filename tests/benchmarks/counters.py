"""Measure how much time an allreduce takes to count its messages and bytes.

    PYTHONPATH=tests mpirun -n 2 python -m benchmarks.counters

Counters cannot be switched off. So the code that counts in one call is timed alone, and its time is
divided by the time of the call. The quotient is exact to a thousandth even on a noisy machine, but
it does not show the effect of counting on the caches.

Plans that send no messages of their own count their runs, and `Context.sequence` adds up these
counts. For such plans, the cost is the time that this takes longer than one count of all
operations.
"""

from __future__ import annotations

import argparse
import os
import timeit
from collections import deque
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpidist import events
from mpidist.bench.allreduce_times import calls_per_round, size_range
from mpidist.bench.interleave import Candidate, interleave
from mpidist.cli.bench.common import head, library, say
from mpidist.collectives.allreduce import plan
from mpidist.events import Runs
from mpidist.launch import start_checks
from mpidist.runtime.agreement.mismatch import Signature
from mpidist.runtime.agreement.statuses import HISTORY
from mpidist.runtime.context import Context
from mpidist.runtime.node_memory.arena import Arena

_ANY = Signature("allreduce", "float32", "(2)")


def measure(comm, nbytes: int, rounds: int, algorithm: str = "auto") -> list[dict]:
    """Return a row for private arrays and one for an arena, float32. Collective over `comm`.

    Returns
    -------
    list of dict
        bytes, form, call_us, counting_us (alone), share (of the call).
    """
    n = max(1, nbytes // 4)
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
            seconds = _counting_alone(call)
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


def _counting_alone(call: Callable[[], object]) -> float:
    """Seconds of what one call counts and emits. Collective, as the call is."""
    kept, events.recent = events.recent, deque()
    call()
    emitted = len(events.recent)
    events.recent = kept
    plans: Any = call.plan  # type: ignore[attr-defined]
    # An arena has one for each vector.
    counted = sum(_counted(each.runs) for each in (plans if isinstance(plans, list) else [plans]))
    emit = _slower(lambda: events.emit("x"), lambda: None) if emitted else 0.0
    return counted + emitted * emit


def _counted(runs: Runs) -> float:
    """Seconds by which an operation begins later because `runs` count it. Local."""
    begun: Any = SimpleNamespace(stopped=False, begun=0, history=deque(maxlen=HISTORY))
    if runs.reader is None:
        copy = Runs(runs.counters, numbers=runs.numbers)
        return _slower(lambda: Context.begin(begun, _ANY, copy), lambda: Context.begin(begun, _ANY))
    calls = 0

    def by_plan():
        nonlocal calls
        calls += 1

    def by_context():
        begun.begun += 1

    return _slower(by_plan, by_context)


def _slower(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Seconds by which `one` is slower than `other`: median of turns, at least 0."""
    more = []
    for _ in range(41):
        seconds = [timeit.timeit(run, number=1_000) for run in (one, other)]
        more.append((seconds[0] - seconds[1]) / 1_000)
    return max(median(more), 0.0)


def main(words: list[str] | None = None) -> list[dict]:
    """Measure and print. Collective over the launch."""
    parser = argparse.ArgumentParser("benchmarks.counters", description=__doc__)
    parser.add_argument("--min", type=int, default=8, dest="low", help="smallest size in bytes (8)")
    parser.add_argument("--max", type=int, default=16 << 20, dest="high", help="largest (16 MiB)")
    parser.add_argument("--step", type=int, default=8, help="each size so many times the last (8)")
    parser.add_argument("--rounds", type=int, default=41, help="interleaved rounds (41)")
    args = parser.parse_args(words)
    if args.low < 1 or args.step < 2:
        parser.error(f"--min {args.low} --step {args.step}: expected at least 1 and 2")
    comm = start_checks.initialize(os.environ).COMM_WORLD
    columns = ("Size", "call(us)", "counting", "share(%)")
    title = f"counters, {comm.size} ranks, {args.rounds} rounds, {library()}"
    head(comm, title, columns, width=13, last="form")
    rows = []
    for size in size_range(args.low, args.high, args.step):
        for row in measure(comm, size, args.rounds):
            rows.append(row)
            say(
                comm,
                f"{row['bytes']:>13}{row['call_us']:>13.2f}{row['counting_us']:>13.3f}"
                f"{100 * row['share']:>13.3f}  {row['form']}",
            )
    return rows


if __name__ == "__main__":
    main()
