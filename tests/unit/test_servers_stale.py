"""Policies for stale gradients: weights, compensation, counts and warnings (R23, R24, R25, R94)."""

import numpy as np
import pytest
from benchmarks import stale_policies

import mpidist as md
from mpidist import events
from mpidist.errors import ConfigError
from mpidist.servers.consistency import Apply
from mpidist.servers.layout.placement import RowPolicy, place_tensors
from mpidist.servers.layout.routing import ShardPart, whole_parts
from mpidist.servers.model_facts import Request, parse_model
from mpidist.servers.modes.push_record import DROPPED_IN_A_ROW, PulledCopies, PushRecord
from mpidist.servers.modes.stale_gradients import STALE, Stale, check_momentum, stale_policy
from mpidist.servers.server import Hosted, Push
from mpidist.servers.shards import ServerShard
from mpidist.training.strategies import from_settings


def test_the_factors():
    keep, drop = md.KeepStale(), md.DropStale(16)
    assert [keep.factor(age, 8, 64) for age in (0, 72)] == [1, 1]
    assert [drop.factor(age, 8, 64) for age in (0, 16, 17, 72)] == [1, 1, 0, 0]
    scale = md.ScaleStale(8)
    assert [scale.factor(age, 8, 64) for age in (0, 8, 16)] == [1, 0.5, 0.25]
    assert 0 < scale.factor(10**6, 8, 64) < 1e-8  # never dropped
    assert md.DelayCompensated(0.5).factor(72, 8, 64) == 1


def test_old_gradients_of_much_data_are_kept():
    """R24: by a number of samples, or by a share of the global batch."""
    by_number = md.DropStale(4, keep_if_samples=32)
    assert [by_number.factor(5, n, None) for n in (-1, 31, 32, 64)] == [0, 0, 1, 1]
    by_share = md.DropStale(4, keep_if_samples=0.5)
    assert [by_share.factor(5, n, 64) for n in (31, 32)] == [0, 1]
    assert by_share.factor(5, 64, None) == 0


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_compensation_is_the_formula(dtype):
    """For a quadratic loss in one dimension with g * g equal to the curvature it is exact."""
    policy = md.DelayCompensated(0.5)
    gradient, now, before = (np.array(x, dtype) for x in ([2, -1], [3, 1], [1, 2]))
    found = policy.compensated(gradient, now, before)
    assert found.dtype == dtype
    assert found.tolist() == [2 + 0.5 * 4 * 2, -1 + 0.5 * 1 * -1]
    assert md.DelayCompensated(0).compensated(gradient, now, before).tolist() == [2, -1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: md.DropStale(-1), "DropStale: beyond is -1"),
        (lambda: md.DropStale(1.5), "DropStale: beyond is 1.5"),
        (lambda: md.DropStale(4, keep_if_samples=0), "keep_if_samples is 0, expected a number abo"),
        (lambda: md.DropStale(4, keep_if_samples="8"), "keep_if_samples is '8'"),
        (lambda: md.ScaleStale(0), "ScaleStale: half_life is 0"),
        (lambda: md.ScaleStale(float("nan")), "half_life is nan"),
        (lambda: md.DelayCompensated(-1), "lam is -1, expected a number of at least 0"),
        (lambda: md.DelayCompensated(True), "lam is True"),
        (lambda: stale_policy("dorp"), "unknown policy for stale gradients 'dorp'"),
        (lambda: stale_policy({"beyond": 3}), "unknown policy for stale gradients None"),
        (lambda: stale_policy({"name": "drop"}), "setting 'beyond' is missing"),
        (lambda: stale_policy({"name": "scale", "half": 1}), "unknown setting 'half'"),
        (lambda: stale_policy(7), "stale is 7; give md.KeepStale()"),
        (lambda: md.ParameterServer(stale="dorp"), "unknown policy"),
    ],
)
def test_bad_settings(make, text):
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)


def test_in_a_job_file():
    settings = {"consistency": "asp", "stale": {"name": "drop", "beyond": 3, "keep_if_samples": 8}}
    assert from_settings("parameter_server", settings).stale == md.DropStale(3, 8)
    assert from_settings("parameter_server", {"stale": "keep"}).stale == md.KeepStale()
    assert from_settings("parameter_server", {}).stale == md.KeepStale()
    assert md.ParameterServer(stale={"name": "scale", "half_life": 4}).stale == md.ScaleStale(4)


def test_a_new_policy_is_one_class_and_one_line(monkeypatch):
    """R25."""

    class Half(Stale):
        def factor(self, age, samples, global_batch):
            return 0.5

    monkeypatch.setitem(STALE, "half", Half)
    assert stale_policy("half").factor(3, 1, None) == 0.5


@pytest.mark.parametrize("mode", [md.BSP(), md.SSP(0), md.DSSP(0, 0), md.BackupWorkers(1)], ids=str)
def test_modes_without_stale_gradients_take_no_policy(mode):
    asked = Request("m", {"x": np.zeros(3)}, md.optim.sgd(1.0), mode)
    parse_model(asked)
    with pytest.raises(ConfigError, match=r"stale=DropStale.* needs consistency ASP, SSP\(1\)"):
        parse_model(asked._replace(stale=md.DropStale(3)))


def test_a_share_needs_a_global_batch():
    asked = Request("m", {"x": np.zeros(3)}, md.optim.sgd(1.0), md.ASP(),
                    stale=md.DropStale(3, 0.5))  # fmt: skip
    with pytest.raises(ConfigError, match="is a share of the global batch; give global_batch="):
        parse_model(asked)
    parse_model(asked._replace(global_batch=64))
    with pytest.raises(ConfigError, match="give a policy, not its name"):
        parse_model(asked._replace(stale="keep"))


def hosted(stale, workers=2, shape=(4, 2)):
    layout = place_tensors({"w": (shape, "f8")}, 1)
    asked = Request("m", {}, md.optim.sgd(1.0), md.ASP(), stale=stale, global_batch=4)
    return Hosted(asked, ServerShard(layout, 0, asked.optimizer, {}, 0), workers)


def push(model, worker, value, samples=4, rows=None):
    layout = model.shard.layout
    (part,) = whole_parts(layout, 0)
    if rows is not None:
        part = ShardPart(part.piece, np.array(rows))
    parts = [(part, np.full(part.elements(layout), float(value)))]
    model.apply(Apply(0, ((worker, Push(None, parts, samples, model.pulled[worker])),)), [5, 6])


def pull(model, worker, rows=None):
    (part,) = whole_parts(model.shard.layout, 0)
    model.keep(worker, [part if rows is None else ShardPart(part.piece, np.array(rows))])


def test_the_server_drops_scales_and_counts():
    model = hosted(md.DropStale(1))
    for worker in (0, 1):
        pull(model, worker)
    for _ in range(2):
        push(model, 0, -1)
    push(model, 1, -100)  # 2 updates old
    assert model.shard.parameters["w"].tolist() == [2.0] * 8
    assert model.shard.version == 2
    facts = model.facts()
    assert (facts["applied"], facts["dropped"]) == ([2, 0], [0, 1])
    assert facts["staleness"] == {0: 1, 1: 1}
    model = hosted(md.ScaleStale(2))
    for _ in range(3):
        push(model, 0, -1, samples=2)  # 0, 1 and 2 updates old, with a weight of one half
    assert model.shard.parameters["w"][0] == pytest.approx((1 + 2**-0.5 + 0.5) / 2)
    assert model.facts()["weights"] == [pytest.approx((1 + 2**-0.5 + 0.5) / 3), 0.0]


def test_the_server_compensates_by_what_the_worker_pulled():
    model = hosted(md.DelayCompensated(0.5))
    pull(model, 0)
    pull(model, 1)
    push(model, 0, -2)
    push(model, 1, -1)  # w has moved by 2: -1 + 0.5 * 1 * 2 = 0
    assert model.shard.parameters["w"].tolist() == [2.0] * 8
    pull(model, 1, rows=[1, 3])
    push(model, 1, -1, rows=[0, 1])  # row 0 was pulled at 0, row 1 at 2
    assert model.shard.parameters["w"].reshape(4, 2)[:, 0].tolist() == [2, 3, 2, 2]


def test_a_push_without_a_pull_is_not_compensated():
    model = hosted(md.DelayCompensated(0.5))
    push(model, 0, -2)
    push(model, 0, -2)
    assert model.shard.parameters["w"][0] == 4
    copies = PulledCopies(model.shard, 1)
    gradient = np.ones(8)
    copies.correct(0, [(whole_parts(model.shard.layout, 0)[0], gradient)], md.DelayCompensated(1))
    assert gradient.tolist() == [1.0] * 8


def test_a_worker_whose_pushes_are_always_dropped_is_reported_once(capsys, monkeypatch):
    monkeypatch.setattr(events, "VERBOSITY", 1)
    record = PushRecord("m", 2)
    for _ in range(DROPPED_IN_A_ROW - 1):
        record.drop(1, 6, "too old")
    record.note(1, 3)
    for _ in range(2 * DROPPED_IN_A_ROW):
        record.drop(1, 6, "too old")
        record.note(0, 3)
    said = capsys.readouterr().err
    assert said.count("pushes of rank 6 were all dropped (too old)") == 1
    assert record.facts()["dropped"] == [0, 3 * DROPPED_IN_A_ROW - 1]
    # Not again after a push that counts, and not by the other servers, which see the same.
    record.note(1, 3)
    other = PushRecord("m", 2, server=1)
    for _ in range(DROPPED_IN_A_ROW):
        record.drop(1, 6, "too old")
        other.drop(1, 6, "too old")
    assert capsys.readouterr().err == ""


def test_where_keep_fails_a_policy_helps(monkeypatch):
    """8 workers, one 12 x slower, momentum 0.9: `make bench-staleness` has the whole table."""
    monkeypatch.setattr(events, "VERBOSITY", 0)
    keep, facts = stale_policies.train(md.KeepStale(), 0.05, 0.9, 64, seed=0)
    ages = sorted(age for age, times in facts["staleness"].items() for _ in range(times))
    assert ages[len(ages) // 2] == 6
    assert 70 < ages[len(ages) * 99 // 100] < 85
    scaled, facts = stale_policies.train(md.ScaleStale(8), 0.05, 0.9, 64, seed=0)
    assert scaled > keep + 0.15
    assert scaled > 0.9
    assert facts["weights"][0] < 0.01 < 0.3 < min(facts["weights"][1:])


@pytest.mark.parametrize(("dtype", "big"), [("f2", 300), ("f4", 1e25)])
def test_a_correction_that_overflows_leaves_the_gradient(dtype, big):
    """The servers get finite gradients only, so they make no infinite parameters."""
    gradient = np.array([big, 2, -big], dtype)
    found = md.DelayCompensated(2).compensated(gradient, np.ones(3, dtype), np.zeros(3, dtype))
    assert found.dtype == gradient.dtype
    assert found.tolist() == [gradient[0], 10, gradient[2]]


@pytest.mark.parametrize("catch_up", [False, True])
@pytest.mark.parametrize("rows", [None, [1, 3]])
def test_momentum_of_an_old_gradient(catch_up, rows):
    """What stays in the velocity, and how far the parameters move, at once and in total."""
    layout = place_tensors(
        {
            "w": (
                (4, 2),
                "f8",
            )
        },
        1,
        {"w": RowPolicy("lazy", "ranges")},
    )
    optimizer = md.optim.momentum(0.5, 0.8)
    policy = md.MomentumCorrected(catch_up)
    asked = Request("m", {}, optimizer, md.ASP(), stale=policy, global_batch=4)
    model = Hosted(asked, ServerShard(layout, 0, optimizer, {}, 0), 2)
    named = slice(None) if rows is None else rows
    weights, velocity = np.zeros((4, 2)), np.zeros((4, 2))
    for worker, age in ((0, 0), (0, 1), (0, 2), (1, 3)):  # nobody pulls
        push(model, worker, age + 1.0, samples=2, rows=rows)
        missed = sum(0.8**k for k in range(1, age + 1)) if catch_up else 0.0
        velocity[named] = 0.8 * velocity[named] + (age + 1) * (1 + missed)
        weights[named] -= 0.5 * 0.5 * velocity[named]
        velocity[named] -= (age + 1) * (1 + missed - 0.8**age)
        (key,) = model.shard.parameters
        assert np.allclose(model.shard.parameters[key].reshape(4, 2), weights)
        assert np.allclose(model.shard.state["velocity"][key].reshape(4, 2), velocity)
    factor, kept = policy.corrected(7, 0.8)
    total = factor + kept * 0.8 / (1 - 0.8)
    assert np.isclose(total, 1 / (1 - 0.8)) == catch_up
    assert policy.corrected(0, 0.8) == (1.0, 1.0)


def test_momentum_needs_a_velocity():
    policy = md.MomentumCorrected()
    check_momentum("m", policy, md.optim.momentum(0.1))
    for optimizer in (md.optim.sgd(0.1), md.optim.adam(0.1)):
        with pytest.raises(ConfigError, match="needs the optimizer momentum, got"):
            check_momentum("m", policy, optimizer)
        check_momentum("m", md.KeepStale(), optimizer)
    with pytest.raises(ConfigError, match="needs servers with neither copies"):
        check_momentum("m", policy, md.optim.momentum(0.1), elsewhere=True)
    with pytest.raises(ConfigError, match="catch_up is 1, expected true or false"):
        md.MomentumCorrected(1)
    assert stale_policy({"name": "momentum_corrected", "catch_up": True}).catch_up


def test_compensation_after_other_shares():
    """In an elastic run, what a worker has pulled counts as pulled at the change, and only that."""
    model = hosted(md.DelayCompensated(0.5))
    pull(model, 0)
    push(model, 0, -2)
    before, new = model.shard, hosted(md.DelayCompensated(0.5)).shard
    new.version, new.parameters["w"][...] = before.version, before.parameters["w"]
    model.use_shards(new, None, 1 << 20)
    assert [sorted(values) for values in model.kept()] == [["w"], []]
    push(model, 0, -2)  # w has not moved since
    push(model, 0, -2)  # w has moved by 2: -2 + 0.5 * 4 * 2 = 2
    assert new.parameters["w"].tolist() == [2.0] * 8
    push(model, 1, -1)  # this worker has not pulled
    assert new.parameters["w"].tolist() == [3.0] * 8
    assert before.parameters["w"].tolist() == [2.0] * 8
