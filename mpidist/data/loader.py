"""Read ahead: a thread takes the next batches from a source while the model computes.

    loop    compute 0 | compute 1 | compute 2 |          takes batch k when it needs it
    thread  1     2   |    3      |  (full)  4            as many ahead as fit into `prefetch` bytes

It is a thread and never a process: a fork after MPI has started is not safe. It makes no MPI
calls. Sources that read or decompress let other Python code run meanwhile; for arrays in memory
there is nothing to hide, and no thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError
from .skip_bad import BadRecordFilter, Batch
from .sources import Source

#: Bytes that are read ahead where nothing else is said.
PREFETCH = 64 << 20
#: Batches that are read ahead at most, however small.
_MOST = 64
#: Seconds between two calls of what is done while a batch is waited for.
_LOOK = 0.001
#: Bytes, and seconds by the last ones, of batches that are taken at once: a call and a change of
#: threads cost as much as many small samples.
_AT_ONCE, _BRIEF = 4 << 20, 0.004
#: The patience of a starved loader grows up to this many seconds.
_PATIENCE = 300.0


class Starved(Exception):
    """The source did not give a batch in time; it is still asked for, so ask again."""

    def __init__(self, seconds: float):
        super().__init__(f"no batch after {seconds:g} s")
        self.seconds = seconds


@dataclass(frozen=True)
class Loading:
    """How samples are brought in.

    Parameters
    ----------
    prefetch : "auto", bool or int
        Bytes that each rank reads ahead in a thread; True is 64 MiB, False none. "auto": 64 MiB
        where the source says that it reads (an attribute ``reads`` that is true), else none.
    bandwidth : float, optional
        Most bytes per second that each rank takes from the source: what the gradients need of a
        network that they share.
    starved_after : float
        Seconds after which a batch that has not come makes the run save a checkpoint and say so,
        before it waits on (twice as long each time, up to 5 minutes). With prefetch only.
    finite : bool
        Whether a sample with a number that is not finite is a bad record. False for models that
        know what to do with it.
    """

    prefetch: str | bool | int = "auto"
    bandwidth: float | None = None
    starved_after: float = 60.0
    finite: bool = True

    def __post_init__(self):
        for name in ("bandwidth", "starved_after"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(f"loading: {name} is {value!r}, expected a number above 0")
        if not isinstance(self.finite, bool):
            raise ConfigError(f"loading: finite is {self.finite!r}, expected true or false")
        value = self.prefetch
        if value != "auto" and (not isinstance(value, int) or value < 0):
            raise ConfigError(f"loading: prefetch is {value!r}, expected 'auto', true or bytes")

    def ahead(self, source: Source) -> int:
        """Return how many bytes are read ahead of `source`; 0 is no thread."""
        if self.prefetch == "auto":
            return PREFETCH if getattr(source, "reads", False) else 0
        return PREFETCH if self.prefetch is True else int(self.prefetch)


class _Entry(NamedTuple):
    indices: np.ndarray
    taken: Batch | None
    error: BaseException | None
    nbytes: int


class Loader:
    """Batches of a source, read ahead as a plan says. Close it, or use it with ``with``.

    Parameters
    ----------
    source : Source
    plan : callable
        Returns an iterator over the indices of the batches to come, beginning with the one that
        will be taken next. What the iterator does happens in the thread.
    loading : Loading

    Attributes
    ----------
    nbytes, seconds, waited : number
        What was taken from the source, how long it worked, and how long `take` waited for it.
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
        """Return the good samples at `indices`; raises Starved, or what the source raised.

        `meanwhile` is called again and again while the thread is waited for.
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
        """Wait for the thread; tell it to begin anew where it follows another plan than ours."""
        if self._thread is None:
            # A daemon: a source that never answers must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="mpidist-loader", daemon=True)
            self._begin(indices)
            self._thread.start()
        deadline = time.monotonic() + self._patience
        while True:
            left = max(0.0, deadline - time.monotonic())
            entry = self._pop(left if meanwhile is None else min(left, _LOOK))
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
        """Return the next batch that the thread has read, waiting so long at most."""
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
        """Follow the plan from here on: `indices` first, whatever it says of them."""
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
                    continue  # they belong to a plan that was given up
                if not entries:
                    self._iterator = None
                    continue
                self._ready.extend(entries)
                self._held += sum(entry.nbytes for entry in entries)
                self._last = entries[-1].nbytes
                self._changed.notify_all()

    def _room(self) -> bool:
        """Whether the next batch fits; one is always read, however large."""
        if self._iterator is None or len(self._ready) >= _MOST:
            return False
        return not self._ready or self._held + self._last <= self._limit

    def _share(self) -> int:
        """How many batches are taken from the source at once, where they are small and quick."""
        if self._last == 0 or self._loading.bandwidth is not None:
            return 1
        fitting = min(self._limit - self._held, _AT_ONCE) // self._last
        quick = int(_BRIEF / max(self._pace, 1e-9))
        return max(1, min(fitting, quick, _MOST - len(self._ready)))

    def _load_some(self, parts: list[np.ndarray]) -> list[_Entry]:
        """Take these batches; where that does not go well together, one by one."""
        began = time.perf_counter()
        several = len(parts) > 1
        batch = self._careful.together(np.concatenate(parts)) if several else None
        self._pace = (time.perf_counter() - began) / max(1, len(parts))
        if batch is None:
            entries = []
            for part in parts:
                entries.append(self._load(part))
                if entries[-1].error is not None or self._closed:
                    break  # the others may have to wait long for the same, and nobody for them
            return entries
        self.seconds += time.perf_counter() - began
        self.nbytes += sum(array.nbytes for array in batch)
        ends = itertools.accumulate(map(len, parts))
        cuts = [slice(stop - len(part), stop) for part, stop in zip(parts, ends, strict=True)]
        batches = [tuple(array[cut] for array in batch) for cut in cuts]
        return [
            _Entry(part, Batch(own, np.arange(len(part))), None, sum(a.nbytes for a in own))
            for part, own in zip(parts, batches, strict=True)
        ]

    def _load(self, indices: np.ndarray) -> _Entry:
        began = time.perf_counter()
        taken, error = None, None
        try:
            taken = self._careful.take(indices)
        except BaseException as caught:  # it is raised where the batch is asked for
            error = caught
        nbytes = sum(array.nbytes for array in taken.batch) if taken else 0
        self._pace = time.perf_counter() - began
        self.seconds += self._pace
        self.nbytes += nbytes
        self._pay(nbytes)
        return _Entry(indices, taken, error, nbytes)

    def _pay(self, nbytes: int) -> None:
        """Sleep until so many bytes are due: a bucket of tokens that holds a second's worth."""
        if self._loading.bandwidth is None:
            return
        now = time.monotonic()
        self._bucket = max(self._bucket, now - 1.0) + nbytes / self._loading.bandwidth
        if self._bucket > now:
            time.sleep(self._bucket - now)

    def close(self) -> None:
        """End the thread; a batch that it still waits for is not waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=1)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
