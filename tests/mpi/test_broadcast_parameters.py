"""md.broadcast_parameters sends a whole model in few messages, or raises one error on all ranks."""

import socket

import ml_dtypes
import numpy as np
import pytest

import mpidist as md
from mpidist.collectives import broadcast_parameters as parameters
from mpidist.errors import ConfigError, MismatchError
from mpidist.runtime import context

SIZES = (1, 2, 3, 5, 8)


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def tree(rank, xp=np):
    """Many kinds of arrays; every value says whose it is."""
    made = {
        "w": np.full((40, 30), rank + 1, np.float32),
        "b": np.full(30, rank + 2, np.float64),
        "count": np.array(rank + 3),
        "table": np.full((7, 3), rank + 4, np.int16),
        "half": np.full(5, rank + 5, np.float16),
        "none": np.empty((0, 4), np.float32),
        "turned": np.full((6, 50), rank + 6, np.float32).T,
    }
    made = {name: xp.asarray(x) for name, x in made.items()}
    # On one rank the dict was filled in another order.
    return dict(reversed(made.items())) if rank == 1 else made


@pytest.mark.covering
@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("pack", [1, 300, 4 << 20])
def test_everybody_has_the_root_s_values(comm, xp, monkeypatch, pack):
    """Issue 3 point 7: in place, any dtype, layout and size, whatever goes into one message."""
    monkeypatch.setattr(parameters, "PACK", pack)
    for root in (0, comm.size - 1):
        mine, expected = tree(comm.rank, xp), tree(root)
        arrays = dict(mine)
        assert md.broadcast_parameters(comm, mine, root=root) is mine
        for name, x in mine.items():
            assert x is arrays[name]
            np.testing.assert_array_equal(host(x), expected[name])


@pytest.mark.ranks(2, 3)
def test_a_model_with_state(comm):
    """Statistics that are not trained come along; bfloat16 too."""

    class Model:
        def __init__(self):
            self.parameters = {"w": np.full(3, comm.rank, ml_dtypes.bfloat16)}
            self.state = {"w": np.full(2, float(comm.rank))}

    model = Model()
    assert md.broadcast_parameters(comm, model, root=1) is model
    assert (model.parameters["w"] == 1).all()
    assert (model.state["w"] == 1).all()


@pytest.mark.ranks(2, 4)
def test_small_tensors_travel_together(comm):
    """200 tensors of 1 kB: as many messages as for one vector, and the agreement."""
    before = context.of(comm).counters.messages_sent
    md.broadcast_parameters(comm, {str(i): np.full(250, i, "f4") for i in range(200)})
    sent = comm.allreduce(context.of(comm).counters.messages_sent - before)
    # A tree of p - 1 messages; the vector of 200 kB may be cut into segments.
    assert comm.size - 1 <= sent <= 8 * (comm.size - 1)


def odd(case, rank):
    """What rank 1 gives instead of the others' {"a", "b"}, and what must be said."""
    params = {"a": np.ones(3, "f4"), "b": np.ones((2, 2))}
    if rank != 1:
        return params
    if case == "shape":
        params["b"] = np.ones((2, 3))
    elif case == "dtype":
        params["a"] = np.ones(3, "f8")
    elif case == "more":
        params["c"] = np.ones(1)
    elif case == "less":
        del params["a"]
    elif case == "list":
        params["b"] = [1.0, 2.0]
    elif case == "read-only":
        params["b"].flags.writeable = False
    elif case == "objects":
        params["b"] = np.array([None])
    elif case == "no mapping":
        return list(params.values())
    elif case == "method":

        class Module:
            def parameters(self):
                return []

        return Module()
    return params


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("shape", MismatchError, "rank 1 has 'b' (2, 3) float64, rank 0 (root) has 'b' (2, 2) fl"),
        ("dtype", MismatchError, "rank 1 has 'a' (3,) float64, rank 0 (root) has 'a' (3,) float"),
        ("more", MismatchError, "rank 1 has 'c' (1,) float64, rank 0 (root) has no 'c'; all"),
        ("less", MismatchError, "rank 1 has no 'a', rank 0 (root) has 'a' (3,) float32; all"),
        ("list", ConfigError, "'b': expected a NumPy, CuPy or DLPack array, got list"),
        ("read-only", ConfigError, "'b' is read-only; pass a writable array"),
        ("objects", ConfigError, "'b': elements of dtype object are Python objects"),
        ("no mapping", ConfigError, "expected a mapping of name -> array, got list"),
        ("method", ConfigError, "Module.parameters is a method; pass its state_dict()"),
    ],
)
def test_what_differs_is_named_on_all_ranks(comm, case, error, text):
    """R97: ranks, tensor, and what each has; nothing is written, and the communicator lives on."""
    params = odd(case, comm.rank)
    with pytest.raises(error) as caught:
        md.broadcast_parameters(comm, params)
    assert caught.value.everywhere
    who = f"rank 1 of 3 ({socket.gethostname()}): " if error is ConfigError else ""
    assert str(caught.value).startswith(f"broadcast_parameters: {who}{text}"), caught.value
    x = np.full(3, comm.rank)
    md.broadcast_parameters(comm, {"x": x}, root=2)
    assert (x == 2).all()


@pytest.mark.ranks(3)
def test_another_root_is_told(comm):
    with pytest.raises(MismatchError, match=r"has root \d, rank \d \(root\) has root \d"):
        md.broadcast_parameters(comm, {"x": np.ones(3)}, root=int(comm.rank == 1))
