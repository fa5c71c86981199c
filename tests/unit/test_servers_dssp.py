"""DSSP: every answer of its rule in every order of events, its two rules, and its speed (R69)."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.staleness import TRACES, compare, times
from gate_worlds import Choices, explore, outcomes

import mpidist as md
from mpidist.errors import ConfigError
from mpidist.servers.consistency import SSP, Answer, simulate
from mpidist.servers.modes.dynamic_bound import RULES


@pytest.mark.parametrize(
    "clocks",
    [(3, 3, 3), (1, 4, 2), (0, 3, 4), pytest.param((4, 4, 4), marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (1, 2), (2, 2), (0, 0)])
def test_every_answer_of_a_rule_keeps_the_bound(low, high, clocks):
    """At most `high` ahead, no deadlock, every push once; World.carry_out checks each answer."""
    finals, worst, states = explore(md.DSSP(low, high), clocks, Choices())
    every = sorted((w, c) for w, n in enumerate(clocks) for c in range(n))
    for world in finals:
        assert sorted((w, c) for c, workers in world.applied for w in workers) == every
        assert not world.gate.waiting
        assert not world.gate.held
        assert max(world.gate.gaps) <= high
    assert worst == high
    assert states > 50


class Servers:
    """Workers with two servers, to which their messages come in any order; see `World`.

    A worker sends a pull to both servers and waits for both answers. Both servers have a rule here,
    with answers of their own: more than DSSP needs, whose second server keeps the bound `high`.
    """

    def __init__(self, low, high, clocks, first_alone=False):
        mode = md.DSSP(low, high)
        self.gates = [mode.gate(len(clocks), server, float) for server in (0, 1)]
        self.choices = Choices()
        for gate in self.gates[: 1 if first_alone else 2]:
            gate._rule = self.choices
        if not first_alone:
            self.gates[1] = mode.gate(len(clocks), 0, float)
            self.gates[1]._rule = self.choices
        self.clocks = clocks
        self.arrived = [[0] * len(clocks) for _ in self.gates]  # messages of each worker
        self.answered = [[0] * len(clocks) for _ in self.gates]

    def key(self):
        waiting = tuple(tuple(gate.waiting) for gate in self.gates)
        return (*map(tuple, self.arrived), *map(tuple, self.answered), waiting)

    def able(self):
        """The messages that can arrive next: pull and tick in turn, and at last leave."""
        for server in (0, 1):
            for worker, clocks in enumerate(self.clocks):
                n = self.arrived[server][worker]
                asked = (n + 1) // 2  # the pulls before message n
                if n <= 2 * clocks and min(a[worker] for a in self.answered) >= asked:
                    yield server, worker

    def step(self, server, worker):
        gate, n = self.gates[server], self.arrived[server][worker]
        self.arrived[server][worker] += 1
        event = gate.leave if n == 2 * self.clocks[worker] else (gate.pull, gate.tick)[n % 2]
        for action in event(worker):
            if isinstance(action, Answer):
                assert action.gap <= gate.consistency.high
                self.answered[server][action.worker] += 1


@pytest.mark.parametrize(
    ("low", "high", "clocks", "first_alone"),
    [
        (0, 1, (3, 3), True), (0, 1, (3, 3), False), (0, 2, (3, 1), True), (0, 2, (3, 1), False),
        (0, 1, (2, 1, 1), False),
        pytest.param(0, 1, (2, 1, 1), True, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_two_servers_never_hold_workers_in_a_circle(low, high, clocks, first_alone):
    """Whatever each server's rule answers, some message can arrive until all have left."""
    start = Servers(low, high, clocks, first_alone)
    stack, seen = [start], {start.key()}
    while stack:
        world = stack.pop()
        able = list(world.able())
        left = [n > 2 * c for a in world.arrived for n, c in zip(a, world.clocks, strict=True)]
        assert able or all(left), world.key()
        for after in outcomes(world, able):
            if after.key() not in seen:
                seen.add(after.key())
                stack.append(after)
    assert len(seen) > 100


def test_the_second_server_keeps_the_larger_bound():
    mode = md.DSSP(1, 3)
    gate = mode.gate(2, 1)
    for _ in range(3):
        gate.tick(0)
    assert gate.pull(0) == [Answer(0, 3, None)]
    first = mode.gate(2, 0)
    first.work[0].extend([1.0] * 16)
    first.work[1].extend([3.0] * 16)
    for _ in range(3):
        first.tick(0)
    assert first.pull(0) == []
    assert first.blockers(0) == ([1], 1)


def test_one_of_the_slowest_is_enough_to_move():
    """If worker 1 goes on, the rule looks at worker 2 alone, which is fast: so 0 waits for one."""
    gate = md.DSSP(0, 8).gate(3, 0)
    gate.begin_at([21, 20, 20])
    for seconds, work in zip((1.0, 9.0, 1.0), gate.work, strict=True):
        work.extend([seconds] * 16)
    assert gate.pull(0) == []
    assert gate.blockers(0) == ([1, 2], 1)
    assert gate.tick(1) == [Answer(0, 1, None)]


def test_low_is_high():
    """Then it is SSP, to the last number of a simulation."""
    delays = np.random.default_rng(3).lognormal(0, 0.7, (5, 60)).tolist()
    for rule in RULES:
        for bound in (0, 1, 4):
            assert simulate(delays, md.DSSP(bound, bound, rule)) == simulate(delays, SSP(bound))


def test_the_median_rule():
    """A pause of a worker that is else as fast lets the other pass `low`, slowness does not."""
    for slow, open_at in ((1.9, 3), (2.1, 1)):
        time = [0.0]
        gate = md.DSSP(1, 3).gate(2, 0, lambda time=time: time[0])
        for _ in range(16):
            begin = time[0]
            gate.pull(0), gate.pull(1)
            time[0] = begin + 1
            gate.tick(0)
            time[0] = begin + slow
            gate.tick(1)
        gate.pull(1)
        ahead = 0
        while gate.pull(0):
            time[0] += 1
            gate.tick(0)
            ahead += 1
        assert ahead == open_at + 1  # the next one waits
        assert gate.blockers(0) == ([1], 1)
        gate.tick(1)
        assert not gate.waiting


def test_the_rule_of_the_paper():
    """From the two newest pushes of both: the steps after which they come nearest."""
    time = [9.0]
    gate = md.DSSP(1, 6, "paper").gate(2, 0, lambda: time[0])
    gate.begin_at([3, 1])
    gate.ticks[0].extend([6.0, 9.0])
    gate.ticks[1].extend([0.0, 10.0])
    # The fast one pushes at 12, 15, 18, 21, 24, and the slow one at 20: 21 is next to it.
    assert gate.pull(0) == [Answer(0, 2, None)]
    assert gate._rule.granted == [3, 0]
    for ahead in (3, 4, 5):
        time[0] += 3
        gate.tick(0)
        assert gate.pull(0) == [Answer(0, ahead, None)]
    assert gate._rule.granted == [0, 0]
    # The next push of the slow one is at 20, and this one is at 21: no further step is granted, and
    # the fast one waits until it is `low` steps ahead.
    gate.tick(0)
    assert gate.pull(0) == []
    for ahead in (5, 4, 3, 2):
        assert gate.tick(1) == []
        assert gate.ahead(0) == ahead
    assert gate.tick(1) == [Answer(0, 1, None)]


def test_the_paper_grants_nothing_to_others():
    """Only the fastest worker is granted steps, and only after two pushes of both."""
    gate = md.DSSP(0, 6, "paper").gate(3, 0, lambda: 50.0)
    gate.begin_at([3, 2, 1])
    assert gate.pull(0) == []
    for ticks in gate.ticks:
        ticks.extend([6.0, 9.0])
    assert gate.pull(1) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"low": -1}, "DSSP: low is -1, expected a whole number of at least 0"),
        ({"high": 2.5}, "DSSP: high is 2.5"),
        ({"low": True}, "DSSP: low is True"),
        ({"low": 4, "high": 3}, "low=4 is above high=3"),
        ({"rule": "mean"}, "unknown rule of DSSP 'mean': expected one of 'median', 'paper'"),
    ],
)
def test_bad_settings(settings, text):
    with pytest.raises(ConfigError, match=text):
        md.DSSP(**settings)


def test_numbers_of_numpy():
    assert md.DSSP(np.int64(2), np.int32(4)) == md.DSSP(2, 4)
    assert repr(md.DSSP(np.int64(2), 4)) == "DSSP(low=2, high=4, rule='median')"


@pytest.mark.parametrize("trace", TRACES)
def test_it_is_as_fast_as_the_best_fixed_bound(trace):
    """R69: whatever slows workers down, with no bound to be tuned; `make bench-staleness`."""
    found = compare(times(TRACES[trace], 0))
    assert found["median"] > 0.97
    if trace == "one rank 3 x slow":
        assert found["median gap"] < 0.4 * found["ssp gap"]
        assert found["paper gap"] > 0.8 * found["ssp gap"]


def test_a_worker_whose_median_or_mean_is_alike():
    """One long step, or many of two kinds, do not make a worker slow."""
    for others in ([1.0] * 30 + [500.0], [1.0, 9.0] * 15 + [9.0]):
        gate = md.DSSP(0, 8).gate(2, 0)
        gate.begin_at([21, 20])
        gate.work[0].extend([1.0] * 16 + [9.0] * 15)
        gate.work[1].extend(others)
        assert gate.pull(0) == [Answer(0, 1, None)]
    gate = md.DSSP(0, 8).gate(2, 0)
    gate.begin_at([21, 20])
    gate.work[0].extend([1.0] * 31)
    gate.work[1].extend([3.0] * 31)
    assert gate.pull(0) == []


def test_real_traces():
    """R69: step times of real runs, see tests/benchmarks/record_traces.py; six on a busy host."""
    found = {}
    for path in sorted((Path(__file__).parent / "traces").glob("*.txt")):
        lines = path.read_text(encoding="ascii").splitlines()
        delays = [[1e-6 * int(each) for each in line.split()] for line in lines]
        assert [len(each) for each in delays] == [200] * 4
        found[path.stem] = compare(delays)
    assert len(found) == 9
    for name in ("quiet_slow", "quiet_stalls", "quiet_pauses"):
        assert found[name]["median"] >= 0.97, name
    slow = found["quiet_slow"]
    assert slow["median gap"] < 0.4 * slow["ssp gap"]
    busy = [found[name]["median"] for name in found if not name.startswith("quiet")]
    assert np.median(busy) >= 0.97
    assert min(busy) > 0.9
