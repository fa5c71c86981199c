"""Timelines of pipelines in Chrome's trace format, for chrome://tracing and Perfetto.

Each computation is an event with a duration (``X``); the thread number of an event is the rank.
Times are in microseconds since the first event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError
from .pipeline_schedules import B, F, I, W

#: kind of computation -> its name in the trace.
LABELS = {F: "forward", B: "backward", I: "gradient of the input", W: "gradients of the weights"}
#: The name of the event in the log of a rank that lists the computations of the rank's newest step.
EVENT = "pipeline_step"


def chrome_trace(spans: Iterable[tuple[int, str, int, int, float, float]]) -> dict:
    """Return a timeline of computations as a dict in Chrome's trace format, for `write_trace`.

    Each entry of `spans` is a computation (rank, kind, chunk, microbatch, begin, end). The kind is
    a letter such as F for a forward pass (`pipeline_schedules`), a chunk is a group of consecutive
    layers, and times are in seconds.
    """
    spans = list(spans)
    zero = min((begin for *_, begin, _ in spans), default=0.0)
    ranks = sorted({rank for rank, *_ in spans})
    named = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in ranks
    ]
    events = [
        {
            "name": f"{kind}{i}", "cat": LABELS[kind], "ph": "X", "pid": 0, "tid": rank,
            "ts": round((begin - zero) * 1e6, 3), "dur": round((end - begin) * 1e6, 3),
            "args": {"chunk": chunk, "microbatch": i},
        }
        for rank, kind, chunk, i, begin, end in spans
    ]  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": [*named, *events]}


def logged_spans(folder: Path) -> list[tuple[int, str, int, int, float, float]]:
    """Read the event logs of a run; return the computations of its newest step."""
    found = []
    for file in sorted(folder.glob("events/rank-*.jsonl")):
        newest = None
        for line in file.read_text(encoding="utf-8").splitlines():
            if f'"{EVENT}"' in line:
                try:
                    newest = json.loads(line)
                except json.JSONDecodeError:
                    continue  # a process was killed while it wrote this line
        if newest is not None:
            found += [(newest["rank"], *one) for one in newest["spans"]]
    if not found:
        raise ConfigError(
            f"{folder}: no steps of a pipeline in events/rank-*.jsonl; give the folder of a "
            'finished run of `mpidist train` with strategy.name = "pipeline"'
        )
    return found


def write_trace(trace: dict, file: str | Path) -> None:
    """Write a trace to a file as JSON; raise ConfigError if the file cannot be written."""
    try:
        Path(file).write_text(json.dumps(trace) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
