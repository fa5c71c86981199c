"""The consistency modes, tested with every order of events of 3 workers (R66, R67, R68)."""

import pytest
from gate_worlds import World, explore

from mpidist.errors import ConfigError, ProtocolError
from mpidist.servers.consistency import ASP, BSP, SSP, Answer, Apply, ConsistencyGate, simulate


def check(consistency, clocks):
    finals, worst, states = explore(consistency, clocks)
    assert finals
    every = sorted((w, c) for w, n in enumerate(clocks) for c in range(n))
    for world in finals:
        applied = sorted((w, c) for c, workers in world.applied for w in workers)
        assert applied == every  # each push exactly once
        assert not world.gate.held
        assert not world.gate.waiting
        if consistency.merges:
            assert [c for c, _ in world.applied] == list(range(max(clocks)))
        bound = consistency.bound
        assert bound is None or max(world.gate.gaps) <= bound
        assert sum(world.gate.gaps.values()) == sum(clocks)
    return worst, states


@pytest.mark.parametrize("clocks", [(4, 4, 4), (1, 4, 2), (0, 3, 4)])
@pytest.mark.parametrize("mode", [BSP(), SSP(0), SSP(1), SSP(2)], ids=str)
def test_every_interleaving_keeps_the_bound(mode, clocks):
    """R66, R68: bound kept, no deadlock, every push once; the bound is reached, so it is tight."""
    worst, states = check(mode, clocks)
    assert worst == mode.bound
    assert states > 50


@pytest.mark.parametrize("clocks", [(4, 4, 4), (1, 4, 2), (2, 3)])
def test_every_interleaving_without_a_bound(clocks):
    """R67: ASP never blocks, and the gap is what the workers make it."""
    worst, _ = check(ASP(), clocks)
    assert worst == max(clocks) - 1  # the other one has not begun


def test_a_broken_gate_is_found():
    """The checker can fail: a gate that is one too generous does not pass it."""

    class Generous(ConsistencyGate):
        def is_open(self, worker):
            return self.clocks[worker] - self.slowest() <= self.consistency.bound + 1

    world = World(SSP(1), (3, 3))
    world.gate = Generous(SSP(1), 2)
    for _ in range(6):
        world.step(0)
    with pytest.raises(AssertionError):
        world.step(0)  # the pull of clock 2, with the other worker at 0


def test_only_the_fast_wait():
    """R68: the slowest live worker is never held, in any mode."""
    for mode in (BSP(), SSP(0), SSP(2), ASP()):
        gate = ConsistencyGate(mode, 3)
        for _ in range(5):
            for worker in (0, 1):
                if worker in gate.waiting or not gate.is_open(worker):
                    continue
                gate.push(worker)
                gate.tick(worker)
                gate.pull(worker)
        assert gate.is_open(2)
        assert next(a for a in gate.pull(2) if isinstance(a, Answer)).worker == 2


def test_a_worker_that_leaves_frees_the_others():
    """Pushes of a worker that left in the middle of a clock are applied, not lost."""
    gate = ConsistencyGate(BSP(), 2)
    gate.push(0, "a")
    gate.push(1, "b")
    gate.tick(1)
    assert gate.pull(1, "want") == []
    apply, answer = gate.leave(0)
    assert apply == Apply(0, ((0, "a"), (1, "b")))
    assert answer == Answer(1, 0, "want")
    gate.push(1, "c")
    assert gate.leave(1) == [Apply(1, ((1, "c"),))]


def test_wrong_orders_are_named():
    gate = ConsistencyGate(SSP(1), 2)
    gate.push(0)
    with pytest.raises(ProtocolError, match="worker 0: second push in clock 0"):
        gate.push(0)
    for _ in range(2):
        gate.tick(0)
    with pytest.raises(ProtocolError, match="before it was let in"):
        gate.push(0)
    gate.pull(0)
    with pytest.raises(ProtocolError, match="while its pull waits"):
        gate.tick(0)
    gate.leave(1)
    with pytest.raises(ProtocolError, match="after it has left"):
        gate.pull(1)


@pytest.mark.parametrize("bad", [-1, 1.5, "3", True, None])
def test_bad_staleness(bad):
    with pytest.raises(ConfigError, match="give an integer >= 0"):
        SSP(bad)


def test_simulation_of_equal_delays():
    delays = [[1.0] * 5 for _ in range(3)]
    for mode in (BSP(), SSP(2), ASP()):
        assert simulate(delays, mode).seconds == pytest.approx(5)
    assert simulate([[], []], BSP()).seconds == 0


def test_simulation_orders_the_modes():
    """One late step per worker, at different times: BSP pays for each, ASP for the worst."""
    delays = [[1.0] * 9 for _ in range(3)]
    for worker in range(3):
        delays[worker][3 * worker] = 5.0
    times = {mode: simulate(delays, mode).seconds for mode in (BSP(), SSP(1), SSP(8), ASP())}
    assert times[BSP()] == pytest.approx(6 + 3 * 5)
    assert times[ASP()] == pytest.approx(8 + 5)
    assert times[SSP(8)] == times[ASP()]
    assert times[ASP()] < times[SSP(1)] < times[BSP()]
    assert sum(simulate(delays, ASP()).waited) == 0
