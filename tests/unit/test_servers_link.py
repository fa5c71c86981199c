"""Calls of a server group after a death, without any other rank."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpidist.errors import ProtocolError, RankFailure
from mpidist.runtime import ulfm
from mpidist.servers.link import GroupCall, Link


@pytest.fixture
def link(monkeypatch):
    context = SimpleNamespace(control=MPI.COMM_SELF, closed=False, failed=None)
    monkeypatch.setattr(ulfm, "current", SimpleNamespace())
    return Link(context, 0)


def test_a_death_that_the_program_has_caught_ends_the_next_call_too(link):
    """Not a ProtocolError, by which an elastic loop would end the job."""
    with suppress(RankFailure), GroupCall(link, "rebalance"):
        link.touched = True
        raise RankFailure("rank 3 has died", (3,))
    for _ in range(2):
        with pytest.raises(RankFailure, match="rank 3 has died"), GroupCall(link, "pull"):
            pass
    link.context.closed = True  # after the repair, an old client is a mistake of the program
    text = "failed earlier: rebalance was broken off by RankFailure"
    with pytest.raises(ProtocolError, match=text), GroupCall(link, "pull"):
        pass
