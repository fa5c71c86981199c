"""The dump that each rank writes when the job hangs: last operations, events, and stacks.

A thread writes it, which must not wait and so uses no MPI and no locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from .. import events
from ..runtime import context


def operations() -> list[dict]:
    """Return the newest operations of this process on each of its communicators."""
    found = []
    for each in list(context.contexts.values()):
        # The main thread may still run, and change the data while this thread reads them.
        with contextlib.suppress(RuntimeError):
            newest, known = each.sequence, [signature.text() for signature in each.history]
            numbered = [[k, text] for k, text in enumerate(known, newest - len(known) + 1)]
            found.append(
                {"rank": each.rank, "size": each.size, "begun": newest, "operations": numbered}
            )
    return found


def parameter_servers() -> list[dict]:
    """Return this process's newest operations between parameter servers and workers.

    ``waiting`` lists the operations that have no answer yet. On a server, ``clocks`` has the number
    of steps that each worker has finished.
    """
    found = []
    with contextlib.suppress(RuntimeError):  # the main thread may change the data
        for trail in list(events.trails):
            now, known = time.monotonic(), trail.operations()
            operations = [[round(now - each.began, 6), each.text()] for each in known]
            waiting = [_waiting(each, now) for each in known if each.open]
            about = {} if trail.about is None else trail.about()
            facts = {"rank": trail.rank, "size": trail.size, **about, "waiting": waiting}
            found.append({**facts, "operations": operations})
    return found


def _waiting(each: events.Operation, now: float) -> dict:
    facts = {"operation": each.kind, "model": each.model, "clock": each.clock, "peer": each.peer}
    return {**facts, "seconds": round(now - each.began, 3)}


def stacks() -> dict[str, list[str]]:
    """Return the stack of each thread of this process, with the innermost line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')} {ident}": traceback.format_stack(frame)
        for ident, frame in sys._current_frames().items()
    }


def write(folder: Path, rank: int, **about) -> Path:
    """Write ``hang-RANK.json`` into `folder`, and replace an older file. Raises OSError.

    The file has no values of variables and no environment variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "rank": rank,
        "pid": os.getpid(),
        **about,
        "communicators": operations(),
        "parameter_servers": parameter_servers(),
        "events": [[time, kind, details] for time, kind, details in events.recent],
        "stacks": stacks(),
    }
    path = folder / f"hang-{rank}.json"
    partial = path.with_suffix(".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
        json.dump(facts, file, default=str, indent=1)
    return partial.replace(path)
