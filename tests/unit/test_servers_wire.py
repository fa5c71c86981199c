"""Pieces of pushes and answers, without MPI: shards are cut well, and no order of events locks."""

import itertools

import numpy as np
import pytest

from mpidist import optim
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.layout.routing import WholeShard
from mpidist.servers.shards import updates_in_pieces
from mpidist.servers.wire import wire_pieces
from mpidist.servers.wire.client_stream import can_share
from mpidist.servers.wire.trial_update import has_the_same_bits
from mpidist.servers.wire.wire_pieces import WINDOW, allowed, cut_shard, piece_limit


def memory_place(view, memory):
    return view.__array_interface__["data"][0] - memory.__array_interface__["data"][0]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
@pytest.mark.parametrize("limit", [1, 8, 64, 100, 4096, 1 << 20])
def test_each_element_is_in_one_piece(servers, limit):
    """All that a server holds, in order and once; a piece is as long as its spans."""
    specs = {
        "a": ((300, 7), "f4"),
        "b": ((3,), "f2"),
        "c": ((), "f8"),
        "d": ((0, 4), "f4"),
        "e": ((1001,), "f8"),
        "f": ((5,), "f4"),
    }
    layout = place_tensors(specs, servers)
    for server in range(servers):
        pieces = cut_shard(layout, server, limit)
        starts = {tensor: start for tensor, start, _ in layout.pieces[server]}
        covered, shard = dict(starts), WholeShard(layout, server)
        memory = np.zeros(shard.nbytes, np.uint8)
        offsets = {
            part.piece.tensor: memory_place(view, memory) for part, view in shard.views(memory, 0)
        }
        for piece in pieces:
            end = 0
            for tensor, start, stop, at in piece.spans:
                assert start == covered[tensor] < stop
                covered[tensor] = stop
                assert at >= end
                assert at % 8 == 0
                end = at + (stop - start) * layout.tensors[tensor].dtype.itemsize
            assert piece.nbytes == end
            assert end <= max(8, limit)
            # The same bytes lie there in a whole message.
            for tensor, start, _, at in piece.spans:
                first = offsets[tensor] - layout.tensors[tensor].dtype.itemsize * starts[tensor]
                assert piece.start + at == first + start * layout.tensors[tensor].dtype.itemsize
        for tensor, _, stop in layout.pieces[server]:
            assert covered[tensor] == stop


def test_long_tensors_have_pieces_of_their_own():
    """They are sent from where they lie, so only short tensors are copied."""
    layout = place_tensors({"a": ((1000,), "f4"), "b": ((4,), "f4"), "c": ((4,), "f4")}, 1)
    pieces = cut_shard(layout, 0, 1024)
    names = [[layout.tensors[span.tensor].name for span in piece.spans] for piece in pieces]
    assert names == [["a"], ["a"], ["a"], ["a", "b", "c"]]
    layout = place_tensors({"a": ((4,), "f4"), "b": ((1000,), "f4"), "c": ((4,), "f4")}, 1)
    names = [[span.tensor for span in piece.spans] for piece in cut_shard(layout, 0, 1000)]
    assert names == [[0], [1], [1], [1], [1], [2]]


def test_the_size_of_a_piece():
    """Between nodes 32 to 256 KiB; within one an eighth of the shard, up to 1 MiB."""
    for nbytes in (0, 1 << 20, 1 << 40):
        assert 32 << 10 <= piece_limit({"a", "b"}, nbytes) <= 256 << 10
    sizes = [piece_limit({"a"}, nbytes) for nbytes in (0, 1 << 20, 4 << 20, 8 << 20, 1 << 30)]
    assert sizes == [256 << 10, 256 << 10, 512 << 10, 1 << 20, 1 << 20]


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(("workers", "pieces"), [(1, 5), (2, 4), (3, 3)])
def test_no_order_of_events_locks(monkeypatch, window, workers, pieces):
    """In every order of arrivals: at most `WINDOW` on the way, each piece once, and an end."""
    monkeypatch.setattr(wire_pieces, "WINDOW", window)
    # For each worker: pieces sent, pieces here, answers sent, answers here.
    start = ((0, 0, 0, 0),) * workers
    seen, todo, ended = {start}, [start], 0
    while todo:
        state = todo.pop()
        following = []
        for k, (sent, here, answered, back) in enumerate(state):
            assert sent - back <= window
            assert answered - back <= window
            # Memory of piece i at the server is used again for piece i + window.
            assert sent - answered <= window
            after = list(state)
            if allowed(pieces, sent, back):
                after[k] = (sent + 1, here, answered, back)
                following.append(tuple(after))
            if here < sent:
                after[k] = (sent, here + 1, answered, back)
                following.append(tuple(after))
            if back < answered:
                after[k] = (sent, here, answered, back + 1)
                following.append(tuple(after))
        if all(here > answered for _, here, answered, _ in state):
            following.append(tuple((s, h, a + 1, b) for s, h, a, b in state))
        if not following:
            assert state == ((pieces,) * 4,) * workers
            ended += 1
        for each in following:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    assert ended == 1


def test_what_is_allowed():
    """No piece twice, none beyond the last."""
    for pieces, begun, done in itertools.product(range(7), range(7), range(7)):
        if done <= begun <= pieces:
            found = list(allowed(pieces, begun, done))
            assert found == [k for k in range(begun, pieces) if k < done + WINDOW]


def test_gradients_and_answers_in_the_same_memory():
    """One array may be both, but not a shifted one, nor that of another tensor."""
    memory = np.zeros(100)
    a, b = memory[:40], memory[40:80]
    assert can_share({"a": a, "b": b}, {"a": a, "b": b})
    assert can_share({"a": a, "b": b}, {"a": np.zeros(40), "b": np.zeros(40)})
    assert can_share({"a": a}, {"a": b})
    assert not can_share({"a": a, "b": b}, {"a": b, "b": a})
    assert not can_share({"a": memory[1:41]}, {"a": a})
    assert not can_share({"a": a}, {"a": memory[1:41]})
    assert can_share({"a": a, "b": a}, {"a": b, "b": memory[80:]})
    assert not can_share({"a": a, "b": a}, {"a": a, "b": b})
    assert can_share({"a": a, "z": memory[:0]}, {"a": a, "z": memory[:0]})


class PerTensor:
    """An optimizer that counts the updates of each tensor, which pieces would count too often."""

    elementwise = True

    def init(self, parameters):
        return {"count": {name: np.zeros((), np.int64) for name in parameters}}

    def update(self, gradients, state, parameters):
        raise NotImplementedError


class PlainNumber(PerTensor):
    def init(self, parameters):
        return {"count": 0}


class CountsItself(PerTensor):
    """The rate depends on how often `update` was called."""

    def __init__(self):
        self.updates = 0

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters):
        self.updates += 1
        for name in parameters:
            parameters[name] -= gradients[name] / self.updates


class FillsItsState(CountsItself):
    """The state is made by the first update."""

    def update(self, gradients, state, parameters):
        for name in parameters:
            state.setdefault(name, np.zeros_like(gradients[name]))
            state[name] += gradients[name]
            parameters[name] -= state[name]


class NeedsTheWhole(CountsItself):
    """The norm of one piece is not that of all."""

    def update(self, gradients, state, parameters):
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        for name in parameters:
            parameters[name] -= gradients[name] / norm


class HasNoCopy(PerTensor):
    def init(self, parameters):
        return {}

    def __deepcopy__(self, memo):
        raise TypeError("no copy of this")


def test_optimizers_that_update_in_pieces():
    """Arrays like the parameters, and scalars of the whole update."""
    schedule = optim.cosine(0.1, steps=2)
    for rate in (0.1, schedule):
        for make in (optim.sgd, optim.momentum, optim.adam, optim.adagrad, optim.ftrl):
            assert updates_in_pieces(make(rate))
            assert has_the_same_bits(make(rate))
    for other in (PerTensor, PlainNumber):
        assert not updates_in_pieces(other())
    for other in (PerTensor, CountsItself, FillsItsState, NeedsTheWhole, HasNoCopy):
        assert not has_the_same_bits(other())


def test_a_trial_leaves_an_optimizer_as_it_is():
    """The trial works on copies."""
    optimizer = CountsItself()
    has_the_same_bits(optimizer)
    assert optimizer.updates == 0
