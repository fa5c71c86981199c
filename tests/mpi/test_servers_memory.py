"""The parts of shared memory within a host: when an update waits, and how pushes are read."""

import time

import numpy as np
import pytest

from mpidist.runtime.context import of
from mpidist.runtime.node_memory.cross_memory import CrossMemory
from mpidist.runtime.topology import topology_of
from mpidist.servers.layout.placement import place_tensors
from mpidist.servers.layout.routing import WholeShard
from mpidist.servers.link import Link
from mpidist.servers.pieces.memory_push import MemoryPush, addresses_of
from mpidist.servers.wire import node_stream
from mpidist.servers.wire.node_share import NodePair
from mpidist.servers.wire.node_stream import COPIED, ENDS, FIRST, READY, NodeReaders
from mpidist.servers.wire.wire_pieces import cut_shard


def lines_of_a_pair():
    lines = [memoryview(np.zeros(64, np.uint8)).cast("q") for _ in range(2)]
    return NodePair(lines[0], lines[1], None, None, [], {})


@pytest.mark.ranks(1)
def test_an_update_waits_for_readers(comm, monkeypatch):
    """As long as they go on; then the others get the rest of this version, once, in messages."""
    begun, link = [], object()

    class Pulls:
        def begin(self, *what):
            begun.append(what)

    monkeypatch.setattr(node_stream, "PATIENCE", 0.02)
    readers, pairs = NodeReaders(3), [lines_of_a_pair() for _ in range(2)]
    assert readers.leave_memory(link, Pulls())
    for rank, pair in enumerate(pairs):
        readers.add(rank, pair, 3, 1)
    assert pairs[0].answered[READY] == 1
    for copied in range(3):
        pairs[1].rung[COPIED] = copied
        time.sleep(0.015)  # all in all longer than `PATIENCE`
        assert not readers.leave_memory(link, Pulls())
    pairs[1].rung[COPIED], pairs[0].rung[COPIED] = 3, 1
    assert not readers.leave_memory(link, Pulls())
    time.sleep(0.03)
    assert readers.leave_memory(link, Pulls())
    assert begun == [(link, 0, 1)]
    assert pairs[0].answered[ENDS] == 3
    assert pairs[0].answered[FIRST] == 3 * (1 << 20) + 1
    assert not pairs[1].answered[ENDS]
    assert readers.leave_memory(link, Pulls())
    assert len(begun) == 1
    pairs[0].rung[COPIED] = 3
    readers.add(0, pairs[0], 3, 3)
    assert not readers.leave_memory(link, Pulls())


@pytest.mark.ranks(1)
def test_a_push_beyond_its_answer_is_copied(comm):
    """Before that, each piece is read once, where it is, and spans of a piece keep their places."""
    context = of(comm)
    layout = place_tensors({"a": ((5,), "f4"), "b": ((40,), "f8"), "c": ((), "f8")}, 1)
    whole = WholeShard(layout, 0)
    gradients = {t.name: np.arange(t.size, dtype=t.dtype) for t in layout.tensors}
    link = Link(context, 0)
    pieces = cut_shard(layout, 0, 100)
    cross = CrossMemory(topology_of(comm).intra_comm, context.wait)
    found = addresses_of(cross, whole, gradients)
    assert found is not None
    given = whole, pieces, found.tolist()
    # As memory that is pinned for a GPU: the kernel cannot read it.
    cross.holds, holds = lambda address, nbytes: False, cross.holds
    assert addresses_of(cross, whole, gradients) is None
    cross.holds = holds

    def values(push):
        found = {}
        for number, piece in enumerate(pieces):
            for tensor, start, stop, at in piece.spans:
                name, _, dtype, *_ = layout.tensors[tensor]
                raw = push.piece(number)[at : at + (stop - start) * dtype.itemsize]
                found.setdefault(name, []).append(raw.view(dtype).copy())
            push.use()
        return {name: np.concatenate(each) for name, each in found.items()}

    pushes = [MemoryPush(link, 0, cross, 0, *given) for _ in range(2)]
    pushes[1].keep()
    assert len(pieces) > 2
    for push in pushes:
        assert push.here() == len(pieces)
        for name, seen in values(push).items():
            assert (seen == np.arange(len(seen))).all()
            assert len(seen) == gradients[name].size
        for gradient in gradients.values():
            gradient[...] = -1
