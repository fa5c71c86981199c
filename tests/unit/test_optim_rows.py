"""Updates of some rows equal a dense reference of these rows, and touch no other row (R71)."""

import time

import ml_dtypes
import numpy as np
import pytest

from mpidist import optim
from mpidist.errors import ConfigError
from mpidist.optim.optimizer import PIECE

MAKERS = {
    "sgd": lambda decay: optim.sgd(0.1, decay),
    "momentum": lambda decay: optim.momentum(0.1, 0.8, decay),
    "adam": lambda decay: optim.adam(0.01, 0.8, 0.95, 1e-8, decay),
    "adagrad": lambda decay: optim.adagrad(0.1, weight_decay=decay),
    "ftrl": lambda decay: optim.ftrl(0.1, 0.5, l1=decay, l2=decay),
}


def dense(name, decay, table, updates):
    """Rows one by one in float64; the means of a row do not decay while it has no gradient."""
    p = table.astype("f8")
    m, v, z = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t, (rows, values) in enumerate(updates, 1):
        for r, g in zip(rows, values.astype("f8"), strict=True):
            if name == "sgd":
                p[r] -= 0.1 * (g + decay * p[r])
            elif name == "momentum":
                m[r] = 0.8 * m[r] + g + decay * p[r]
                p[r] -= 0.1 * m[r]
            elif name == "adam":
                m[r] = 0.8 * m[r] + 0.2 * g
                v[r] = 0.95 * v[r] + 0.05 * g * g
                step = m[r] / (1 - 0.8**t) / (np.sqrt(v[r] / (1 - 0.95**t)) + 1e-8)
                p[r] -= 0.01 * (step + decay * p[r])
            elif name == "adagrad":
                g = g + decay * p[r]
                v[r] += g * g
                p[r] -= 0.1 * g / (np.sqrt(v[r]) + 1e-7)
            else:
                if not v[r].any():
                    z[r] = -(p[r] * (0.5 + 0.1 * decay) + np.sign(p[r]) * 0.1 * decay)
                z[r] += 0.1 * g - (np.sqrt(v[r] + g * g) - np.sqrt(v[r])) * p[r]
                v[r] += g * g
                kept = (np.sign(z[r]) * 0.1 * decay - z[r]) / (0.5 + np.sqrt(v[r]) + 0.1 * decay)
                p[r] = np.where(np.abs(z[r]) <= 0.1 * decay, 0, kept)
    return p


def some_updates(rng, rows, width, dtype):
    """Row 0 in each update, others now and then, and some never."""
    found = []
    for _ in range(6):
        here = np.append(0, 1 + rng.permutation(rows // 2)[: rng.integers(0, rows // 3)])
        rng.shuffle(here)
        found.append((here, rng.standard_normal((len(here), width)).astype(dtype)))
    return found


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("flat", [False, True], ids=["table", "flat"])
def test_rows_equal_a_dense_reference(name, decay, flat):
    """A flat array is what a server holds; both have the same bits."""
    rng = np.random.default_rng(5)
    for dtype, tolerance in (("f8", 1e-12), ("f4", 2e-5)):
        start = rng.standard_normal((30, 3)).astype(dtype)
        updates = some_updates(rng, 30, 3, dtype)
        optimizer = MAKERS[name](decay)
        p = {"w": start.copy().reshape(-1) if flat else start.copy(), "b": np.ones(2, dtype)}
        state = optimizer.init(p)
        for rows, values in updates:
            kept = rows.copy(), values.copy()
            optimizer.update({"w": (rows, values), "b": np.ones(2, dtype)}, state, p)
            assert all((a == b).all() for a, b in zip(kept, (rows, values), strict=True))
        assert state["step"] == state["progress"] == 6
        w = p["w"].reshape(30, 3)
        np.testing.assert_allclose(
            w, dense(name, decay, start, updates), rtol=tolerance, atol=tolerance
        )
        never = sorted(set(range(30)) - {r for rows, _ in updates for r in rows})
        assert never
        np.testing.assert_array_equal(w[never], start[never])
        assert (p["b"] != 1).all()


@pytest.mark.parametrize("name", MAKERS)
def test_rows_of_exact_optimizers_are_zeros_elsewhere(name):
    """`Optimizer.rows` tells where a row update has the bits of a whole update."""
    rng = np.random.default_rng(6)
    start = rng.standard_normal((20, 4)).astype("f4")
    updates = some_updates(rng, 20, 4, "f4")
    optimizer = MAKERS[name](0.0 if name != "ftrl" else 0.01)
    some, whole = {"w": start.copy()}, {"w": start.copy()}
    states = optimizer.init(some), optimizer.init(whole)
    for rows, values in updates:
        optimizer.update({"w": (rows, values)}, states[0], some)
        full = np.zeros_like(start)
        full[rows] = values
        optimizer.update({"w": full}, states[1], whole)
    equal = some["w"].tobytes() == whole["w"].tobytes() and all(
        value.tobytes() == states[1][slot]["w"].tobytes()
        for slot, table in states[0].items()
        if isinstance(table, dict)
        for value in table.values()
    )
    assert equal == (optimizer.rows == "exact")
    assert equal == (name in ("sgd", "adagrad", "ftrl"))


def test_a_weight_decay_makes_rows_differ():
    for make in (optim.sgd, optim.adagrad):
        assert make(0.1).rows == "exact"
        assert make(0.1, weight_decay=0.1).rows == "lazy"
    assert optim.clipped(optim.sgd(0.1), 1.0).rows == ""


def test_many_rows_are_cut_into_pieces():
    rng = np.random.default_rng(7)
    n = PIECE // 64 + 100
    start = rng.standard_normal((2 * n, 64)).astype("f4")
    rows = rng.permutation(2 * n)[:n]
    values = rng.standard_normal((n, 64)).astype("f4")
    optimizer = optim.adam(0.01)
    p, q = {"w": start.copy()}, {"w": start[rows].copy()}
    optimizer.update({"w": (rows, values)}, optimizer.init(p), p)
    optimizer.update({"w": values}, optimizer.init(q), q)
    np.testing.assert_array_equal(p["w"][rows], q["w"])


def test_rows_of_other_shapes_and_dtypes():
    for dtype in ("f2", ml_dtypes.bfloat16):
        for make in MAKERS.values():
            p = {"e": np.ones((6, 2, 2), dtype), "v": np.ones(6, dtype), "n": np.ones((6, 0))}
            half = make is MAKERS["adam"]  # whose usual eps is 0 in half precision
            optimizer = optim.adam(0.01, eps=1e-4) if half else make(0.0)
            g = {
                "e": (np.array([4, 1]), np.ones((2, 2, 2), dtype)),
                "v": (np.array([3], np.int32), np.ones(1, dtype)),
                "n": (np.empty(0, np.int64), np.empty((0, 0))),
            }
            optimizer.update(g, optimizer.init(p), p)
            assert (p["e"][[1, 4]].astype("f4") < 1).all()
            assert (p["e"][[0, 2, 3, 5]].astype("f4") == 1).all()
            assert (p["v"].astype("f4") < 1).tolist() == [False] * 3 + [True] + [False] * 2
    strided = {"w": np.ones((8, 3)).T[::2]}
    optimizer = optim.sgd(1.0)
    optimizer.update({"w": (np.array([1]), np.ones((1, 8)))}, optimizer.init(strided), strided)
    np.testing.assert_array_equal(strided["w"], [[1] * 8, [0] * 8])


@pytest.mark.parametrize(
    ("gradient", "text"),
    [
        ((np.array([0, 3]), np.ones((2, 3))), "rows 0 ... 3 are outside 0 ... 2"),
        ((np.array([-1]), np.ones((1, 3))), "rows -1 ... -1 are outside"),
        ((np.array([1, 0, 1]), np.ones((3, 3))), "rows are not distinct"),
        ((np.array([1.0]), np.ones((1, 3))), "1-D integer array"),
        ((np.array([1]), np.ones((2, 3))), "one entry per row"),
        (([1], np.ones((1, 3))), "1-D integer array"),
        ((np.array([1]),), r"a tuple \(rows, values\)"),
        ((np.array([1]), np.ones((1, 4))), r"values of rows have shape \(4,\)"),
    ],
)
def test_wrong_rows_change_nothing(gradient, text):
    optimizer = optim.sgd(0.1)
    p = {"w": np.ones((3, 3)), "b": np.ones(2)}
    state = optimizer.init(p)
    with pytest.raises(ConfigError, match=f"sgd: parameter 'w': .*{text}") as error:
        optimizer.update({"b": np.ones(2), "w": gradient}, state, p)
    assert "\n" not in str(error.value)
    assert (p["b"] == 1).all()
    assert state["step"] == 0
    with pytest.raises(ConfigError, match="clipping: the gradient of 'w' has only some rows"):
        optim.clipped(optimizer, 1.0).update({"w": gradient}, state, p)


def test_other_rows_cost_nothing():
    """256 of 1 M rows of 16 under Adam: 0.1 to 0.2 ms here, 90 to 260 ms for all rows."""
    rng = np.random.default_rng(8)
    optimizer = optim.adam(0.01)
    p = {"w": np.zeros((1 << 20, 16), "f4")}
    state = optimizer.init(p)
    values = np.ones((256, 16), "f4")
    times = []
    for _ in range(30):
        rows = rng.integers(0, 1 << 20, 256)
        rows = np.unique(rows)
        begin = time.perf_counter()
        optimizer.update({"w": (rows, values[: len(rows)])}, state, p)
        times.append(time.perf_counter() - begin)
    assert np.median(times) < 0.02
