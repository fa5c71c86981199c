"""Find which rank is slow, in which phase and by how much, but not a rank late by chance (R45)."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpidist import events
from mpidist.fault_tolerance import stragglers
from mpidist.fault_tolerance.stragglers import (
    AGAIN,
    WINDOW,
    OwnTime,
    Straggler,
    Stragglers,
    crowded_ranks,
    find_stragglers,
    sharing,
)
from mpidist.runtime import polling
from mpidist.training.exchanges.worker_times import OwnTimes, Times

RNG = np.random.default_rng(0)


def test_rank_phase_and_lag():
    quiet = np.full((4, 2), [0.0, 0.004])
    assert find_stragglers(quiet) == []
    slow = quiet.copy()
    slow[2, 1] = 0.054
    assert find_stragglers(slow) == [Straggler(2, "gradients", pytest.approx(0.05))]
    slow[2] = 0.03, 0.004
    assert find_stragglers(slow) == [Straggler(2, "data", pytest.approx(0.03))]


def test_little_is_not_told():
    """Three times as long may be microseconds; 5 ms more may be a fifth of a step."""
    assert find_stragglers(np.array([[0, 1e-4], [0, 2e-3], [0, 1e-4]])) == []
    assert find_stragglers(np.array([[0, 0.1], [0, 0.12], [0, 0.11]])) == []


class World:
    """Ranks whose windows are put together without MPI."""

    rank, size = 0, 4

    def __init__(self, lags):
        self.lags, self.looks = lags, 0

    def Iallgather(self, mine, everyone):
        everyone[...] = np.stack([mine] * self.size)
        everyone[:, 1] += self.lags(self.looks)
        self.looks += 1
        return SimpleNamespace(Test=lambda: True)


def told_by(lags, windows=20):
    world = World(lags)
    one = Stragglers(world, crowded=frozenset())
    for _ in range(windows * WINDOW):
        one.note(0.0, 0.004)
    assert world.looks == windows
    return one.judge.told


def test_twice_in_a_row_and_once_until_it_is_well():
    assert told_by(lambda look: [0, 0, 0.05 * (look % AGAIN == 0), 0]) == []
    events.recent.clear()
    (one,) = told_by(lambda look: [0, 0, 0.05, 0])
    assert (one.rank, one.phase) == (2, "gradients")
    assert [event[1:] for event in events.recent] == [
        ("straggler", {"straggler": 2, "phase": "gradients", "lag_ms": 50.0})
    ]
    again = told_by(lambda look: [0, 0, 0.05 * (look not in (5, 6)), 0])
    assert [one.rank for one in again] == [2, 2]


def test_ranks_that_take_turns_are_not_accused():
    """The system takes a time slice of 4 ms from any rank in any step, more from some."""
    for share in (0.1, 0.3, 0.5):
        for _ in range(50):
            window = 0.001 + 0.004 * RNG.poisson(share, (4, WINDOW))
            everyone = np.zeros((4, 2))
            everyone[:, 1] = np.sort(window, axis=1)[:, 2]
            assert find_stragglers(everyone) == []


CORES = {name: frozenset(cores) for name, cores in {
    "0": [0], "1": [1], "0-1": [0, 1], "0-7": range(8), "1-7": range(1, 8)}.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (["0-1", "0-1"], set()),
        (["0-1"] * 4, {0, 1, 2, 3}),
        (["0-7"] * 8, set()),
        (["0", "1", "0-1"], {0, 1, 2}),
        (["0", "0", "1", "0-7"], {0, 1}),
        (["0", "0-7", "1-7"], set()),
        (["a 0", "b 0", "b 0"], {1, 2}),
        (["a 0-1", "b 0-1", "a 0-1", "b 0-1", "b 0-1"], {1, 3, 4}),
    ],
)
def test_who_shares_cores(bound, expected):
    """Masks that overlap and more ranks than cores; a machine's ranks are counted together."""
    words = [("a " + name).split(" ")[-2:] for name in bound]
    places = [(machine, CORES[cores]) for machine, cores in words]
    assert sharing(places) == expected


def test_ranks_that_share_cores_are_not_named(monkeypatch):
    """They are asked for once, when there is somebody to name."""
    asked = []
    monkeypatch.setattr(stragglers, "crowded_ranks", lambda comm: asked.append(comm) or {1, 2})
    for rank, told in ((2, 0), (3, 1)):
        events.recent.clear()
        asked.clear()
        world = World(
            lambda look, rank=rank: [0.05 * (r == rank) * (look % 8 > 2) for r in range(4)]
        )
        one = Stragglers(world)
        for _ in range(20 * WINDOW):
            one.note(0.0, 0.004)
        assert len(one.judge.told) == 2
        assert asked == [world]
        assert len(events.recent) == 2 * told
    events.recent.clear()
    times = Times([0, 1], ["a", "a"], crowded={1})
    for _ in range(3 * AGAIN):
        times.take(0, (0, 4_000_000))
        times.take(1, (0, 54_000_000))
    assert not events.recent
    assert times.judge.told
    assert crowded_ranks(SimpleNamespace(size=1)) == frozenset()


def test_workers_that_run_apart_are_judged_by_a_server(capsys):
    """Worker 3 tells its second window when the others have told many: then it is known."""
    times = Times([0, 1, 3], ["a", "a", "a", "b"])
    slow, quick = (0, 54_000_000), (0, 4_000_000)
    events.recent.clear()
    for _ in range(AGAIN):
        assert not events.recent
        for _ in range(5):
            times.take(0, quick)
            times.take(1, quick)
        times.take(3, slow)
    (event,) = events.recent
    assert event[1:] == ("straggler", {"straggler": 3, "phase": "gradients", "lag_ms": 50.0})
    said = capsys.readouterr().err
    assert said.startswith("mpidist: note: rank 3 on b is slower than the other workers: it needs")


def test_a_worker_tells_its_times_with_every_tenth_request():
    requests = SimpleNamespace(note=(0, 0))
    client = SimpleNamespace(requests=requests)
    times = OwnTimes(client)
    for step in range(WINDOW):
        assert requests.note == (0, 0), step
        times.note(0.001, 0.004 if step % 3 else 0.1)
    assert requests.note == (1_000_000, 4_000_000)


def test_waits_are_no_work_of_ones_own():
    """What a loop does until it says that it has computed, or until its step ends."""
    began, before = time.monotonic(), polling.waited
    own = OwnTime()
    for _ in range(20):  # where this process stands still meanwhile, that is no wait
        now = time.monotonic()
        polling.wait_until(lambda now=now: time.monotonic() > now + 0.05)
        if polling.waited - before > 0.03:
            break
    assert own.stop() < time.monotonic() - began - 0.02
    own.begin()
    time.sleep(0.03)
    worked = own.stop()
    time.sleep(0.03)
    assert own.stop() == worked
    assert worked >= 0.03
