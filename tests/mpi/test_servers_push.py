"""A push alone, of a large gradient: few pieces on the way, and no wait for a busy server."""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist.servers.wire import client_stream, node_share
from mpidist.servers.wire.wire_pieces import WINDOW

SIZE = 1 << 20  # 8 MiB in 8 pieces, which MPI does not buffer


def pushed(comm, monkeypatch, late, busy, placement="dedicated"):
    """Push to servers that are busy at first; return seconds of the push, and pieces on the way."""
    monkeypatch.setattr(client_stream, "LATE", late)
    monkeypatch.setattr(node_share, "enabled", False)
    flying, taken, handed = [0], 0.0, client_stream.CopiedPush.handed

    def counted(self):
        found = handed(self)
        flying.append(len(self._flying))
        return found

    monkeypatch.setattr(client_stream.CopiedPush, "handed", counted)
    start = {"a": np.zeros(SIZE), "b": np.zeros(3)}
    with md.ServerGroup(comm, servers=1, placement=placement) as group:
        client = group.add("m", start, optimizer=md.optim.sgd(1.0), consistency=md.ASP())
        comm.Barrier()
        if group.is_server:
            time.sleep(busy)
        if client is None:
            group.serve()
        elif comm.rank == 0:
            gradients = {"a": np.arange(SIZE, dtype="f8"), "b": np.ones(3)}
            began = time.perf_counter()
            client.push(gradients)
            taken = time.perf_counter() - began
            for gradient in gradients.values():
                gradient.fill(np.nan)  # the copies count
            client.clock()
            found, n = client.pull(), len(group.worker_ranks)
            assert (found["a"] == -np.arange(SIZE, dtype="f8") / n).all()
            assert (found["b"] == -1 / n).all()
    return taken, max(flying)


@pytest.mark.ranks(2)
def test_pieces_on_the_way_are_few(comm, monkeypatch):
    """Also while the server is busy; then the push waits for it."""
    _, flying = pushed(comm, monkeypatch, late=60, busy=0.1)
    if comm.rank == 0:
        assert 1 <= flying <= WINDOW


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_a_push_does_not_wait_for_a_busy_server(comm, monkeypatch, placement):
    """Colocated servers may be in a long computation: then MPI gets all pieces at once."""
    taken, flying = pushed(comm, monkeypatch, late=0.01, busy=0.6, placement=placement)
    if comm.rank == 0:
        assert taken < 0.5
        assert flying > WINDOW
