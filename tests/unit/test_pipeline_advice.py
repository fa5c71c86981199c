"""A step of a pipeline beside one of allreduce: which wins, and why (R88)."""

import json

import pytest

from mpidist.cli.main import main
from mpidist.errors import ConfigError
from mpidist.pipeline import Layer, NoPartition, chain, cut, write_profile
from mpidist.pipeline.plan_advice import advise_step


def two_layers(parameters, output=0.0):
    return chain([Layer(name, "Dense", 0.001, 0.002, output, parameters) for name in "ab"])


def advise(profile, workers=2, microbatches=4, **more):
    settings = {"bandwidth": 1e9, "stages": 2, "replication": False, **more}
    plan = cut(profile, workers=workers, **settings)
    return advise_step(profile, plan, workers=workers, microbatches=microbatches, settings=settings)


@pytest.mark.parametrize(
    ("parameters", "winner", "told"),
    [
        (1e6, "allreduce", "idle 20.0% of the time"),
        (1.5e6, "equal", "prefer allreduce"),
        (5e6, "pipeline", "allreduce sums 10.00 MB of gradients on each worker in 10.000 ms"),
    ],
)
def test_the_times_are_those_of_the_formulas(parameters, winner, told):
    """1f1b takes 3 (m + p - 1) ms, allreduce 2 steps of 6 ms and its sum."""
    advice = advise(two_layers(parameters))
    assert advice.pipeline_seconds == pytest.approx(0.015)
    assert advice.allreduce_seconds == pytest.approx(0.012 + 2 * parameters / 1e9)
    assert (advice.winner, advice.replicas, advice.sums_seconds) == (winner, (1, 1), 0.0)
    assert told in advice.reason


def test_messages_and_the_sums_of_replicas_count():
    """Both stages have two replicas, with 2 of 4 microbatches each; the first one ends last."""
    profile = two_layers(4e6)
    settings = {"bandwidth": 1e9, "stages": 2}
    plan = cut(profile, workers=4, **settings)
    assert [stage.replicas for stage in plan.stages] == [2, 2]
    advice = advise_step(profile, plan, workers=4, microbatches=4, settings=settings)
    assert advice.pipeline_seconds == pytest.approx(0.009 + 0.004)
    assert advice.sums_seconds == pytest.approx(0.004)
    slow = advise(two_layers(1e6, output=1e6))  # a message takes 1 ms
    assert slow.pipeline_seconds > 0.017


def test_a_model_that_fits_no_worker_needs_a_pipeline():
    """The first stage keeps its parameters twice, the second one once."""
    layers = [
        Layer("a", "Dense", 0.001, 0.002, 0, 5e5),
        Layer("b", "Dense", 0.001, 0.002, 0, 1.5e6),
    ]
    advice = advise(chain(layers), memory=1.6e6)
    assert advice.allreduce_seconds == float("inf")
    assert advice.as_dict()["allreduce_seconds"] is None
    assert advice.winner == "pipeline"
    assert "the whole model needs 2.00 MB, and a worker has less memory" in advice.reason


def test_a_plan_of_one_stage_is_compared_with_two():
    profile = two_layers(1e3)
    settings = {"bandwidth": 1e9}
    plan = cut(profile, workers=2, **settings)
    assert len(plan.stages) == 1
    advice = advise_step(profile, plan, workers=2, microbatches=4, settings=settings)
    assert (advice.winner, advice.replicas) == ("allreduce", (1, 1))
    alone = cut(profile, workers=1, **settings)
    assert advise_step(profile, alone, workers=1, microbatches=4, settings=settings) is None
    with pytest.raises(ConfigError, match="microbatches is 0"):
        advise_step(profile, plan, workers=2, microbatches=0, settings=settings)


def test_the_command_says_which_wins(tmp_path, capsys):
    file = str(tmp_path / "profile.txt")
    write_profile(two_layers(5e6), file)
    words = ["pipeline", "partition", file, "--workers", "2", "--no-replication"]
    assert main([*words, "--microbatches", "4"]) == 0
    out = capsys.readouterr().out
    assert "a step of 4 microbatches: pipeline on 1 + 1 workers 15.000 ms" in out
    assert "allreduce on 2 22.000 ms" in out
    assert "the pipeline wins: allreduce sums 10.00 MB" in out
    assert main([*words, "--microbatches", "4", "--json", "-"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert (step["winner"], step["microbatches"]) == ("pipeline", 4)
    assert main([*words, "--microbatches", "0"]) == 2
    assert main([*words[:4], "1"]) == 0
    assert "a step of" not in capsys.readouterr().out


def test_a_layer_that_alone_is_too_large_is_told_of():
    """10 MB of outputs and parameters; 3 MB of memory less 1 MB of outputs hold 2 of 9 MB."""
    layers = [Layer("a", "Dense", 0.1, 0.1, 1e5, 1e5), Layer("b", "Dense", 0.1, 0.1, 1e6, 9e6)]
    told = r"node b \(Dense\) alone needs 10000000 bytes: split it over 5 ranks or more, by"
    with pytest.raises(NoPartition, match=told):
        cut(chain(layers), workers=2, memory=3e6)
    with pytest.raises(NoPartition, match="of which outputs take 1000000: use smaller microb"):
        cut(chain(layers), workers=2, memory=1e6)
