"""If rank 1 gives a collective a bad or different value, all ranks raise (R97)."""

import inspect
import time

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError, MismatchError, MpidistError

#: May differ: what is exchanged, where the result goes, and the samples of a rank.
MAY_DIFFER = {"comm", "x", "out", "weight"}

#: Function -> parameter -> [(value on rank 1, what the message names)].
CASES = {
    "allreduce": {
        "op": [("bogus", "op"), ("max", "op=max"), (np.subtract, "subtract")],
        "algorithm": [("bogus", "algorithm"), ("tree", "algorithm=tree"), (7, "algorithm")],
        "reproducible": [(True, "ordered")],
    },
    "reduce_scatter": {
        "op": [("bogus", "op"), ("max", "op=max")],
        "counts": [([1, 2], "counts"), ("ab", "counts"), ("other", "counts=")],
        "algorithm": [("bogus", "algorithm"), ("direct", "algorithm=direct")],
    },
    "allgather": {
        "counts": [([1, 2, 3, 4, 5], "counts"), ("ab", "counts")],
        "algorithm": [("bogus", "algorithm"), ("direct", "algorithm=direct")],
    },
    "broadcast": {
        "root": [(99, "root"), ("a", "root"), (1, "root=1")],
        "algorithm": [("bogus", "algorithm"), ("direct", "algorithm=direct")],
    },
    "reduce": {
        "op": [("bogus", "op"), ("max", "op=max")],
        "root": [(99, "root"), (None, "root"), (1, "root=1")],
        "algorithm": [("bogus", "algorithm"), ("direct", "algorithm=direct")],
        "reproducible": [(True, "ordered"), ("yes", "reproducible")],
    },
    "gather": {
        "root": [(99, "root"), (1, "root=1")],
        "counts": [([1, 2, 3, 4, 5], "counts")],
        "algorithm": [("bogus", "algorithm"), ("native", "algorithm=native")],
    },
    "scatter": {
        "root": [(99, "root"), (1, "root=1")],
        "counts": [],  # the root's alone is read
        "algorithm": [("bogus", "algorithm"), ("native", "algorithm=native")],
    },
}
CASES["iallreduce"] = CASES["plan"] = CASES["allreduce"]

ALL = [
    pytest.param(name, parameter, value, words, id=f"{name}-{parameter}-{number}")
    for name, parameters in CASES.items()
    for parameter, values in parameters.items()
    for number, (value, words) in enumerate(values)
]


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_a_case(name):
    assert set(inspect.signature(getattr(md, name)).parameters) - MAY_DIFFER == set(CASES[name])


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("name", "parameter", "value", "words"), ALL)
def test_all_ranks_raise(comm, name, parameter, value, words):
    mine = comm.Dup()
    x = np.ones((12, 3))
    given = {}
    if parameter == "counts" and name == "reduce_scatter":
        counts = [12 - 2 * (comm.size - 1)] + [2] * (comm.size - 1)
        given["counts"] = counts if comm.rank != 1 else value if value != "other" else counts[::-1]
    elif comm.rank == 1:
        given[parameter] = value

    def call():
        made = getattr(md, name)(mine, x, **given)
        if name in ("iallreduce", "plan"):
            made.wait() if name == "iallreduce" else made()
        # A root or a leaf that waits for nobody hears of it in the next call at the latest.
        md.allreduce(mine, x, algorithm="ring")

    start = time.monotonic()
    with pytest.raises(MpidistError) as caught:
        call()
    assert time.monotonic() - start < 10
    told = comm.allgather(str(caught.value))
    assert any(words in text for text in told), told
    assert all("rank 1" in text or rank == 1 for rank, text in enumerate(told)), told
    comm.Barrier()


#: Weight of rank 1 in a mean, where all others give 1.0 -> what the message names.
WEIGHTS = {
    "-1": "weight=-1.0",
    "nan": "weight=nan",
    "text": "weight=nan",
    "none": "weights of a mean",
}


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("again", [False, True], ids=["first", "prepared"])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", ["allreduce", "reduce"])
def test_a_weight_that_is_bad_on_one_rank(comm, name, weight, again):
    """Weights may differ; a bad one, or none where others give one, is an error on all ranks."""
    mine, x = comm.Dup(), np.ones(4)
    reduce = getattr(md, name)
    if again:
        reduce(mine, x.copy(), "mean", weight=1.0)
        reduce(mine, x.copy(), "mean")
    values = {"-1": -1, "nan": float("nan"), "text": "x", "none": None}
    given = values[weight] if comm.rank == 1 else 1.0

    def call():
        reduce(mine, x.copy(), "mean", weight=given)
        md.allreduce(mine, x.copy(), algorithm="ring")  # as above

    start = time.monotonic()
    with pytest.raises(MpidistError) as caught:
        call()
    assert time.monotonic() - start < 10
    assert WEIGHTS[weight] in str(caught.value)
    assert "rank 1" in str(caught.value)
    assert type(caught.value) is (MismatchError if weight == "none" else ConfigError)
    comm.Barrier()


class Raising:
    """An array that raises one and the same exception whenever it is looked at."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        raise self.error


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["another communicator", "the same one"])
def test_one_exception_raised_twice_is_told_twice(comm, where):
    first = comm.Dup()
    second = comm.Dup() if where == "another communicator" else first
    error = KeyError("no batch")
    x = np.ones(3)
    with pytest.raises((KeyError, MpidistError)):
        # On the same one all raise, so that it stays usable.
        md.allreduce(first, Raising(error) if where == "the same one" or comm.rank == 1 else x)
    begin = time.monotonic()
    with pytest.raises((KeyError, MpidistError), match="no batch") as seen:
        md.allreduce(second, Raising(error) if comm.rank == 1 else x)
    assert time.monotonic() - begin < 10
    assert (seen.type is KeyError) == (comm.rank == 1)
