"""What happened, how often and how long: counters, spans and a JSON-lines event log.

Everything here is local to a process and free of MPI. An operation only counts that it ran (a plan
knows its messages and bytes beforehand), so counting costs nothing per message.
The newest events stay in memory, so that a hang report can say where this rank stands.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from .errors import ConfigError

_PACKAGE = str(Path(__file__).parent) + os.sep


def is_ours(filename: str) -> bool:
    """Whether code of this file is mpidist's, and not of a program beside it."""
    return filename.startswith(_PACKAGE)


def verbosity(environ: Mapping[str, str] = os.environ) -> int:
    """Return what ``MPIDIST_VERBOSE`` says in `environ`.

    Raises
    ------
    ConfigError
        For another word than 0, 1 and 2.
    """
    said = environ.get("MPIDIST_VERBOSE", "").strip()
    if said not in ("", "0", "1", "2"):
        raise ConfigError(
            f"MPIDIST_VERBOSE={said!r}: expected 0 (errors only), 1 (notes) or 2 (every operation)"
        )
    return int(said or 1)


def _verbosity_or_notes() -> int:
    # An import is no place for an error: whoever begins to work asks `verbosity` and raises.
    try:
        return verbosity()
    except ConfigError:
        return 1


#: The one verbosity variable: 0 errors only, 1 notes on rank 0 (default), 2 a line per operation.
VERBOSITY = _verbosity_or_notes()

#: Newest (seconds since the epoch, kind, fields) of this process.
recent: deque[tuple[float, str, dict]] = deque(maxlen=256)


@dataclass
class Counters:
    """Messages and bytes that one process sent, received and reduced.

    `shared_bytes` were written into memory that other ranks of the node see: no message.
    """

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    bytes_reduced: int = 0
    shared_bytes: int = 0
    native_calls: int = 0
    native_bytes: int = 0

    def add(self, other: Counters, times: int = 1) -> None:
        """Add every field of `other`, so many times, to this one."""
        for field in fields(self):
            setattr(
                self, field.name, getattr(self, field.name) + times * getattr(other, field.name)
            )

    def snapshot(self) -> dict[str, int]:
        """Return the counts as a plain dict."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def reset(self) -> None:
        """Set every count to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)


class Runs:
    """How often something ran that sends `counters` each time.

    A run adds one to `times` and counts nothing else: adding eight counts costs half a
    microsecond. What counts its runs itself gives a `reader` of their number. `numbers`: the runs
    are not counted anywhere else, see `Context.sequence`.
    """

    def __init__(
        self, counters: Counters, reader: Callable[[], int] | None = None, numbers: bool = False
    ):
        self.counters, self.reader, self.numbers = counters, reader, numbers
        self.times = self._taken = 0

    def number(self) -> int:
        """Return how often it ran so far."""
        return self.times if self.reader is None else self.reader()

    def take(self, into: Counters) -> None:
        """Add to `into` what was sent since the last call."""
        number = self.number()
        into.add(self.counters, number - self._taken)
        self._taken = number


#: Everything this process has sent and received, over all communicators.
total = Counters()

_log = None
_who: dict = {}


def open_log(path, **who) -> None:
    """Append events to the JSON-lines file `path` from now on.

    `who` (rank, host, role, ...) is written into every line. The folder is made where missing.
    """
    global _log
    close_log()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    _who.clear()
    _who.update(who)
    _log = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115


def close_log() -> None:
    """Close the event log; a second call does nothing."""
    global _log
    if _log is not None:
        with suppress(OSError):  # as in `emit`
            _log.close()
        _log = None


def emit(kind: str, **details) -> None:
    """Record one event: kept in `recent`, and written to the log where one is open.

    `details` must be JSON scalars or lists of them; anything else is written as its ``str``.
    """
    now = time.time()
    recent.append((now, kind, details))
    if _log is not None:
        line = {"time": round(now, 6), **_who, "event": kind, **details}
        with suppress(OSError):  # a full disk: no log is worth a run, and lines wait for space
            _log.write(json.dumps(line, default=str) + "\n")
    if VERBOSITY >= 2:
        text = " ".join(f"{key}={value}" for key, value in details.items())
        print(f"mpidist: {_who.get('rank', '?')}: {kind} {text}", file=sys.stderr, flush=True)


class Operation(NamedTuple):
    """Something asked of a peer, or done for one; `open` until it is answered, or done."""

    kind: str
    peer: int | None
    model: str
    clock: int
    began: float  # monotonic
    open: bool

    def text(self) -> str:
        """Describe it: ``push+clock+pull of 'mlp', clock 7, rank 2``."""
        of = f" of {self.model!r}, clock {self.clock}" if self.model else ""
        return f"{self.kind}{of}, {'all' if self.peer is None else f'rank {self.peer}'}"


#: Where an operation that `Trail.begin` returned says whether it is open.
OPEN = Operation._fields.index("open")


class Trail:
    """The newest operations of a rank that talks to one peer at a time, for a report on a hang.

    Where all ranks do the same things in the same order numbers tell where each of them stands
    (`Context.history`). Servers and workers do not: here stands who was asked for what, and when.
    Peers are ranks of the communicator whose `rank` and `size` are given.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.about: Callable[[], dict] | None = None  # more for the report; must not wait
        self._newest: deque[list] = deque(maxlen=256)
        trails.add(self)

    def begin(
        self, kind: str, peer: int | None = None, model: str = "", clock: int = 0, open: bool = True
    ) -> list:
        """Take note of an operation; its end is told by ``operation[OPEN] = False``.

        A list of what an `Operation` has, for it costs half as much: 0.2 us.
        """
        operation = [kind, peer, model, clock, time.monotonic(), open]
        self._newest.append(operation)
        return operation

    def operations(self) -> list[Operation]:
        """Return the newest ones, the oldest first."""
        return [Operation(*each) for each in list(self._newest)]


#: Those of this process.
trails: WeakSet[Trail] = WeakSet()


#: name -> [count, seconds] of every span that ended in this process.
spans: dict[str, list] = {}


@contextmanager
def span(name: str):
    """Time a block; count and seconds are summed in `spans`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        entry = spans.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += time.perf_counter() - start
