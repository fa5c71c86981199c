"""Calls of a server group after a death, without any other rank."""

import gc
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpidist.errors import ProtocolError, RankFailure
from mpidist.runtime import ulfm
from mpidist.servers.deadlock import check_stuck
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


def test_a_link_that_is_kept_after_a_death_keeps_nothing_of_the_run(link):
    """MPI may still write into its buffers; the traceback would keep the model, too."""
    models = []

    def fail():
        models.append(weakref.ref(model := Link(link.context, 1)))
        raise RankFailure(f"rank 3 has died in {model.tag}", (3,))

    with suppress(RankFailure), GroupCall(link, "pull"):
        link.touched = True
        fail()
    with suppress(RankFailure), GroupCall(link, "pull"):
        pass
    gc.collect()
    assert [model() for model in models] == [None]


def test_one_thread_at_a_time_receives_statuses():
    """Threads may wait in two groups of one communicator; both would receive the same message."""
    quiet, seen = threading.Lock(), []
    statuses = SimpleNamespace(
        quiet=quiet, listen=lambda: seen.append(quiet.locked()), known=lambda rank: None
    )
    check_stuck(SimpleNamespace(size=2, statuses=statuses), None, [1], lambda: False)
    assert seen == [True]
    assert not quiet.locked()
