"""Counters, time spans, and a log of events in JSON lines.

An operation, such as an allreduce of one array size, sends equal messages each time it runs.
Therefore only the runs are counted, and the numbers of messages and bytes are computed from the
number of runs.
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
    """Return whether a Python file belongs to the package mpidist."""
    return filename.startswith(_PACKAGE)


def verbosity(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number in the variable ``MPIDIST_VERBOSE`` of `environ`; 1 if it is not set.

    Raises
    ------
    ConfigError
        If the value is not 0, 1 or 2.
    """
    said = environ.get("MPIDIST_VERBOSE", "").strip()
    if said not in ("", "0", "1", "2"):
        raise ConfigError(
            f"MPIDIST_VERBOSE={said!r}: expected 0 (errors only), 1 (notes) or 2 (every operation)"
        )
    return int(said or 1)


def _verbosity_or_notes() -> int:
    # The import of this module must not raise. The program's first call of mpidist calls
    # `verbosity` again, which then raises the error.
    try:
        return verbosity()
    except ConfigError:
        return 1


#: The verbosity: 0 prints errors only, 1 notes on rank 0 (default), 2 a line per operation.
VERBOSITY = _verbosity_or_notes()

#: The newest events of this process: (seconds since the epoch, kind, fields).
recent: deque[tuple[float, str, dict]] = deque(maxlen=256)


@dataclass
class Counters:
    """The messages and bytes that one process has sent, received and reduced.

    `shared_bytes` are the bytes written into shared memory of the node, without a message.
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
        """Add each count of `other`, multiplied by `times`, to the same count of this object."""
        for field in fields(self):
            more = times * getattr(other, field.name)
            setattr(self, field.name, getattr(self, field.name) + more)

    def snapshot(self) -> dict[str, int]:
        """Return the counts as a plain dict."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def reset(self) -> None:
        """Set every count to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)


class Runs:
    """Counts the runs of an operation; `counters` has the messages and bytes of one run.

    The operation adds 1 to the attribute `times` in each run, unless a function `reader` is given,
    which returns the number of runs.
    """

    def __init__(
        self, counters: Counters, reader: Callable[[], int] | None = None, numbers: bool = False
    ):
        self.counters, self.reader, self.numbers = counters, reader, numbers
        self.times = self._taken = 0

    def number(self) -> int:
        """Return how often the operation has run so far."""
        return self.times if self.reader is None else self.reader()

    def take(self, into: Counters) -> None:
        """Add to `into` the messages and bytes of all runs since the last call of `take`."""
        number = self.number()
        into.add(self.counters, number - self._taken)
        self._taken = number


#: The counts of this process over all communicators.
total = Counters()

_log = None
_who: dict = {}


def open_log(path, **who) -> None:
    """Append events to the JSON-lines file `path` from now on.

    Every line contains the fields in `who` (rank, host, role, ...).
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
        with suppress(OSError):  # a full disk must not end the run
            _log.close()
        _log = None


def emit(kind: str, **details) -> None:
    """Add one event to `recent`, the list of the newest events, and to the log if a log is open.

    `details` should be JSON scalars or lists of scalars; other values are written as their ``str``.
    """
    now = time.time()
    recent.append((now, kind, details))
    if _log is not None:
        line = {"time": round(now, 6), **_who, "event": kind, **details}
        with suppress(OSError):  # a full disk must not end the run
            _log.write(json.dumps(line, default=str) + "\n")
    if VERBOSITY >= 2:
        text = " ".join(f"{key}={value}" for key, value in details.items())
        print(f"mpidist: {_who.get('rank', '?')}: {kind} {text}", file=sys.stderr, flush=True)


class Operation(NamedTuple):
    """A request between a worker and a parameter server; `open` is true until the request ends."""

    kind: str
    peer: int | None
    model: str
    clock: int
    began: float  # monotonic
    open: bool

    def text(self) -> str:
        """Return text such as ``push+clock+pull of 'mlp', clock 7, rank 2``; clock 7 is step 7."""
        of = f" of {self.model!r}, clock {self.clock}" if self.model else ""
        return f"{self.kind}{of}, {'all' if self.peer is None else f'rank {self.peer}'}"


#: The index of the field `open` in an operation that `Trail.begin` has returned.
OPEN = Operation._fields.index("open")


class Trail:
    """The newest requests that a worker has sent or a parameter server has served."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.about: Callable[[], dict] | None = None  # adds facts to the report; must not wait
        self._newest: deque[list] = deque(maxlen=256)
        trails.add(self)

    def begin(
        self, kind: str, peer: int | None = None, model: str = "", clock: int = 0, open: bool = True
    ) -> list:
        """Record a request and return it as a list of the fields of `Operation`.

        The caller marks the end of the request by ``operation[OPEN] = False``.
        """
        # A list takes half as long to make as an `Operation`.
        operation = [kind, peer, model, clock, time.monotonic(), open]
        self._newest.append(operation)
        return operation

    def operations(self) -> list[Operation]:
        """Return the newest operations, in the order in which they began."""
        return [Operation(*each) for each in list(self._newest)]


#: The trails of this process.
trails: WeakSet[Trail] = WeakSet()


#: The spans that have ended in this process: name -> [count, seconds].
spans: dict[str, list] = {}


@contextmanager
def span(name: str):
    """Measure the time of a ``with`` block, and add it to the entry `name` of the dict `spans`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        entry = spans.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += time.perf_counter() - start
