"""`md.elastic` refuses bad arguments on all ranks, before it makes any communicator (R46)."""

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.elasticity import elastic_group, elastic_loop


@pytest.fixture
def with_ulfm(monkeypatch):
    """As if this job could survive: the arguments are checked before any communicator is made."""
    monkeypatch.setattr(elastic_loop, "why_not_elastic", lambda library: "")
    monkeypatch.setattr(elastic_loop, "is_whole_job", lambda _: True)


def enter(comm, state, **settings):
    with md.elastic(comm, state, **settings):
        raise AssertionError("entered")


def call(comm, state, **settings):
    md.run_elastic(comm, lambda _: None, state, **settings)


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", [enter, call])
@pytest.mark.parametrize("min_ranks", [0, 4, 1.5, "two"])
def test_an_argument_of_one_rank(comm, with_ulfm, way, min_ranks):
    given = min_ranks if comm.rank == 1 else 1
    with pytest.raises(md.ConfigError, match=r"min_ranks=.*; expected 1 to"):
        way(comm, {"w": np.zeros(3)}, min_ranks=given)
    assert comm.allreduce(1) == comm.size


@pytest.mark.covering
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", [enter, call])
@pytest.mark.parametrize("deadline", [0, "soon", None, True, float("nan")])
def test_a_deadline_of_one_rank(comm, with_ulfm, way, deadline):
    given = deadline if comm.rank == 1 else "stopped"
    with pytest.raises(md.ConfigError, match=r'deadline=.*; expected "stopped", "auto" or a'):
        way(comm, {"w": np.zeros(3)}, deadline=given)
    assert comm.allreduce(1) == comm.size


@pytest.mark.ranks(2, 3)
def test_a_function_of_one_rank(comm, with_ulfm):
    function = None if comm.rank == 1 else print
    with pytest.raises(md.ConfigError, match="function=None; expected a function"):
        md.run_elastic(comm, function, {"w": np.zeros(3)})
    assert comm.allreduce(1) == comm.size


@pytest.mark.ranks(2)
def test_another_deadline_on_one_rank(comm, with_ulfm):
    with pytest.raises(md.MismatchError, match="deadline differs"):
        enter(comm, {"w": np.zeros(3)}, deadline=2 + comm.rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", [enter, call])
def test_a_window_of_one_rank(comm, with_ulfm, way):
    """One-sided communication would wait for a dead rank for ever."""
    window = MPI.Win.Create(np.zeros(8), comm=MPI.COMM_SELF) if comm.rank == 1 else None
    with pytest.raises(md.ConfigError, match=r"this program has a window \(MPI.Win\)"):
        way(comm, {"w": np.zeros(3)})
    if window is not None:
        window.Free()
    assert not elastic_loop._has_window()


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
        (lambda: {"step": 3}, "a function may give only arrays"),
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


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("living", "smaller"),
    [
        ("012", False),  # of the ranks 0, 1 on n0; 2, 3 on n1; 4 on n2
        ("4", True),
        ("34", True),  # n0 has as many, and the first rank
        ("23", True),  # n0 and n2 may go on with 3
        ("0123", False),
        ("0", True),  # the 3 ranks of n1 and n2
        ("024", False),
    ],
)
def test_the_smaller_side_of_a_network_that_falls_apart(comm, living, smaller):
    """Ranks that are on a host of a living rank have really died; all others may live."""
    names = [f"rank {rank} of 5 on n{rank // 2}" for rank in range(5)]
    found = elastic_group.is_smaller_side(names, [names[int(rank)] for rank in living])
    assert found is smaller


@pytest.mark.ranks(1)
def test_two_sides_with_as_many_ranks(comm):
    """The side with the first rank goes on, and the other one does not."""
    names = [f"rank {rank} of 4 on n{rank // 2}" for rank in range(4)]
    assert not elastic_group.is_smaller_side(names, names[:2])
    assert elastic_group.is_smaller_side(names, names[2:])
