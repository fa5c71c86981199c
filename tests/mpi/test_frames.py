"""Count the frames of mpidist on the stack when MPI is called (HOUSE.md, rule 3)."""

import numpy as np
import pytest
from frames import Recorded, deepest, note, recorded

import mpidist as md
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.runtime import polling
from mpidist.runtime.context import of

NATIVE, ARENA, SCHEDULE, TRAIN_ADDS = 4, 4, 7, 4

#: Calls that carry data, or agree on it; not those that ask whether it is there.
DATA = ("Isend", "Irecv", "Allreduce", "Start")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A rank that waits for long sends its status, which is no part of the call that waits."""
    monkeypatch.setattr(polling, "PATIENCE", 30.0)


def depth_of(call, *calls):
    """The most frames of the second of two calls: the first one makes the plan."""
    call()
    with recorded() as notes:
        call()
    found = deepest(notes, *(calls or DATA))
    assert found, "no call of MPI was noted"
    return found


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("n", [10, 100_000])
def test_native(comm, n):
    alone = Recorded(comm.Dup())
    x = np.ones(n)
    assert depth_of(lambda: md.allreduce(alone, x, algorithm="native")) <= NATIVE
    md.free(alone)


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("n", [10, 100_000])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "butterfly", "two_hop", "ordered"])
def test_a_schedule(comm, algorithm, n):
    """A short first message carries its header, a long one has it sent ahead."""
    alone = Recorded(comm.Dup())
    x = np.ones(n)
    assert depth_of(lambda: md.allreduce(alone, x, algorithm=algorithm)) <= SCHEDULE
    assert depth_of(lambda: md.iallreduce(alone, x, algorithm=algorithm).wait()) <= SCHEDULE + 1
    md.free(alone)


@pytest.mark.ranks(4)
def test_lanes_between_nodes(comm):
    """Of a private vector and of an arena: no deeper than any other schedule."""
    alone = Recorded(comm.Dup())
    memory_of(of(alone), 2)
    x = np.ones(100_000)
    assert depth_of(lambda: md.allreduce(alone, x, algorithm="hierarchical")) <= SCHEDULE
    with md.Arena(alone, {"x": (100_000, "f8")}, ranks_per_node=2) as arena:
        assert depth_of(lambda: md.allreduce(alone, arena)) <= SCHEDULE
    md.free(alone)


class Ufunc:
    """A ufunc that is noted as a call of MPI would be: inside a node nothing else is called."""

    def __init__(self, ufunc):
        self.ufunc = ufunc

    def __call__(self, *args, **kwargs):
        note("ufunc")
        return self.ufunc(*args, **kwargs)


@pytest.mark.ranks(2, 3)
def test_an_arena_of_one_node(comm):
    """No message is sent: what is counted is where its vectors are added."""
    with md.Arena(comm, {"x": (100_000, "f8")}) as arena:
        md.allreduce(comm, arena)
        ((plan,),) = arena.plans.values()
        plan.engine.ufunc = Ufunc(plan.engine.ufunc)
        assert depth_of(lambda: md.allreduce(comm, arena), "ufunc") <= ARENA


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_train_adds_little(comm, algorithm):
    """Over `md.allreduce` of an arena with the same algorithm."""
    alone = Recorded(comm.Dup())
    rng = np.random.default_rng(1)
    data = rng.normal(size=(24, 30)).astype("f4"), np.arange(24) % 3
    model = md.models.mlp([30, 40, 3], seed=0)
    seen = []

    def callback(step):
        if step.step > 2:
            seen.append(deepest(notes, "Isend", "Irecv", "Allreduce"))
        notes.clear()

    with recorded() as notes:
        md.train(
            alone, model, data, optimizer=md.optim.sgd(0.1), global_batch=12, steps=5,
            strategy=md.AllReduce(algorithm=algorithm, overlap=False), callbacks=[callback],
        )  # fmt: skip
    with md.Arena(alone, {"x": (2000, "f4")}) as arena:
        alone_depth = depth_of(lambda: md.allreduce(alone, arena, algorithm=algorithm))
    # What is sent while a rank waits for a late message is a frame deeper, and may be in few calls.
    most = {"native": NATIVE, "ring": SCHEDULE}[algorithm]
    assert 0 < alone_depth <= most
    assert 0 < max(seen) <= most + TRAIN_ADDS
    md.free(alone)
