"""Decide which ranks of a node are evicted, and kill their processes.

A rank that hangs could wake up later and write into files and shared memory that the others use. So
the others first kill its process by SIGKILL, and then go on as after any death. A rank is evicted
for one of three causes, each with a limit in seconds:

    stopped   the process is in state T of /proc (SIGSTOP)                  `EvictionLimits.stopped`
    silent    its threads do not run: a native call holds Python's lock     `EvictionLimits.silent`
    late      it computes while other ranks wait                            `EvictionLimits.late`

If the late ranks outnumber the waiting ranks, the step merely takes long, and no rank is evicted as
late. A rank that saves, loads data, evaluates or measures (`Group.phase`) is evicted only if it is
stopped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from .. import events
from .deadline import EvictionLimits
from .node_board import (
    COMPUTE,
    LATE,
    OUTSIDE,
    RAISED,
    SILENT,
    SLOW,
    STOPPED,
    WAIT,
    Record,
    state_of,
)


class Eviction(NamedTuple):
    """A rank that must be killed.

    `why` is the number of the cause, and `seconds` is how long the cause has lasted.
    """

    rank: int
    why: int
    seconds: float


def whom_to_evict(
    records: Sequence[Record], now: float, limits: EvictionLimits, fresh: float = -inf
) -> tuple[list[Eviction], float]:
    """Return the ranks of this node that must be killed now, and the time of the next check.

    Parameters
    ----------
    records : sequence of Record
        The records of the living ranks of the node (`node_board`).
    now : float
        The current time, in seconds of CLOCK_MONOTONIC.
    limits : EvictionLimits
        After how many seconds a stopped, silent or late rank is evicted.
    fresh : float
        The time since which the calling process has run without being stopped. Earlier times in
        `records` count as this time, so a pause of the whole job evicts nobody.
    """
    late = {
        one.rank: one
        for one in records
        if one.phase == COMPUTE and one.state not in "Tt" and now - one.since > limits.late
    }
    # Ranks wait for each other in chains, so a late rank is measured by the longest wait.
    waits = [one.since for one in records if one.phase == WAIT and one.state not in "Tt"]
    waiting = sum(now - max(since, fresh) > limits.late for since in waits)
    found, again = [], inf
    for one in records:
        causes = {}
        if one.state == "T" and one.phase != OUTSIDE:
            causes[STOPPED] = one.seen or now, limits.stopped
        elif one.state != "t" and one.phase in (COMPUTE, WAIT):
            if one.state != "D":  # SIGKILL does not end a process that waits for a disk
                causes[SILENT] = one.beat, limits.silent
            if one.phase == COMPUTE and waits:
                causes[LATE] = max(one.since, min(waits)), limits.late
        for why, (since, limit) in causes.items():
            waited = now - max(since, fresh)
            if waited <= limit:
                again = min(again, now + limit - waited)
            # If more ranks compute for long than wait, the step takes long, and no rank hangs.
            elif why != LATE or (one.rank in late and waiting >= len(late)):
                found.append(Eviction(one.rank, why, waited))
                break
    return found, again


def update_stop(one: Record, now: float, gap: float) -> Record:
    """Return the record `one` of a process, with the times when it was first and last seen stopped.

    If the last check was more than `gap` seconds ago, the process may have run since then, and
    counts as stopped only since `now`.
    """
    if one.state != "T":
        return one._replace(seen=0.0, last=0.0)
    ran = max(one.beat, one.since)
    seen = one.seen if one.seen and one.seen >= ran and now - one.last <= gap else now
    return one._replace(seen=seen, last=now)


def kill(one: Record) -> bool:
    """Kill the process of rank ``one.rank`` by SIGKILL; return whether it still existed."""
    try:
        process = os.pidfd_open(one.pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):  # an old kernel, or a Python that was built for one
        process = None
    try:
        # The descriptor names one process, so the number cannot pass to another process after this
        # check.
        if state_of(one) == "X":
            return False
        if process is None:
            os.kill(one.pid, signal.SIGKILL)
        else:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    except OSError:
        return False
    finally:
        if process is not None:
            os.close(process)
    return True


def end_itself(line: str, why: str, **facts) -> None:
    """Print `line` if it is not empty, write `why` to the event log, and kill this process."""
    events.emit("evicts_itself", why=why, **facts)
    if line:
        print(f"mpidist: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def cause_in_words(why: int, amount: float) -> str:
    """Return in words why a rank was evicted (killed); the words follow the name of the rank.

    `why` is the number of the cause. `amount` is the seconds that the cause lasted, or for `SLOW`
    how many times slower the rank was.
    """
    seconds = f"{amount:.0f} s" if amount >= 2 else f"{amount:.1f} s"
    return {
        STOPPED: f"was stopped for {seconds}",
        SILENT: f"gave no sign for {seconds}",
        LATE: f"did not come for {seconds}",
        SLOW: f"was {amount:.1f} times slower than the others",
        RAISED: "raised an exception",
    }[why]
