"""Read ahead: a thread reads the next batches from a data source while the model computes.

    loop    compute 0 | compute 1 | compute 2 |          takes batch k when it needs it
    thread  1     2   |    3      |  (full)  4            reads ahead up to `prefetch` bytes

By default, a source of arrays in memory has no thread, because it would save no time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, shown
from .skip_bad import BadRecordFilter, Batch
from .sources import Source

#: Bytes that are read ahead by default.
PREFETCH = 64 << 20
#: Most batches that are read ahead.
_MOST = 64
#: Seconds between two calls of the argument `meanwhile` of `Loader.take`, while it waits for a
#: batch.
_LOOK = 0.001
#: The thread reads at most this many bytes in one call of the source, and at most as much as should
#: take this many seconds. The thread reads several small batches in one call, because a call and a
#: switch of threads take as long as many small samples.
_AT_ONCE, _BRIEF = 4 << 20, 0.004
#: The longest wait in seconds for a late batch: after each `Starved` the next wait is twice as
#: long.
_PATIENCE = 300.0


class Starved(Exception):
    """Raised when the thread has no batch in time; the caller should call `Loader.take` again."""

    def __init__(self, seconds: float):
        super().__init__(f"no batch after {seconds:g} s")
        self.seconds = seconds


@dataclass(frozen=True)
class Loading:
    """Settings for loading samples.

    Parameters
    ----------
    prefetch : "auto", bool or int
        How many bytes each rank reads ahead in a thread. True means 64 MiB, and False means no
        thread. "auto" means True if the attribute ``reads`` of the source is true, else False.
    bandwidth : float, optional
        The largest number of bytes per second that each rank takes from the source.
    starved_after : float
        How many seconds the thread may need for a batch before the run saves a checkpoint and
        prints a message. The run then waits again, each time twice as long, but at most 5 minutes.
        With ``math.inf`` it only waits.
    finite : bool
        Whether a sample with a NaN or an infinity counts as a bad record, which is skipped.
    """

    prefetch: str | bool | int = "auto"
    bandwidth: float | None = None
    starved_after: float = 60.0
    finite: bool = True

    def __post_init__(self):
        for name in ("bandwidth", "starved_after"):
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not (number and value > 0) and (value is not None or name != "bandwidth"):
                raise ConfigError(f"loading: {name} is {shown(value)}, expected a number above 0")
        if not isinstance(self.finite, bool):
            raise ConfigError(f"loading: finite is {self.finite!r}, expected true or false")
        value = self.prefetch
        if value != "auto" and (not isinstance(value, int) or value < 0):
            raise ConfigError(f"loading: prefetch is {value!r}, expected 'auto', true or bytes")

    def ahead(self, source: Source) -> int:
        """Return how many bytes of `source` are read ahead; 0 means that no thread is used."""
        if self.prefetch == "auto":
            return PREFETCH if getattr(source, "reads", False) else 0
        return PREFETCH if self.prefetch is True else int(self.prefetch)


class _Entry(NamedTuple):
    indices: np.ndarray
    taken: Batch | None
    error: BaseException | None
    nbytes: int


class Loader:
    """Takes batches from a source, and reads the next batches ahead in a thread.

    Call `close` at the end, or use a ``with`` statement.

    Parameters
    ----------
    source : Source
    plan : callable
        Returns an iterator over the arrays of indices of the next batches, beginning with the batch
        that is taken next. The iterator runs in the thread.
    loading : Loading
        How many bytes to read ahead, how fast, and how long to wait.

    Attributes
    ----------
    nbytes, seconds, waited : number
        The bytes taken from the source, the seconds that the source took for them, and the seconds
        that `take` waited.
    """

    def __init__(
        self, source: Source, plan: Callable[[], Iterator[np.ndarray]], loading: Loading | None
    ):
        self._loading = loading or Loading()
        self._careful, self._plan = BadRecordFilter(source, self._loading.finite), plan
        self._limit = self._loading.ahead(source)
        self._patience = self._loading.starved_after
        self.nbytes, self.seconds, self.waited = 0, 0.0, 0.0
        self._bucket, self._pace = time.monotonic(), 0.0
        self._ready: deque[_Entry] = deque()
        self._held = self._last = self._round = 0
        self._iterator: Iterator[np.ndarray] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, indices: np.ndarray, meanwhile: Callable[[], object] | None = None) -> Batch:
        """Return the samples at `indices`, without bad records.

        Raises `Starved` if the thread that reads ahead takes too long for this batch. If the source
        raises an exception, this method raises it. ``meanwhile()`` is called repeatedly while this
        method waits for the thread.
        """
        began = time.perf_counter()
        try:
            entry = self._next(indices, meanwhile) if self._limit else self._load(indices)
        finally:
            self.waited += time.perf_counter() - began
        self._patience = self._loading.starved_after
        if entry.error is not None:
            raise entry.error
        assert entry.taken is not None
        return entry.taken

    def _next(self, indices: np.ndarray, meanwhile: Callable[[], object] | None) -> _Entry:
        """Return the batch of `indices`; restart the thread if its next batch has other samples."""
        if self._thread is None:
            # A daemon, because a source that never returns must not keep the process alive.
            # Not a process, because it is not safe to fork after MPI has started.
            self._thread = threading.Thread(target=self._run, name="mpidist-loader", daemon=True)
            self._begin(indices)
            self._thread.start()
        deadline = time.monotonic() + self._patience
        while True:
            left = max(0.0, deadline - time.monotonic())
            entry = self._pop(min(left, _PATIENCE if meanwhile is None else _LOOK))
            if entry is not None:
                if np.array_equal(entry.indices, indices):
                    return entry
                self._begin(indices)
            elif time.monotonic() >= deadline:
                patience = self._patience
                self._patience = max(patience, min(2 * patience, _PATIENCE))
                raise Starved(patience)
            elif meanwhile is not None:
                meanwhile()

    def _pop(self, seconds: float) -> _Entry | None:
        """Return the next batch of the thread, or None if there is none within `seconds`."""
        with self._changed:
            if not self._ready:
                self._changed.wait(seconds)
            if not self._ready:
                return None
            entry = self._ready.popleft()
            self._held -= entry.nbytes
            self._changed.notify_all()
            return entry

    def _begin(self, indices: np.ndarray) -> None:
        """Make the thread load the samples at `indices`, and then the next planned batches."""
        with self._changed:
            self._ready.clear()
            self._held = 0
            self._round += 1
            self._iterator = itertools.chain([indices], itertools.islice(self._plan(), 1, None))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._room():
                    self._changed.wait()
                if self._closed:
                    return
                iterator, number, share = self._iterator, self._round, self._share()
            assert iterator is not None
            parts = list(itertools.islice(iterator, share))
            entries = self._load_some(parts)
            with self._changed:
                if number != self._round:
                    continue  # a new plan has begun meanwhile: drop the batches of the old plan
                if not entries:
                    self._iterator = None
                    continue
                self._ready.extend(entries)
                self._held += sum(entry.nbytes for entry in entries)
                self._last = entries[-1].nbytes
                self._changed.notify_all()

    def _room(self) -> bool:
        """Return whether one more batch may be read ahead; the first batch is always allowed."""
        if self._iterator is None or len(self._ready) >= _MOST:
            return False
        return not self._ready or self._held + self._last <= self._limit

    def _share(self) -> int:
        """Return how many batches to read in one call of the source: several if they are small."""
        if self._last == 0 or self._loading.bandwidth is not None:
            return 1
        fitting = min(self._limit - self._held, _AT_ONCE) // self._last
        quick = int(_BRIEF / max(self._pace, 1e-9))
        return max(1, min(fitting, quick, _MOST - len(self._ready)))

    def _load_some(self, parts: list[np.ndarray]) -> list[_Entry]:
        """Load the batches `parts` in one call of the source, or one by one if that call fails."""
        began = time.perf_counter()
        several = len(parts) > 1
        batch = self._careful.together(np.concatenate(parts)) if several else None
        self._pace = (time.perf_counter() - began) / max(1, len(parts))
        if batch is None:
            entries = []
            for part in parts:
                entries.append(self._load(part))
                if entries[-1].error is not None or self._closed:
                    break  # later batches, which may fail as slowly, are not needed yet
            return entries
        self.seconds += time.perf_counter() - began
        self.nbytes += sum(array.nbytes for array in batch)
        entries, start = [], 0
        for part in parts:
            own = tuple(array[start : start + len(part)] for array in batch)
            taken = Batch(own, np.arange(len(part)))
            entries.append(_Entry(part, taken, None, sum(array.nbytes for array in own)))
            start += len(part)
        return entries

    def _load(self, indices: np.ndarray) -> _Entry:
        began = time.perf_counter()
        taken, error = None, None
        try:
            taken = self._careful.take(indices)
        except BaseException as caught:  # `Loader.take` raises this error later
            error = caught
        nbytes = sum(array.nbytes for array in taken.batch) if taken else 0
        self._pace = time.perf_counter() - began
        self.seconds += self._pace
        self.nbytes += nbytes
        self._pay(nbytes)
        return _Entry(indices, taken, error, nbytes)

    def _pay(self, nbytes: int) -> None:
        """Sleep after a read of `nbytes`, so that reads keep to the limit `bandwidth`."""
        if self._loading.bandwidth is None:
            return
        now = time.monotonic()
        self._bucket = max(self._bucket, now - 1.0) + nbytes / self._loading.bandwidth
        if self._bucket > now:
            time.sleep(self._bucket - now)

    def close(self) -> None:
        """End the thread that reads ahead; wait at most 1 s for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=1)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
