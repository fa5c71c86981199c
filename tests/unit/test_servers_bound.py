"""Updates bound to memory that is used again: the bits of plain ones, whatever is replaced."""

import copy
import dataclasses
import functools
import pickle

import numpy as np
import pytest

from mpidist import optim
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.layout.routing import WholeParts, WholeShard
from mpidist.servers.protocol import HEADER_BYTES, MessagePool
from mpidist.servers.shards import ServerShard
from mpidist.servers.wire import bound_update

LAYOUT = place_tensors({"x": ((7,), "f4"), "y": ((3, 2), "f8")}, 1)


def shard(optimizer):
    inits = {"x": ("normal", 1.0), "y": ("constant", 0.5)}
    return ServerShard(LAYOUT, 0, optimizer, inits, 0)


def bits(one):
    leaves = [*one.parameters.items(), *one.leaves()]
    return [(path, np.asarray(leaf).tobytes()) for path, leaf in leaves], one.version


@pytest.fixture
def made(monkeypatch):
    """Whether each update of `BoundGradients.apply` was a bound one."""
    found, apply = [], bound_update.BoundGradients.apply

    def noted(self, *args):
        found.append(apply(self, *args))
        return found[-1]

    monkeypatch.setattr(bound_update.BoundGradients, "apply", noted)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_memory_that_comes_again(made, workers):
    """Pushes in kept memory and in new memory, with another optimizer and a restored state."""
    (ours, theirs), whole = (shard(optim.adam(0.1)) for _ in "ab"), WholeShard(LAYOUT, 0)
    rng, memory = np.random.default_rng(0), np.zeros((workers, whole.nbytes), np.uint8)
    kept = [WholeParts(whole.views(room, 0)) for room in memory]
    for step in range(12):
        for parts in kept:
            for _, view in parts:
                view[...] = rng.standard_normal(view.size)
        copies = memory.copy()
        if step == 4:
            for each in (ours, theirs):
                each.use(optim.adam(0.2))
        elif step == 6:
            for each in (ours, theirs):
                each.state = each.fresh_state(optim.momentum(0.1))
                each.use(optim.momentum(0.1))
        elif step == 8:  # as if a user's optimizer or a move had made a new array
            ours.parameters["x"] = ours.parameters["x"].copy()
        elif step == 10:
            for each in (ours, theirs):
                saved = each.export()
                saved["scalars"] = {name: leaf + 1 for name, leaf in saved["scalars"].items()}
                each.load(saved)
        share, weight = 1 / workers, (1.0, 0.5)[step % 2]
        ours.apply([(share, parts) for parts in kept], weight)
        theirs.apply([(share, whole.views(room, 0)) for room in copies], weight)
        assert bits(ours) == bits(theirs), step
    assert made.count(True) >= 4


def test_an_optimizer_of_a_user(made):
    """An optimizer without bound updates makes its own, and may make new arrays."""

    class Plain:
        elementwise = True

        def init(self, parameters):
            return {}

        def update(self, gradients, state, parameters):
            for key in parameters:
                parameters[key] = parameters[key] - gradients[key]

    one, parts = shard(Plain()), None
    room = np.zeros(WholeShard(LAYOUT, 0).nbytes, np.uint8)
    parts = WholeParts(WholeShard(LAYOUT, 0).views(room, 0))
    before = one.parameters["x"].copy()
    for _ in range(4):
        parts[0][1][...] = 1
        one.apply([(1.0, parts)])
    assert (one.parameters["x"] == before - 1 - 1 - 1 - 1).all()
    assert made == [False] * 4


def test_a_function_around_an_update(made):
    """`functools.wraps` copies the attribute `bind`, but the function does more than the update."""
    base = optim.sgd(0.5)

    @functools.wraps(base.update)
    def update(gradients, state, parameters, **kw):
        base.update({name: 2 * each for name, each in gradients.items()}, state, parameters, **kw)

    one, whole = shard(dataclasses.replace(base, update=update)), WholeShard(LAYOUT, 0)
    memory = np.zeros(whole.nbytes, np.uint8)
    kept = WholeParts(whole.views(memory, 0))
    for _, gradient in kept:
        gradient[...] = 1
    before = one.parameters["x"].copy()
    for step in range(1, 4):
        one.apply([(1.0, kept)], 1.0)
        np.testing.assert_array_equal(one.parameters["x"], before - np.float32(step))
    assert not any(made)


def test_copies_of_an_optimizer():
    """A copy keeps functions of the program; by name and settings it cannot be sent."""
    calls = []
    own = dataclasses.replace(optim.sgd(0.5), update=lambda *args, **kw: calls.append(args))
    assert copy.deepcopy(own).update is own.update
    assert copy.deepcopy(optim.sgd(lambda step: 0.5)).name == "sgd"
    with pytest.raises(TypeError, match="sgd has functions of the program"):
        pickle.dumps(own)
    for each in (optim.sgd(0.5), optim.adam(0.1), optim.clipped(optim.momentum(0.1), 1.0)):
        assert pickle.loads(pickle.dumps(each)).settings == each.settings


def test_views_of_pooled_buffers():
    """The views are of the very buffer, also after a longer one, and of few buffers only."""
    pool, whole = MessagePool(2), WholeShard(LAYOUT, 0)
    total = HEADER_BYTES + whole.nbytes
    first = pool.take(total)
    views = whole.kept_views(first, HEADER_BYTES)
    pool.give(first)
    again = pool.take(total)
    assert whole.kept_views(again, HEADER_BYTES) is views
    again[:] = 1
    assert all((view.view(np.uint8) == 1).all() for _, view in views)
    with pytest.raises(Exception, match="message ends before"):
        whole.kept_views(again[:-8], HEADER_BYTES)
    assert whole.kept_views(again, HEADER_BYTES - 8) is not views
    large = np.zeros(1 << 20, np.uint8)[:total]
    assert whole.kept_views(large, HEADER_BYTES) is not whole.kept_views(large, HEADER_BYTES)
    held = [np.zeros(4096, np.uint8) for _ in range(40)]
    for buffer in held:
        whole.kept_views(buffer[:total], HEADER_BYTES)
    assert len(whole._kept) <= 16
