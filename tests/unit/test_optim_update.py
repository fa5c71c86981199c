"""The optimizers equal their formulas in float64, and `update` keeps its guarantees."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from mpidist import optim
from mpidist.errors import ConfigError
from mpidist.optim.optimizer import PIECE

MAKERS = {
    "sgd": lambda **k: optim.sgd(0.1, **k),
    "momentum": lambda **k: optim.momentum(0.1, 0.8, **k),
    "adam": lambda **k: optim.adam(0.01, 0.8, 0.95, 1e-8, **k),
    "adagrad": lambda **k: optim.adagrad(0.1, 1e-7, **k),
    "ftrl": lambda weight_decay=0.0: optim.ftrl(0.1, 0.5, l1=weight_decay, l2=2 * weight_decay),
}


def reference(name, p, gradients, decay):
    """The formulas of the docstrings, whole arrays in float64."""
    p = p.astype(np.float64)
    v = m = np.zeros_like(p)
    # FTRL: the z that gives the present weight.
    z = -(p * (0.5 + 0.1 * 2 * decay) + np.sign(p) * 0.1 * decay)
    for t, g in enumerate(gradients, 1):
        if name == "sgd":
            p = p - 0.1 * (g + decay * p)
        elif name == "momentum":
            v = 0.8 * v + g + decay * p
            p = p - 0.1 * v
        elif name == "adagrad":
            g = g + decay * p
            v = v + g * g
            p = p - 0.1 * g / (np.sqrt(v) + 1e-7)
        elif name == "ftrl":
            z = z + 0.1 * g - (np.sqrt(v + g * g) - np.sqrt(v)) * p
            v = v + g * g
            kept = (np.sign(z) * 0.1 * decay - z) / (0.5 + np.sqrt(v) + 0.1 * 2 * decay)
            p = np.where(np.abs(z) <= 0.1 * decay, 0, kept)
        else:
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
            step = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
            p = p - 0.01 * (step + decay * p)
    return p


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("name", MAKERS)
def test_formula(name, decay):
    """Five updates of small, empty, 0-d and many-piece arrays equal the formula."""
    rng = np.random.default_rng(1)
    shapes = {"w": (7, 5), "b": (3,), "none": (0, 4), "scalar": (), "large": (2 * PIECE + 11,)}
    optimizer = MAKERS[name](weight_decay=decay)
    for dtype, tolerance in (("f8", 1e-12), ("f4", 2e-5)):
        start = {k: rng.standard_normal(s).astype(dtype) for k, s in shapes.items()}
        start = {k: np.asarray(v) for k, v in start.items()}
        grads = [
            {k: np.asarray(rng.standard_normal(s), dtype) for k, s in shapes.items()}
            for _ in range(5)
        ]
        parameters = {k: v.copy() for k, v in start.items()}
        before = dict(parameters)
        state = optimizer.init(parameters)
        for g in grads:
            kept = {k: v.copy() for k, v in g.items()}
            assert optimizer.update(g, state, parameters) is None
            for k in g:
                np.testing.assert_array_equal(g[k], kept[k], err_msg="gradients changed")
        assert state["step"] == 5
        assert state["progress"] == 5
        for k in shapes:
            assert parameters[k] is before[k], "not in place"
            assert parameters[k].dtype == dtype
            expected = reference(name, start[k], [g[k].astype("f8") for g in grads], decay)
            np.testing.assert_allclose(parameters[k], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MAKERS)
def test_shards_give_the_same_bits(name):
    """An elementwise optimizer on any cut of an array equals the whole, to the last bit (R5)."""
    rng = np.random.default_rng(2)
    n = PIECE + 1001
    whole = {"w": rng.standard_normal(n).astype("f4")}
    cuts = [0, 1, 18, 5003, PIECE - 3, n]
    ranges = list(itertools.pairwise(cuts))
    shards = {str(a): whole["w"][a:b].copy() for a, b in ranges}
    optimizer = MAKERS[name](weight_decay=0.1)
    assert optimizer.elementwise
    state, shard_state = optimizer.init(whole), optimizer.init(shards)
    for _ in range(3):
        g = rng.standard_normal(n).astype("f4")
        optimizer.update({"w": g}, state, whole)
        optimizer.update({str(a): g[a:b] for a, b in ranges}, shard_state, shards)
    np.testing.assert_array_equal(np.concatenate(list(shards.values())), whole["w"])


@pytest.mark.parametrize("name", MAKERS)
def test_strided_views_are_written(name):
    rng = np.random.default_rng(3)
    plain = rng.standard_normal((40, 30)).astype("f4")
    base = np.zeros((30, 80), "f4")
    strided = base.T[::2]
    strided[...] = plain
    g = rng.standard_normal((40, 30)).astype("f4")
    optimizer = MAKERS[name]()
    for p in (plain, strided):
        optimizer.update({"w": g}, optimizer.init({"w": p}), {"w": p})
    np.testing.assert_array_equal(strided, plain)
    assert np.all(base.T[1::2] == 0)


@pytest.mark.parametrize("name", MAKERS)
def test_weight_scales_the_rate_and_the_schedule(name):
    """Four pushes of weight 1/4 age a schedule as one update; SGD moves exactly as far (R109)."""
    seen = []

    def rate(step):
        seen.append(step)
        return 0.5

    optimizer = optim.OPTIMIZERS[name](rate)
    p = {"w": np.ones(3)}
    g = {"w": np.full(3, 0.125)}
    state = optimizer.init(p)
    for _ in range(4):
        optimizer.update(g, state, p, weight=0.25)
    assert seen == [0, 0.25, 0.5, 0.75]
    assert state["step"] == 4
    assert state["progress"] == 1
    if name == "sgd":
        np.testing.assert_array_equal(p["w"], 1 - 0.5 * 0.125)
    if name in ("adagrad", "ftrl"):
        # The sum of squares grows by the weight, too, so four quarters end where one update does.
        np.testing.assert_array_equal(state["square" if name == "adagrad" else "n"]["w"], 0.125**2)
    if name == "adam":
        # A constant gradient makes steps of exactly the rate, however small it is.
        np.testing.assert_allclose(p["w"], 1 - 0.5, rtol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_state_round_trip_is_bit_identical(name):
    """A run that goes on from a copied state ends with the same bits (R53)."""
    rng = np.random.default_rng(4)
    optimizer = MAKERS[name]()
    a = {"w": rng.standard_normal(50).astype("f4")}
    grads = [{"w": rng.standard_normal(50).astype("f4")} for _ in range(6)]
    state = optimizer.init(a)
    for g in grads[:3]:
        optimizer.update(g, state, a)
    assert state["step"].dtype == np.int64
    assert state["step"].shape == ()
    b = {"w": a["w"].copy()}
    fresh = optimizer.init(b)
    for key, value in state.items():
        if isinstance(value, dict):
            fresh[key]["w"][...] = value["w"]
        else:
            fresh[key][...] = value
    for g in grads[3:]:
        optimizer.update(g, state, a)
        optimizer.update(g, fresh, b)
    np.testing.assert_array_equal(a["w"], b["w"])
    assert fresh["step"] == state["step"] == 6


def test_a_part_of_the_parameters():
    optimizer = optim.momentum(0.1)
    p = {"a": np.ones(2), "b": np.ones(2)}
    state = optimizer.init(p)
    optimizer.update({"a": np.ones(2)}, state, {"a": p["a"]})
    np.testing.assert_allclose(p["a"], 0.9)
    np.testing.assert_array_equal(p["b"], 1)


def test_an_eps_that_is_zero_in_half_precision():
    half = {"h": np.ones(3, "f2")}
    for optimizer in (optim.adam(0.1), optim.adagrad(0.1, eps=1e-8)):
        with pytest.raises(ConfigError, match="is 0 in float16, the dtype of parameter 'h'"):
            optimizer.init(half)
        optimizer.init({"h": np.ones(3, "f4")})
    optimizer = optim.adam(0.1, eps=1e-4)
    optimizer.update({"h": np.zeros(3, "f2")}, optimizer.init(half), half)
    assert (half["h"] == 1).all()


def test_bfloat16_parameters():
    bfloat16 = ml_dtypes.bfloat16
    for make in MAKERS.values():
        optimizer = make()
        p = {"w": np.ones(4, bfloat16)}
        optimizer.update({"w": np.ones(4, bfloat16)}, optimizer.init(p), p)
        assert p["w"].dtype == bfloat16
        assert np.all(p["w"].astype("f4") < 1)


def test_bad_gradients_change_nothing():
    optimizer = optim.sgd(0.1)
    p = {"a": np.ones(2), "b": np.ones(3)}
    state = optimizer.init(p)
    with pytest.raises(ConfigError, match=r"'b' of shape \(3,\) got no gradient"):
        optimizer.update({"a": np.ones(2)}, state, p)
    with pytest.raises(ConfigError, match=r"got a gradient of shape \(4,\)"):
        optimizer.update({"a": np.ones(2), "b": np.ones(4)}, state, p)
    np.testing.assert_array_equal(p["a"], 1)
    assert state["step"] == 0
    with pytest.raises(ConfigError, match="parameter 'i' is int64"):
        optimizer.init({"i": np.arange(3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.sgd(-0.1), "lr is -0.1"),
        (lambda: optim.sgd("0.1"), "lr is '0.1', expected a number"),
        (lambda: optim.sgd(float("nan")), "lr is nan"),
        (lambda: optim.momentum(0.1, 1.0), "momentum: beta is 1.0, expected 0 <= beta < 1"),
        (lambda: optim.adam(0.1, beta2="x"), "adam: beta2 is 'x', expected a number"),
        (lambda: optim.sgd(0.1, weight_decay=-1), "weight_decay is -1"),
        (lambda: optim.from_settings("sdg", {"lr": 1}), "did you mean 'sgd'"),
        (lambda: optim.from_settings("sgd", {"l": 1}), "unknown setting 'l'.*did you mean 'lr'"),
        (lambda: optim.from_settings("adam", {}), "setting 'lr' is missing"),
        (
            lambda: optim.from_settings("sgd", {"lr": {"schedule": "cosin", "lr": 1}}),
            "unknown schedule 'cosin': expected one of 'constant', 'cosine', 'step_decay'",
        ),
        (lambda: optim.from_settings("sgd", {"lr": {"lr": 1}}), "without the key 'schedule'"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_settings_round_trip():
    made = optim.from_settings(
        "momentum", {"lr": {"schedule": "cosine", "lr": 0.05, "steps": 9, "warmup": 2}}
    )
    again = optim.from_settings(made.name, made.settings)
    assert again.settings == made.settings
    assert again.settings["lr"]["schedule"] == "cosine"
    assert again.settings["beta"] == 0.9
    assert optim.adam(0.5).settings["lr"] == 0.5


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_bound_update_has_the_same_bits(name, decay):
    """`update.bind` looks the arrays up once; other values in them count, in the state as well."""
    optimizer, rng = MAKERS[name](weight_decay=decay), np.random.default_rng(1)
    # The usual eps of adam is 0 in half precision.
    kinds = {"a": "f4", "b": "f8"} | ({} if name == "adam" else {"c": "f2"})
    start = {key: rng.standard_normal(5).astype(kind) for key, kind in kinds.items()}
    gradients = {key: np.empty_like(value) for key, value in start.items()}
    (plain, state), (bound, kept) = (
        (own, optimizer.init(own))
        for own in ({k: v.copy() for k, v in start.items()} for _ in "ab")
    )
    again = optimizer.update.bind(gradients, kept, bound)
    for weight in (1.0, 0.25, 2.0):
        for gradient in gradients.values():
            gradient[...] = rng.standard_normal(5)
        for each in (state, kept):
            each["step"][...] += 1  # as a restored checkpoint would
        optimizer.update(gradients, state, plain, weight)
        again(weight)
        assert {k: v.tobytes() for k, v in plain.items()} == {
            k: v.tobytes() for k, v in bound.items()
        }
        assert repr(state) == repr(kept)


def test_what_is_not_bound():
    """Long arrays, rows and arrays of other kinds have the usual update only."""
    sgd = optim.sgd(0.1)
    long, short = np.zeros(PIECE + 1), np.zeros(4)
    assert sgd.update.bind({"x": long}, sgd.init({"x": long}), {"x": long}) is None
    rows = np.array([1]), np.ones((1, 1))
    assert sgd.update.bind({"x": rows}, sgd.init({"x": short}), {"x": short}) is None
    assert not hasattr(optim.clipped(sgd, 1.0).update, "bind")
