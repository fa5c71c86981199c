"""If ranks disagree or break off an exchange of gradients, all get an error, and no partial sum."""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import ConfigError, MismatchError, MpidistError, ProtocolError
from mpidist.gradients.exchange import Gradients
from mpidist.runtime.context import of

NAMES = ["a", "b", "c", "d"]
BACKWARD = NAMES[::-1]


def parameters(n=600, dtype="f4"):
    return {name: np.zeros(n, dtype) for name in NAMES}


class Odd:
    def __repr__(self):
        raise RuntimeError("no text")


#: (what rank 1 gives, the error of all, what it names); the others give the defaults.
OTHERS = {
    "no mapping": ({"parameters": [np.zeros(3)]}, ConfigError, "mapping of name -> array"),
    "nothing": ({"parameters": {}}, ConfigError, "one array at least"),
    "no array": ({"parameters": {**parameters(), "b": [1.0]}}, ConfigError, "parameter 'b'"),
    "whole numbers": (
        {"parameters": {**parameters(), "b": np.zeros(600, "i4")}}, ConfigError, "'b' is int32"
    ),
    "no name": ({"parameters": {3: np.zeros(3)}}, ConfigError, "parameter 3"),
    "a name": ({"parameters": dict(zip("axcd", parameters().values(), strict=True))},
               MismatchError, "parameter 1 differs: .*'x'"),
    "a shape": ({"parameters": {**parameters(), "c": np.zeros(5, "f4")}},
                MismatchError, r"parameter 2 differs: .*'c', \(5,\)"),
    "a dtype": ({"parameters": {**parameters(), "d": np.zeros(600, "f8")}},
                MismatchError, "parameter 3 differs.*float64"),
    "the order": ({"parameters": dict(reversed(parameters().items()))},
                  MismatchError, "parameter 0 differs: .*'d'"),
    "one more": ({"parameters": {**parameters(), "e": np.zeros(5, "f4")}},
                 MismatchError, "parameter 4 differs: .*'e'.* nothing"),
    "algorithm": ({"algorithm": "ring"}, MismatchError, "algorithm differs: .*'ring'"),
    "no algorithm": ({"algorithm": "rong"}, ConfigError, "'rong'"),
    "bucket_bytes": ({"bucket_bytes": 4096}, MismatchError, "bucket_bytes differs: rank 1: 4096, "),
    "no bucket_bytes": ({"bucket_bytes": -1}, ConfigError, "bucket_bytes=-1"),
    "overlap": ({"overlap": False}, MismatchError, "overlap differs: rank 1: False"),
    "no overlap": ({"overlap": "no"}, ConfigError, "overlap='no'"),
    "odd overlap": ({"overlap": Odd()}, ConfigError, "repr raises RuntimeError"),
    "progress": ({"progress": "thread"}, MismatchError, "progress differs: rank 1: 'thread'"),
    "no progress": ({"progress": ["hooks"]}, ConfigError, "progress="),
    "order": ({"order": BACKWARD}, MismatchError, r"order"),
    "no order": ({"order": ["a", "b"]}, ConfigError, "order of gradients names 2"),
    "odd order": ({"order": 3}, ConfigError, "order=3"),
    "ranks_per_node": ({"ranks_per_node": 1}, MismatchError, "ranks_per_node differs: rank 1: 1"),
    "no ranks_per_node": ({"ranks_per_node": "x"}, MpidistError, "ranks_per_node"),
    "uses": ({"uses": {"a": 2}}, MismatchError, "uses differs: rank 1: {'a': 2}"),
    "no uses": ({"uses": {"a": 0}}, ConfigError, "uses: 'a': 0"),
    "uses of nothing": ({"uses": {"aa": 2}}, ConfigError, "uses: 'aa' is no parameter"),
}  # fmt: skip


def raised_here(act, kind=MismatchError, match=None, seconds=10):
    """Run `act`, which must raise on this rank, in time; returns the error."""
    began = time.perf_counter()
    with pytest.raises(kind, match=match) as caught:
        act()
    assert time.perf_counter() - began < seconds
    return caught.value


def step(comm, gradients, value=1.0, told=BACKWARD):
    """One step in which every rank's gradients are `value` times its rank plus one."""
    gradients.begin(1 / comm.size)
    for name in told:
        gradients.views[name][...] = value * (comm.rank + 1)
        gradients.ready(name)
    for name in set(BACKWARD) - set(told):
        gradients.views[name][...] = value * (comm.rank + 1)
    gradients.reduce(1.0, comm.rank)
    for name in BACKWARD:
        mean = value * (comm.size + 1) / 2
        np.testing.assert_allclose(gradients.views[name], mean, rtol=1e-6)
    assert gradients.extras[0] == comm.size


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", OTHERS)
def test_another_value_on_one_rank(comm, case):
    given, kind, text = OTHERS[case]
    mine = {"parameters": parameters(), **(given if comm.rank == 1 else {})}
    values = mine.pop("parameters")
    for _ in range(2):
        error = raised_here(lambda: Gradients(comm, values, **mine), kind, text)
        assert error.everywhere
        assert "rank 1" in str(error)
    gradients = Gradients(comm, parameters())
    step(comm, gradients)
    gradients.close()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2])
@pytest.mark.parametrize("first_steps", [0, 2])
def test_ready_twice_is_refused(comm, ranks_per_node, first_steps):
    """Tied weights: the bucket would leave with half of the gradient."""
    memory_of(of(comm), ranks_per_node)
    gradients = Gradients(comm, parameters(), bucket_bytes=1)
    for _ in range(first_steps):
        step(comm, gradients)
    gradients.begin(1 / comm.size)
    gradients.ready("d")
    text = r"ready\('d'\) a second time in one step.*uses=\{'d': 2\}"
    raised_here(lambda: gradients.ready("d"), ProtocolError, text)
    gradients.close()


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2])
def test_a_tensor_that_is_used_twice(comm, ranks_per_node):
    memory_of(of(comm), ranks_per_node)
    uses = {"d": 2, "b": 3}
    gradients = Gradients(comm, parameters(), bucket_bytes=1, uses=uses)
    told = ["d", "b", "c", "b", "d", "a", "b"]
    for k in range(1, 4):
        gradients.begin(1 / comm.size)
        for view in gradients.views.values():
            view[...] = 0
        for name in told:
            # Each use adds its part, and only the last makes it whole.
            gradients.views[name] += k * (comm.rank + 1) / uses.get(name, 1)
            gradients.ready(name)
        if not gradients._next:  # else the sum is broken off
            raised_here(lambda: gradients.ready("b"), ProtocolError, "more than 3 times")
        gradients.reduce()
        for name in NAMES:
            np.testing.assert_allclose(gradients.views[name], k * (comm.size + 1) / 2, rtol=1e-5)
        if gradients.overlapping and k > 1:
            assert gradients.order == ["c", "d", "a", "b"]
    gradients.close()


@pytest.mark.ranks(1, 3, further=(2,))
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_calls_out_of_order(comm, ranks_per_node):
    """All ranks err alike, and can go on."""
    memory_of(of(comm), ranks_per_node)
    gradients = Gradients(comm, parameters(), bucket_bytes=1)
    for _ in range(2):
        raised_here(lambda: gradients.reduce(0, 0), ProtocolError, "call begin first")
        raised_here(lambda: gradients.ready("a"), ProtocolError, "outside a step; call begin first")
        raised_here(
            lambda: gradients.ready("e"), ConfigError, r"ready\('e'\): no parameter has this name"
        )
        gradients.begin(0.5)
        raised_here(lambda: gradients.ready("aa"), ConfigError, "no parameter.*did you mean 'a'")
        raised_here(lambda: gradients.reduce(1, 2, 3), ConfigError, "3 extra numbers")
        step(comm, gradients)  # nothing has left yet, so it may begin again
    gradients.close()


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("call", ["ready", "unknown", "begin", "extras"])
def test_a_wrong_call_on_one_rank_when_a_part_has_left(comm, ranks_per_node, call):
    """The others, who wait for the rest, hear who it was and why."""
    memory_of(of(comm), ranks_per_node)
    gradients = Gradients(comm, parameters(), bucket_bytes=1)
    step(comm, gradients)
    gradients.begin(1 / comm.size)
    gradients.ready("d")
    assert gradients._next
    wrong = {
        "ready": (lambda: gradients.ready("d"), ProtocolError, "a second time"),
        "unknown": (lambda: gradients.ready("dd"), ConfigError, "no parameter has this name"),
        "begin": (lambda: gradients.begin(1.0), ProtocolError, "are not summed yet; call reduce"),
        "extras": (lambda: gradients.reduce(1, 2, 3), ConfigError, "3 extra numbers"),
    }
    act, kind, text = wrong[call]
    if comm.rank == 1:
        raised_here(act, kind, text)
    else:
        raised_here(lambda: gradients.reduce(0, 0), match=f"rank 1.*{text}")
    raised_here(lambda: md.allreduce(comm, np.ones(3)))
    gradients.close()


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("ranks_per_node", [None, 1])
@pytest.mark.parametrize("first_steps", [0, 2])
@pytest.mark.parametrize("counts", [(2, 0), (0, 1), (2, 1)])
def test_another_number_of_extras_on_one_rank(comm, ranks_per_node, first_steps, counts):
    """Nobody gets the sum of it, in the first step as in a later one; all are told who it was."""
    memory_of(of(comm), ranks_per_node)
    gradients = Gradients(comm, parameters(), bucket_bytes=1)
    for _ in range(first_steps):
        step(comm, gradients)
    gradients.begin(1 / comm.size)
    for name in BACKWARD:
        gradients.ready(name)
    mine = counts[comm.rank == 1]
    text = (
        rf"rank 1 .*{counts[1]} extra numbers" if counts[1] != 2 * bool(first_steps) else "rank 1"
    )
    error = raised_here(lambda: gradients.reduce(*[1.0] * mine), MismatchError, text)
    assert "\n" not in str(error)
    gradients.close()


@pytest.mark.ranks(1, 3, further=(2,))
@pytest.mark.parametrize("ranks_per_node", [None, 1])
def test_the_number_of_extras_may_change_on_all_ranks(comm, ranks_per_node):
    memory_of(of(comm), ranks_per_node)
    gradients = Gradients(comm, parameters(), bucket_bytes=1)
    for count in (0, 2, 1, 1, 2, 0, 0):
        gradients.begin(1 / comm.size)
        for name in BACKWARD:
            gradients.views[name][...] = comm.rank
            gradients.ready(name)
        gradients.reduce(*[1.0] * count)
        assert gradients.extras.tolist() == [comm.size * (k < count) for k in range(2)]
        np.testing.assert_allclose(gradients.views["a"], (comm.size - 1) / 2)
    gradients.close()


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize("ranks_per_node", [None, 1, 2])
@pytest.mark.parametrize("then", ["close", "allreduce", "nothing"])
def test_a_step_that_one_rank_does_not_finish(comm, ranks_per_node, then):
    """An exception between begin and reduce that the program of rank 1 has caught."""
    sub = comm.Dup()
    memory_of(of(sub), ranks_per_node)
    gradients = Gradients(sub, parameters(), bucket_bytes=1)
    step(sub, gradients)
    gradients.begin(1 / sub.size)
    for name in BACKWARD[:2]:
        gradients.ready(name)
    if comm.rank != 1:
        raised_here(lambda: gradients.reduce(0, 0), match="rank 1")
    elif then == "close":
        gradients.close()
        raised_here(lambda: md.allreduce(sub, np.ones(3)))
    elif then == "allreduce":
        raised_here(lambda: md.allreduce(sub, np.ones(3)))
    else:
        raised_here(lambda: md.free(sub))
    gradients.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks_per_node", [None, 1])
@pytest.mark.parametrize("steps", [0, 2])
def test_two_gradients_crosswise(comm, ranks_per_node, steps):
    memory_of(of(comm), ranks_per_node)
    both = [Gradients(comm, parameters(), bucket_bytes=1) for _ in range(2)]
    for gradients in both:
        for _ in range(steps):
            step(comm, gradients)
    raised_here(lambda: step(comm, both[comm.rank == 1]))
    for gradients in both:
        gradients.close()


@pytest.mark.ranks(2, 3)
def test_arrange_in_another_order_on_one_rank(comm):
    memory_of(of(comm), 1)
    gradients = Gradients(comm, parameters(), bucket_bytes=1)
    other = NAMES if comm.rank == 1 else BACKWARD
    raised_here(lambda: gradients.arrange(other), match=r"order\[0\] differs: .*rank 1: 'a'")
    bad = ["a"] if comm.rank == 1 else BACKWARD
    raised_here(lambda: gradients.arrange(bad), ConfigError, "names 1 tensors")
    step(comm, gradients)
    gradients.close()
