"""Reading ahead keeps the order of samples, limits memory, and waits for late data (R44, R130)."""

import math
import os
import subprocess
import threading
import time

import numpy as np
import pytest
from until import holds_within, wait_until

from mpidist.data import ArraySource, Loading, skip_bad
from mpidist.data import loader as loader_module
from mpidist.data.loader import PREFETCH, Loader, Starved
from mpidist.errors import BadRecord, ConfigError, SourceError

X = np.arange(8000.0).reshape(1000, 8)  # 64 bytes a sample


class Watched(ArraySource):
    """Notes what is taken, and by whom; waits where it is told to."""

    def __init__(self, *arrays):
        super().__init__(*arrays)
        self.taken, self.threads, self.gate = [], set(), threading.Event()
        self.gate.set()

    def take(self, indices):
        self.gate.wait(10)
        self.taken.append(np.array(indices))
        self.threads.add(threading.current_thread().name)
        if 13 in indices:
            raise BadRecord(13, "unlucky")
        return super().take(indices)


class Clock:
    """In place of `time`: nothing but sleeping moves it, on a machine of any speed."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def batches(size, start=0):
    for first in range(start, 1000, size):
        yield np.arange(first, min(first + size, 1000))


def settle(source, count, size=10):
    """Wait until `count` batches were taken; return how many, of `size`, a moment later."""

    def taken():
        return sum(map(len, source.taken)) / size if size else len(source.taken)

    holds_within(lambda: taken() >= count, 10, every=0.001)
    time.sleep(0.05)
    return taken()


@pytest.mark.parametrize("prefetch", [0, 1, 1000, True])
def test_the_same_batches_in_order(prefetch):
    source = Watched(X)
    with Loader(source, lambda: batches(7), Loading(prefetch)) as loader:
        for indices in batches(7):
            taken = loader.take(indices)
            bad = [13] if 13 in indices else []
            assert [record.index for record in taken.bad] == bad
            np.testing.assert_array_equal(taken.batch[0], X[np.setdiff1d(indices, bad)])
    assert source.threads == {"mpidist-loader" if prefetch else "MainThread"}


def test_bounded_in_bytes():
    """640 bytes a batch: 2,000 are three batches, and one is always read, however large."""
    for limit, expected in ((2000, 3), (640, 1), (1, 1)):
        source = Watched(X)
        with Loader(source, lambda: batches(10, 100), Loading(limit)) as loader:
            loader.take(np.arange(100, 110))
            # The one that was taken, and those that wait.
            assert settle(source, 1 + expected) == 1 + expected
            loader.take(np.arange(110, 120))
            assert settle(source, 2 + expected) == 2 + expected


def test_no_process_is_made(monkeypatch):
    """A fork after MPI has started is not safe, so a thread it is."""

    def fork(*_):
        raise AssertionError("a process")

    for name in ("fork", "posix_spawn", "forkpty"):
        monkeypatch.setattr(os, name, fork)
    monkeypatch.setattr(subprocess, "Popen", fork)
    source = Watched(X)
    with Loader(source, lambda: batches(10, 100), Loading(True)) as loader:
        for first in range(100, 300, 10):
            loader.take(np.arange(first, first + 10))
    assert source.threads == {"mpidist-loader"}


def test_small_batches_are_taken_together():
    """A call and a change of threads would cost more than their samples."""
    source = Watched(X)
    with Loader(source, lambda: batches(10, 100), Loading(True)) as loader:
        for first in range(100, 1000, 10):
            taken = loader.take(np.arange(first, first + 10))
            np.testing.assert_array_equal(taken.batch[0], X[first : first + 10])
            assert taken.kept.tolist() == list(range(10))
    assert len(source.taken) < 45
    assert np.concatenate(source.taken).tolist() == list(range(100, 1000))
    source = Watched(X)
    with Loader(source, lambda: batches(10, 100), Loading(True, bandwidth=1e9)) as loader:
        loader.take(np.arange(100, 110))
        settle(source, 65)
    assert {len(taken) for taken in source.taken} == {10}, "a cap is kept batch by batch"


def test_a_slow_source_is_asked_for_one_batch_at_a_time():
    class Slow(Watched):
        def take(self, indices):
            time.sleep(0.005)
            return super().take(indices)

    source = Slow(X)
    with Loader(source, lambda: batches(10, 100), Loading(True)) as loader:
        for first in range(100, 200, 10):
            loader.take(np.arange(first, first + 10))
    assert {len(taken) for taken in source.taken} == {10}


def test_a_source_that_is_gone_for_several_batches(monkeypatch):
    """The first that cannot be read tells; when it is back all goes on, and none is left out."""
    monkeypatch.setattr(skip_bad, "WAIT", 0.001)

    class Away(Watched):
        away = False

        def take(self, indices):
            if self.away or 300 in indices:
                self.away = True
                raise OSError(5, "Input/output error")
            return super().take(indices)

    source, first = Away(X), 100
    with Loader(source, lambda: batches(10, first), Loading(True)) as loader:
        failed = 0
        while first < 400:
            try:
                taken = loader.take(np.arange(first, first + 10))
            except SourceError:
                failed += 1
                assert 100 < first <= 300, "as many as were asked for together with record 300"
                del Away.take
            else:
                np.testing.assert_array_equal(taken.batch[0], X[first : first + 10])
                first += 10
    assert failed == 1


def test_batches_of_nothing_are_bounded_too():
    source = Watched(X)
    nothing = np.empty(0, np.int64)

    def plan():
        while True:
            yield nothing

    with Loader(source, plan, Loading(True)) as loader:
        assert len(loader.take(nothing).batch[0]) == 0
        assert settle(source, 65, size=0) == 65


def test_another_plan_than_was_read_ahead():
    """A record that became known as bad changes the parts of all ranks from then on."""
    source, start = Watched(X), [100]
    with Loader(source, lambda: batches(10, start[0]), Loading(True)) as loader:
        loader.take(np.arange(100, 110))
        start[0] = 205
        for first in (205, 215, 225):
            taken = loader.take(np.arange(first, first + 10))
            np.testing.assert_array_equal(taken.batch[0], X[first : first + 10])


def test_what_the_source_raises_comes_with_its_batch():
    class Gone(Watched):
        def take(self, indices):
            if indices[0] >= 20:
                raise PermissionError("no more")
            return super().take(indices)

    with Loader(Gone(X), lambda: batches(10), Loading(True)) as loader:
        loader.take(np.arange(10))
        loader.take(np.arange(10, 20))
        taken = loader.take(np.arange(20, 30))
        assert [record.reason[:24] for record in taken.bad] == ["PermissionError: no more"] * 10


def test_starved_and_back():
    """R44: the waiting ends, twice as long each time; the batch is not lost, nor read twice."""
    source = Watched(X)
    with Loader(source, lambda: batches(10, 100), Loading(True, None, 0.05)) as loader:
        source.gate.clear()
        for seconds in (0.05, 0.1, 0.2):
            began = time.monotonic()
            with pytest.raises(Starved) as caught:
                loader.take(np.arange(100, 110))
            assert caught.value.seconds == seconds
            assert time.monotonic() - began >= seconds
        source.gate.set()
        wait_until(lambda: loader._ready, 20, every=0.001)
        assert len(loader.take(np.arange(100, 110)).kept) == 10
        assert sum(100 in indices for indices in source.taken) == 1
        source.gate.clear()
        with pytest.raises(Starved) as caught:  # behind what was read ahead
            _ = [loader.take(indices) for indices in batches(10, 110)]
        assert caught.value.seconds == 0.05, "patience begins anew"
        assert loader.waited > 0.35
        source.gate.set()


@pytest.mark.parametrize("prefetch", [False, True])
def test_bandwidth_cap(prefetch, monkeypatch):
    """R130: 64,000 bytes at 40 kB/s."""
    clock = Clock()
    monkeypatch.setattr(loader_module, "time", clock)
    with Loader(Watched(X), lambda: batches(50), Loading(prefetch, 40_000.0)) as loader:
        for indices in batches(50):
            loader.take(indices)
        assert loader.nbytes == 64_000 - 64
    assert clock.now == pytest.approx(loader.nbytes / 40_000.0)


def test_bandwidth_that_was_not_used(monkeypatch):
    """A second's worth of it may come at once, however long nothing was asked for."""
    clock = Clock()
    monkeypatch.setattr(loader_module, "time", clock)
    with Loader(Watched(X), lambda: batches(100, 100), Loading(False, 25_600.0)) as loader:
        clock.now = 10.0
        for indices in batches(100, 100):
            loader.take(indices)
    assert clock.now == pytest.approx(10.0 + 900 * 64 / 25_600.0 - 1.0)


def test_a_wait_without_end():
    source = Watched(X)
    source.gate.clear()
    threading.Timer(0.05, source.gate.set).start()
    with Loader(source, lambda: batches(10), Loading(True, None, math.inf)) as loader:
        assert len(loader.take(np.arange(10)).kept) == 10


def test_where_a_thread_helps():
    """By default only for sources that say that they read."""
    source = ArraySource(X)
    assert Loading().ahead(source) == 0
    source.reads = True
    assert Loading().ahead(source) == PREFETCH
    assert Loading(False).ahead(source) == 0
    assert Loading(12345).ahead(ArraySource(X)) == 12345


def test_closed_while_the_source_hangs():
    source = Watched(X)
    loader = Loader(source, lambda: batches(10), Loading(True, None, 0.01))
    source.gate.clear()
    with pytest.raises(Starved):
        loader.take(np.arange(10))
    loader.close()
    loader.close()
    assert source.taken == [], "it was not waited for"
    source.gate.set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefetch": -1}, "prefetch is -1, expected 'auto', true or bytes"),
        ({"prefetch": "all"}, "prefetch is 'all', expected"),
        ({"bandwidth": 0}, "bandwidth is 0, expected a number above 0"),
        ({"starved_after": True}, "starved_after is True, expected a number"),
        ({"finite": 1}, "finite is 1, expected true or false"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        Loading(**settings)
