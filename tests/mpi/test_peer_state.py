"""Ranks that are behind get the state of the newest rank, with all kinds of values (R54)."""

import numpy as np
import pytest

from mpidist.elasticity import peer_state


def tree(seed):
    """Arrays of many kinds, and numbers, which depend on `seed`."""
    rng = np.random.default_rng(seed)
    wide = np.zeros((6, 8))
    wide[::2, 1::3] = rng.normal(size=(3, 3))
    return {
        "w": rng.normal(size=(5, 3)),
        "view": wide[::2, 1::3],
        "scalar": np.array(rng.normal()),
        "half": rng.normal(size=7).astype(np.float16),
        "empty": np.zeros((0, 3)),
        "flags": rng.random(9) < 0.5,
        "more": {
            "count": int(rng.integers(100)),
            "rate": np.float64(rng.random()),
            "name": f"n{seed}",
        },
    }


def flat(state):
    return [
        (path, leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf)
        for path, leaf in peer_state.leaves_of(state)
    ]


@pytest.mark.ranks(1, 2, 3, 5)
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_who_is_behind_gets_it(comm, ahead):
    newest = min(ahead, comm.size - 1)
    state = tree(comm.rank)
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    step = peer_state.bring_up_to_date(comm, state, 8 if comm.rank == newest else 7)
    assert step == 8
    assert flat(state) == flat(tree(newest))
    assert all(state[name] is array for name, array in arrays.items())


@pytest.mark.ranks(4)
def test_several_are_ahead(comm):
    """One of them sends, and those that have the step already keep their own arrays."""
    state = tree(7 if comm.rank in (1, 3) else comm.rank)
    assert peer_state.bring_up_to_date(comm, state, 5 if comm.rank in (1, 3) else comm.rank) == 5
    assert flat(state) == flat(tree(7))


@pytest.mark.ranks(3)
def test_nobody_is_behind(comm):
    state = tree(comm.rank)
    assert peer_state.bring_up_to_date(comm, state, 3) == 3
    assert flat(state) == flat(tree(comm.rank))


@pytest.mark.ranks(3)
def test_a_function_gives_the_arrays(comm):
    arrays = {"w": np.full(4, float(comm.rank)), "b": {"c": np.full((2, 2), comm.rank, "i4")}}
    peer_state.bring_up_to_date(comm, lambda: arrays, comm.rank)
    assert arrays["w"].tolist() == [2.0] * 4
    assert arrays["b"]["c"].tolist() == [[2, 2]] * 2


@pytest.mark.ranks(2, 7)
def test_an_array_in_several_messages(comm, monkeypatch):
    monkeypatch.setattr(peer_state, "_PIECE", 24)
    state = {"w": np.arange(10.0) * (comm.rank + 1)}
    peer_state.bring_up_to_date(comm, state, comm.rank)
    assert state["w"].tolist() == [float(comm.size * k) for k in range(10)]
