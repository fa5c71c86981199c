"""`md.elastic` refuses bad arguments on all ranks, before it makes any communicator (R46)."""

import numpy as np
import pytest

import mpidist as md
from mpidist.elasticity import elastic_group


@pytest.fixture
def with_ulfm(monkeypatch):
    """As if this job could survive: the arguments are checked before any communicator is made."""
    monkeypatch.setattr(elastic_group, "has_ulfm", lambda: True)
    monkeypatch.setattr(elastic_group, "is_whole_job", lambda _: True)


def enter(comm, state, **settings):
    with md.elastic(comm, state, **settings):
        raise AssertionError("entered")


def call(comm, state, **settings):
    md.run_elastic(comm, lambda _: None, state, **settings)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", [enter, call])
@pytest.mark.parametrize("min_ranks", [0, 4, 1.5, "two"])
def test_an_argument_of_one_rank(comm, with_ulfm, way, min_ranks):
    given = min_ranks if comm.rank == 1 else 1
    with pytest.raises(md.ConfigError, match=r"min_ranks=.*; expected 1 to"):
        way(comm, {"w": np.zeros(3)}, min_ranks=given)
    assert comm.allreduce(1) == comm.size


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", [enter, call])
@pytest.mark.parametrize("deadline", [0, "soon", None, True, float("nan")])
def test_a_deadline_of_one_rank(comm, with_ulfm, way, deadline):
    given = deadline if comm.rank == 1 else "stopped"
    with pytest.raises(md.ConfigError, match=r'deadline=.*; expected "stopped", "auto" or a'):
        way(comm, {"w": np.zeros(3)}, deadline=given)
    assert comm.allreduce(1) == comm.size


@pytest.mark.ranks(2)
def test_another_deadline_on_one_rank(comm, with_ulfm):
    with pytest.raises(md.MismatchError, match="deadline differs"):
        enter(comm, {"w": np.zeros(3)}, deadline=2 + comm.rank)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"w": np.zeros(4)}, "w differs"),
        ({"w": np.zeros(3, "f4")}, "w differs"),
        ({"v": np.zeros(3)}, "differs"),
        ({"w": 3}, "w differs"),
    ],
    ids=["shape", "dtype", "name", "number"],
)
def test_another_state_on_one_rank(comm, with_ulfm, state, words):
    given = state if comm.rank == 2 else {"w": np.zeros(3)}
    with pytest.raises(md.MismatchError, match=words):
        enter(comm, given)


def read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"w": read_only()}}, "cannot be written: a/w"),
        ({"w": np.array([None])}, "cannot be written: w"),
        ({"w": md.Shard(np.zeros(2), (4,), 0)}, "a Shard, w, which no other rank has"),
        (lambda: {"step": 3}, "a function gives arrays only"),
        ([np.zeros(3)], "must be a dict"),
    ],
    ids=["read-only", "objects", "shard", "a number from a function", "a list"],
)
def test_a_state_that_cannot_be_replaced(comm, with_ulfm, state, words):
    with pytest.raises(md.ConfigError, match=words):
        enter(comm, state)


@pytest.mark.ranks(2)
def test_a_part_of_the_job(comm):
    with pytest.raises(md.ConfigError, match=r"has only 2 ranks of this job; expected all"):
        enter(comm, {"w": np.zeros(3)})
