"""What a rank did last, written down when the job hangs: operations, events, stacks.

The thread that writes it must not wait for anything: no MPI, no lock, nothing of the main thread's.
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
    """Return the newest operations on each communicator that mpidist serves here.

    `begun` is the number of the newest one; ranks that stand in the same operation have the same.
    """
    found = []
    for each in list(context.contexts.values()):
        # The main thread may go on in the midst of this, and change what is read.
        with contextlib.suppress(RuntimeError):
            newest, known = each.sequence, [signature.text() for signature in each.history]
            first = newest - len(known) + 1
            numbered = [[first + k, text] for k, text in enumerate(known)]
            found.append(
                {"rank": each.rank, "size": each.size, "begun": newest, "operations": numbered}
            )
    return found


def parameter_servers() -> list[dict]:
    """Return the newest operations between parameter servers and workers here.

    Each with the seconds since it began. ``waiting`` are those that nobody has answered yet; a
    server's ``clocks`` tell which worker it holds their pulls for.
    """
    found = []
    with contextlib.suppress(RuntimeError):  # as above
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
    """Return the stack of each thread of this process, the innermost line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, '?')} {ident}": traceback.format_stack(frame)
        for ident, frame in sys._current_frames().items()
    }


def write(folder: Path, rank: int, **about) -> Path:
    """Write ``hang-RANK.json`` into `folder`, over an older one. Raises OSError.

    No values of variables and none of the environment: only names, shapes and places.
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
