"""The consistency modes, tested with every order of events of 3 workers (R66, R67, R68)."""

import copy

import pytest

from mpidist.errors import ConfigError, ProtocolError
from mpidist.servers.consistency import ASP, BSP, SSP, Answer, Apply, ConsistencyGate, simulate

STEPS = ("pull", "push", "tick")


class World:
    """Workers that pull, push and tick for a number of clocks, then leave, on one gate."""

    def __init__(self, consistency, clocks):
        self.gate = ConsistencyGate(consistency, len(clocks))
        self.clocks = clocks
        self.position = [0] * len(clocks)
        self.blocked = [False] * len(clocks)
        self.applied = []  # (clock, workers) of every update, in order

    def key(self):
        # The order of past updates matters for the future only through the gate.
        gate = self.gate
        held = tuple((c, tuple(sorted(h))) for c, h in sorted(gate.held.items()))
        return (
            tuple(self.position),
            tuple(self.blocked),
            held,
            tuple(gate.waiting),
            tuple(sorted(self.applied)),
        )

    def done(self, worker):
        return self.position[worker] > 3 * self.clocks[worker]

    def able(self):
        return [w for w in range(len(self.clocks)) if not self.blocked[w] and not self.done(w)]

    def step(self, worker):
        position = self.position[worker]
        clock, kind = divmod(position, 3)
        self.position[worker] += 1
        if clock == self.clocks[worker]:
            actions = self.gate.leave(worker)
        elif STEPS[kind] == "pull":
            self.blocked[worker] = True
            actions = self.gate.pull(worker, clock)
        elif STEPS[kind] == "push":
            actions = self.gate.push(worker, (worker, clock))
        else:
            actions = self.gate.tick(worker)
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action):
        consistency = self.gate.consistency
        live = [w for w in range(len(self.clocks)) if self.gate.live[w]]
        slowest = min((self.gate.clocks[w] for w in live), default=None)
        if isinstance(action, Apply):
            workers = [w for w, _ in action.pushes]
            assert workers == sorted(workers)
            assert all(item == (w, action.clock) for w, item in action.pushes)
            if consistency.holds:
                # Nobody still working in this clock may see it.
                assert slowest is None or slowest > action.clock
            self.applied.append((action.clock, tuple(workers)))
            return
        assert isinstance(action, Answer)
        clock = self.gate.clocks[action.worker]
        assert action.item == clock
        assert action.gap == clock - slowest
        self.blocked[action.worker] = False
        seen = {(w, c) for c, workers in self.applied for w in workers}
        if consistency.bound is not None:
            assert action.gap <= consistency.bound
            # Everything up to clock c - s - 1 is in what this worker now reads.
            for w, n in enumerate(self.clocks):
                for c in range(min(n, clock - consistency.bound)):
                    assert (w, c) in seen
        if consistency.holds:
            # And nothing from its own clock or later: the exact super-step.
            assert all(c < clock for _, c in seen)
        # Its own pushes are always visible once no clock holds them.
        assert {(action.worker, c) for c in range(clock)} <= seen


def explore(consistency, clocks):
    """Visit every reachable state; return the final ones, and the worst gap met."""
    start = World(consistency, clocks)
    stack, seen, finals, worst = [start], {start.key()}, [], 0
    while stack:
        world = stack.pop()
        able = world.able()
        if not able:
            # No deadlock: if nobody can move then everybody is done.
            assert all(world.done(w) for w in range(len(clocks))), world.key()
            finals.append(world)
            continue
        working = [world.gate.clocks[w] for w in able]
        live = [world.gate.clocks[w] for w in range(len(clocks)) if world.gate.live[w]]
        entered = [c for w, c in zip(able, working, strict=True) if world.position[w] % 3]
        if entered:
            worst = max(worst, max(entered) - min(live))
        for worker in able:
            after = copy.deepcopy(world)
            after.step(worker)
            if after.key() not in seen:
                seen.add(after.key())
                stack.append(after)
    return finals, worst, len(seen)


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
