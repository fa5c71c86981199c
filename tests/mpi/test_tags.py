"""The tag and the header of a message identify the operation to which the message belongs."""

import itertools

import numpy as np
import pytest

import mpidist as md
from mpidist.collectives.engines import executor
from mpidist.collectives.engines.prepare_call import prepared
from mpidist.collectives.schedules import algorithms, tree
from mpidist.errors import MismatchError
from mpidist.runtime.agreement.mismatch import Signature
from mpidist.runtime.context import of

LEAST_TAG_UB = 32_767  # what the standard promises


@pytest.mark.ranks(3, further=(2,))
def test_handles_in_flight_have_tags_of_their_own(comm):
    """With the smallest tags there may be; waited for in another order than begun."""
    context = of(comm)
    context.tag_limit = LEAST_TAG_UB - 1
    for count in (24, 1000):
        vectors = [np.full(3, float(k + comm.rank)) for k in range(count)]
        handles = [md.iallreduce(comm, x) for x in vectors]
        assert len({handle.run.tag for handle in handles}) == count
        for handle in reversed(handles):
            handle.wait()
        ranks = comm.size * (comm.size - 1) / 2
        for k, x in enumerate(vectors):
            assert (x == comm.size * k + ranks).all()


def test_numbers_in_flight_never_share_a_tag():
    class Least:
        tag_limit = LEAST_TAG_UB - 1

    from mpidist.runtime.context import Context

    for first in (1, LEAST_TAG_UB - 500, 10**9):
        tags = [Context.tag(Least, number) for number in range(first, first + 1000)]
        assert len(set(tags)) == 1000
        assert 0 <= min(tags) <= max(tags) < LEAST_TAG_UB


def calls(comm):
    """Operations by name, all with messages under one number and different keys."""
    made = {f"sum {name}": (name, "sum", 6) for name in algorithms.ALLREDUCE}
    made["max ring"] = ("ring", "max", 6)
    made["long tree"] = ("tree", "sum", 6000)
    made["long ring"] = ("ring", "sum", 6000)

    def allreduce(name, op, n):
        return lambda: md.allreduce(comm, np.ones(n), op, algorithm=name)

    return {
        **{word: allreduce(*each) for word, each in made.items()},
        "broadcast 0": lambda: md.broadcast(comm, np.ones(6), root=0),
        "broadcast 1": lambda: md.broadcast(comm, np.ones(6), root=1),
        "reduce": lambda: md.reduce(comm, np.ones(6), root=0),
        "gather": lambda: md.gather(comm, np.ones(6), counts=[6] * comm.size),
        "allgather": lambda: md.allgather(comm, np.ones(6), counts=[6] * comm.size),
    }


PAIRS = [
    *itertools.combinations(
        ["sum ring", "sum tree", "sum butterfly", "sum two_hop", "max ring", "long tree",
         "long ring", "broadcast 0", "allgather"], 2),
    ("broadcast 0", "broadcast 1"), ("broadcast 1", "reduce"), ("gather", "broadcast 0"),
]  # fmt: skip


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("part", [0, 1])
def test_cached_plans_of_different_operations_never_meet(comm, monkeypatch, part):
    """All ranks raise: in the call, in the next one that is waited for, or when they leave."""
    import functools

    from mpidist.runtime import context, polling

    patient = functools.partial(polling.wait_until, patience=0.01)
    monkeypatch.setattr(context, "wait_until", patient)
    monkeypatch.setattr(executor, "GRACE", 0.03)  # the others have left by then, or never will
    for one, other in PAIRS[part::2]:
        alone = comm.Dup()
        known = calls(alone)
        for word in (one, other):
            known[word]()
        comm.Barrier()
        told = ""
        for call in (known[other if comm.rank == 1 else one], known["sum ring"]):
            try:
                call()
            except MismatchError as error:
                told = str(error)
        assert told, (one, other)
        comm.Barrier()


@pytest.mark.ranks(2)
def test_leaving_tells_of_calls_that_nobody_waited_for(comm):
    alone = comm.Dup()
    for root in (0, 1):
        md.broadcast(alone, np.ones(2), root=root)
    comm.Barrier()
    md.broadcast(alone, np.ones(2), root=comm.rank)
    with pytest.raises(MismatchError, match=r"earlier.*md.free found it"):
        md.free(alone)


@pytest.mark.ranks(2)
def test_two_ufuncs_of_one_name(comm):
    """They are two operations, each with a program of its own, though ranks compare names."""
    signature, build = Signature("reduce", "float64", "(3,)", "mine", "tree"), tree.reduce
    for ufunc in (np.add, np.multiply, np.add):
        plan = prepared(of(comm), signature, build, 3, np.float64, ufunc, root=0)
        assert plan.engine.ufunc is ufunc
    assert len(of(comm).plans) == 2


@pytest.mark.ranks(1, 2, 3)
def test_known_lengths_cost_no_exchange(comm):
    """With counts nothing else is sent; without, one exchange, which is the agreement too."""
    counts = [r + 1 for r in range(comm.size)]
    x = np.full(comm.rank + 1, comm.rank)
    context = of(comm)
    for given, operations in ((counts, 1), (None, 2)):
        md.allgather(comm, x, counts=given)
        before = context.sequence
        whole = md.allgather(comm, x, counts=given)
        assert (whole == np.repeat(range(comm.size), counts)).all()
        assert context.sequence - before == (operations if comm.size > 1 else 1)


@pytest.mark.ranks(1, 2)
def test_scratch_for_all_vectors_is_refused(comm, monkeypatch):
    monkeypatch.setattr(algorithms, "MAX_SCRATCH", 1)
    for name in ("direct", "naive"):
        if comm.size > 1:
            with pytest.raises(md.ConfigError, match=r"GiB of scratch"):
                md.allreduce(comm, np.ones(99), algorithm=name)
    assert md.allreduce(comm, np.ones(2), algorithm="ring")[0] == comm.size
