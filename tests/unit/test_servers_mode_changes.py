"""Consistency modes that change in training, in every order of events (R66 to R69)."""

import itertools
import json

import pytest
from gate_worlds import ChangingWorld, Choices, explore_from

import mpidist as md
from mpidist.errors import ConfigError, ProtocolError
from mpidist.servers.consistency import Answer, Apply, ConsistencyGate
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.model_facts import Request
from mpidist.servers.modes.agreed_changes import decode_mode, encode_mode
from mpidist.servers.modes.changing_gate import ChangingGate
from mpidist.servers.modes.hosted_model import Hosted
from mpidist.servers.modes.optimizer_changes import encode_optimizer
from mpidist.servers.shards import ServerShard

MODES = [md.BSP(), md.SSP(0), md.SSP(1), md.SSP(2), md.DSSP(0, 1), md.ASP()]


def check(world, every):
    finals, worst, states = explore_from(world)
    assert finals
    for one in finals:
        assert sorted((w, c) for c, workers in one.applied for w in workers) == every
        assert not one.gate.held
        assert not one.gate.waiting
        assert sum(one.gate.gaps.values()) == sum(one.clocks)
    return worst, states


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(MODES, 2)), ids=str)
def test_every_order_of_events_around_a_change(first, second):
    """Each push is applied once, each clock keeps its own bound, no deadlock, in every order."""
    clocks = (3, 2, 1)
    world = ChangingWorld(first, clocks, {0: second}, Choices(), late={1})
    _, states = check(world, sorted((w, c) for w, n in enumerate(clocks) for c in range(n)))
    assert states > 50


@pytest.mark.parametrize(
    "third",
    [pytest.param(m, marks=[pytest.mark.exhaustive] * isinstance(m, md.SSP)) for m in MODES],
    ids=str,
)
def test_changes_in_two_clocks(third):
    clocks = (3, 3)
    for first, second in itertools.permutations(MODES, 2):
        if second != third:
            world = ChangingWorld(first, clocks, {0: second, 1: third}, Choices(), late={0})
            check(world, [(w, c) for w in (0, 1) for c in range(3)])


@pytest.mark.parametrize("wrong", [(0, 1), (1, 1)])
@pytest.mark.parametrize("modes", [(md.ASP(), md.BSP()), (md.BSP(), md.SSP(2))], ids=str)
def test_a_worker_without_the_change_is_found_in_every_order(modes, wrong):
    """No order of events ends: all workers get an error, and none before somebody is wrong."""
    first, second = modes
    stack, seen, errors = [ChangingWorld(first, (3, 3), {1: second}, wrong=wrong)], set(), 0
    while stack:
        world = stack.pop()
        able = world.able()
        assert able  # the end, or a deadlock, without an error
        for worker in able:
            after = ChangingWorld(first, (3, 3), {1: second}, wrong=wrong)
            # Worlds are small: repeat the events instead of a copy.
            after.history = [*getattr(world, "history", []), worker]
            try:
                for each in after.history:
                    after.step(each)
            except ProtocolError as error:
                errors += "without the change to consistency" in str(error)
                continue
            if after.key() not in seen:
                seen.add(after.key())
                stack.append(after)
    assert errors


def test_different_modes_are_refused():
    world = ChangingWorld(md.ASP(), (2, 2), {0: md.BSP()})
    world.events[1][1] = (0, encode_mode(md.SSP(2)))
    for worker in (0, 0, 1):
        world.step(worker)
    with pytest.raises(
        ProtocolError, match=r"rank 1 asks for consistency SSP\(staleness=2\), rank"
    ):
        world.step(1)


def test_the_first_clock_after_bsp_waits_for_all():
    """A worker that could go on under SSP waits, because its push is held under BSP."""
    gate = ChangingGate(ConsistencyGate(md.BSP(), 2))
    gate.change(md.SSP(2), 1)
    gate.push(0, "a")
    gate.tick(0)
    assert gate.pull(0) == []
    assert gate.blockers(0) == ([1], 1)
    gate.push(1, "b")
    assert gate.tick(1) == [Apply(0, ((0, "a"), (1, "b"))), Answer(0, 0, None)]
    for _ in range(2):  # and then it is SSP(2)
        assert gate.push(0, "c") == [Apply(gate.clocks[0], ((0, "c"),))]
        gate.tick(0)
        assert gate.pull(0)
    gate.tick(0)
    assert gate.pull(0) == []
    assert gate.blockers(0) == ([1], 1)


def test_dssp_measures_only_its_own_clocks():
    time = [0.0]
    gate = ChangingGate(ConsistencyGate(md.ASP(), 1), now=lambda: time[0])
    gate.change(md.DSSP(1, 2), 1)
    gate.change(md.ASP(), 3)
    for seconds in (1.0, 2.0, 4.0, 8.0):
        gate.pull(0)
        time[0] += seconds
        gate.tick(0)
    assert list(gate._gates[1].work[0]) == [2.0, 4.0]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_modes_travel_as_text(mode):
    assert decode_mode(encode_mode(mode)) == mode
    assert json.loads(encode_mode(mode))["name"] == type(mode).__name__


def test_other_modes_do_not_change():
    for mode in (md.BackupWorkers(1), type("Own", (md.SSP,), {})(2)):
        with pytest.raises(ConfigError, match="may change between BSP, SSP, DSSP and ASP"):
            encode_mode(mode)


class Rate:
    """An optimizer of the user's own; workers compare its settings, and `_worker` is none."""

    elementwise = True

    def __init__(self, worker):
        self._worker = worker

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters):
        pass


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_servers_use_the_optimizer_of_the_same_worker(order):
    """Whatever order the messages of the workers have on a server."""
    layout = place_tensors({"w": ((4,), "f8")}, 1)
    asked = Request("m", {}, md.optim.sgd(1.0), md.BSP())
    model = Hosted(asked, ServerShard(layout, 0, asked.optimizer, {}, 0), 3)
    for worker in order:
        model.changes.hear(worker, encode_optimizer("m", layout, Rate(worker)), [4, 5, 6])
    (change,) = model.changes.due()
    change.work()
    assert model.shard.optimizer._worker == 0
