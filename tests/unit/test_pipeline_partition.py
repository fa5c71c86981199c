"""The best cut of a model into stages: against all others, and published figures (R61, R84)."""

import itertools
import math
import random
import time

import pytest

from mpidist.errors import ConfigError
from mpidist.pipeline import COSTS, NoPartition, cut, read_profile, stage_partition
from mpidist.pipeline.cut_sets import cut_sets
from mpidist.pipeline.layer_profile import Layer, chain, profile_of


def random_profile(rng, most=10):
    """Layers of random costs, some of them zero, and edges that are often branches."""
    n = rng.randint(1, most)

    def some(scale):
        return rng.choice([0.0, 1.0, rng.random()]) * scale

    layers = [Layer(f"n{k}", "x", some(1e-3), some(2e-3), some(2e6), some(4e6)) for k in range(n)]
    edges = [
        (f"n{a}", f"n{b}")
        for a in range(n)
        for b in range(a + 1, n)
        if rng.random() < (0.7 if b == a + 1 else 0.15)
    ]
    return profile_of(layers, edges)


def seconds_of(cost, c, a, w, r, bandwidth):
    """The three formulas, once more, for numbers."""
    if cost == "pipedream":
        return (c + 4 * (r - 1) / r * w / bandwidth) / r
    wire = (a + 2 * (r - 1) / r * w) / bandwidth
    return (max(c, wire) if cost == "overlap" else c + wire) / r


def all_plans(profile, workers, memory, replication, cost, bandwidth):
    """Yield (bottleneck, workers, stages) of every plan, by trying all of them."""
    n, layers = len(profile.layers), profile.layers
    closed = [
        frozenset(chosen)
        for size in range(n + 1)
        for chosen in itertools.combinations(range(n), size)
        if all(a in chosen for a, b in profile.edges if b in chosen)
    ]
    assert len(closed) == len(cut_sets(profile)[0])

    def crossing(inside):
        users = {a for a, b in profile.edges if a in inside and b not in inside}
        return sum(layers[a].output_bytes for a in users)

    def behind(inside, left):
        if len(inside) == n:
            yield []
        for larger in closed:
            if inside < larger:
                for r in range(1, (left if replication else 1) + 1):
                    if r <= left:
                        for rest in behind(larger, left - r):
                            yield [(inside, larger, r), *rest]

    for plan in behind(frozenset(), workers):
        slowest, fits, after = 0.0, True, 0
        for inside, larger, r in reversed(plan):
            mine = [layers[k] for k in larger - inside]
            after += r
            c, w = sum(one.seconds for one in mine), sum(one.parameter_bytes for one in mine)
            a = crossing(inside) + crossing(larger)
            slowest = max(slowest, seconds_of(cost, c, a, w, r, bandwidth))
            kept = math.ceil(after / r) * (w + sum(one.output_bytes for one in mine))
            fits = fits and (memory is None or kept <= memory)
        if fits:
            yield slowest, after, len(plan)


@pytest.mark.parametrize("cost", COSTS)
def test_no_other_plan_is_better(cost):
    """300 random models: the least bottleneck, then the fewest workers, then the fewest stages."""
    rng, refused = random.Random(f"partition {cost}"), 0
    for trial in range(100):
        profile = random_profile(rng, 10 if trial % 10 == 0 else 6)
        workers = rng.randint(1, 4 if len(profile.layers) < 8 else 3)
        memory = rng.choice([None, 10 ** rng.uniform(6, 7.8)])
        replication, bandwidth = rng.random() < 0.8, 10 ** rng.uniform(8, 10)
        plans = list(all_plans(profile, workers, memory, replication, cost, bandwidth))
        settings = {"workers": workers, "memory": memory, "replication": replication}
        settings |= {"cost": cost, "bandwidth": bandwidth}
        for stages in (None, rng.randint(1, 3)):
            fitting = [plan for plan in plans if stages in (None, plan[2])]
            if not fitting:
                refused += 1
                with pytest.raises(NoPartition):
                    cut(profile, stages=stages, **settings)
                continue
            least = min(fitting)[0]
            equal = [plan[1:] for plan in fitting if plan[0] <= least * (1 + 1e-12)]
            found = cut(profile, stages=stages, **settings)
            assert found.bottleneck_seconds == pytest.approx(least, rel=1e-11)
            assert (found.workers, len(found.stages)) == min(equal)
            assert max(s.seconds for s in found.stages) == found.bottleneck_seconds
            names = [name for stage in found.stages for name in stage.nodes]
            assert sorted(names) == sorted(layer.name for layer in profile.layers)
            assert all(memory is None or s.memory_bytes <= memory for s in found.stages)
    assert refused


PUBLISHED = [
    ("alexnet", "pipedream", 2, {}, 0.043075),
    ("alexnet", "pipedream", 4, {}, 0.023166),
    ("alexnet", "pipedream", 8, {}, 0.011620),
    ("alexnet", "pipedream", 4, {"stages": 4, "replication": False}, 0.028721),
    ("gnmt", "pipedream", 2, {}, 0.045936),
    ("gnmt", "pipedream", 4, {}, 0.025868),
    ("alexnet", "overlap", 4, {}, 0.025436),
    ("alexnet", "overlap", 8, {}, 0.010901),
]


@pytest.mark.parametrize(("model", "cost", "workers", "more", "seconds"), PUBLISHED)
def test_pipedreams_own_figures(data_dir, model, cost, workers, more, seconds):
    """The program of PipeDream finds these; with overlap, a stage of 13 layers and one of 9."""
    profile = read_profile(data_dir / "pipedream" / f"{model}.txt")
    found = cut(profile, workers=workers, bandwidth=1e9, cost=cost, **more)
    assert found.bottleneck_seconds == pytest.approx(seconds, rel=1e-5, abs=5e-7)
    if cost == "overlap":
        shape = [(len(stage.nodes), stage.replicas) for stage in found.stages]
        assert shape == [(13, workers - 1), (9, 1)]


def branches(layers, of, seed=0):
    """A chain in which every `of`-th place is a fork of two branches of eight layers."""
    rng, edges, k = random.Random(seed), [], 0
    while k + 1 < layers:
        if k % of == of - 1 and k + 17 < layers:
            for first in (k + 1, k + 9):
                edges.append((k, first))
                edges += [(j, j + 1) for j in range(first, first + 7)]
                edges.append((first + 7, k + 17))
            k += 17
        else:
            edges.append((k, k + 1))
            k += 1
    made = [
        Layer(f"n{j}", "x", rng.random() * 1e-3, rng.random() * 2e-3, 1e5, rng.random() * 1e6)
        for j in range(layers)
    ]
    return profile_of(made, [(f"n{a}", f"n{b}") for a, b in edges])


def test_a_large_model_takes_no_time():
    """176 layers with 241 sets or more, 16 workers: 3 s at most."""
    profile = branches(176, 70)
    sets, exact = cut_sets(profile)
    assert exact
    assert len(sets) >= 241
    began = time.process_time()
    found = cut(profile, workers=16)
    assert time.process_time() - began < 3
    assert found.exact


def test_a_model_with_too_many_cuts():
    """16 layers side by side have 65,536 sets: those of one order are used, and that is said."""
    layers = [Layer(f"n{k}", "x", 1e-3, 2e-3, 1.0, 1.0) for k in range(16)]
    found = cut(profile_of(layers, []), workers=4)
    assert not found.exact
    assert found.bottleneck_seconds == pytest.approx(0.012)


@pytest.mark.parametrize(("layers", "workers"), [(4, 2), (2, 4)])
def test_more_stages_than_workers_or_layers_are_not_searched_for(monkeypatch, layers, workers):
    monkeypatch.setattr(stage_partition._Search, "plans", None)
    profile = chain([Layer(f"n{k}", "x", 1e-3, 2e-3, 1.0, 1.0) for k in range(layers)])
    with pytest.raises(NoPartition, match="3 stages"):
        cut(profile, workers=workers, stages=3)


def test_the_stages_that_a_profile_names():
    """Only the replicas are chosen; a stage may not feed an earlier one."""
    times, stages = (1, 6, 1), (0, 4, 9)
    layers = [
        Layer(f"n{k}", "x", t * 1e-3, 0.0, 0.0, 0.0, s)
        for k, (t, s) in enumerate(zip(times, stages, strict=True))
    ]
    found = cut(chain(layers), workers=5, evaluate=True)
    assert [(stage.nodes, stage.replicas) for stage in found.stages] == [
        (("n0",), 1), (("n1",), 3), (("n2",), 1),
    ]  # fmt: skip
    assert cut(chain(layers), workers=9, evaluate=True).workers == 8
    with pytest.raises(ConfigError, match="names 3 stages"):
        cut(chain(layers), workers=5, evaluate=True, stages=2)
    with pytest.raises(NoPartition):
        cut(chain(layers), workers=2, evaluate=True)
    with pytest.raises(ConfigError, match="n0 of stage 9 feeds node n1 of stage 4"):
        cut(chain([Layer("n0", "x", 1, 1, 1, 1, 9), layers[1]]), workers=5, evaluate=True)
    with pytest.raises(ConfigError, match="n0 has no stage_id"):
        cut(chain([Layer("n0", "x", 1, 1, 1, 1)]), workers=5, evaluate=True)


def test_what_a_plan_says():
    """Sizes, memory and times of a hand-made model of three layers on 1 GB/s."""
    layers = [Layer("a", "x", 1e-3, 2e-3, 1e6, 5e6), Layer("b", "x", 1e-3, 2e-3, 2e6, 0.0)]
    layers.append(Layer("c", "x", 0.0, 3e-3, 3e6, 1e6))
    plan = cut(chain(layers), workers=3, bandwidth=1e9, replication=False)
    assert plan.speedup == pytest.approx(3)
    a, b, c = plan.stages
    assert (a.input_bytes, a.output_bytes, b.input_bytes, c.output_bytes) == (0, 1e6, 1e6, 0)
    assert [stage.in_flight for stage in plan.stages] == [3, 2, 1]
    assert [stage.memory_bytes for stage in plan.stages] == [18e6, 4e6, 4e6]
    # One stage on three workers: the gradients' ring is hidden behind the computation.
    assert plan.data_parallel_seconds == pytest.approx(3e-3)
    assert plan.as_dict()["stages"][0]["nodes"] == ("a",)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": 2, "bandwidth": 0.0}, "bandwidth=0.0"),
        ({"workers": 2, "bandwidth": float("nan")}, "bandwidth=nan"),
        ({"workers": 2, "memory": -1.0}, "memory=-1.0"),
        ({"workers": 2, "bandwidth": "1e9"}, "bandwidth='1e9'"),
        ({"workers": 2, "stages": 0}, "stages is 0"),
        ({"workers": 2, "cost": "overlapp"}, "did you mean|overlap"),
    ],
)
def test_wrong_arguments(settings, words):
    with pytest.raises(ConfigError, match=words):
        cut(chain([Layer("a", "x", 1.0, 1.0, 1.0, 1.0)]), **settings)
