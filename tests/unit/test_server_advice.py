"""`mpidist advise servers` and the parts of `bench servers` without MPI (R9, R10, R16, R65)."""

import json

import pytest

from mpidist.advice.server_advice import (
    PIECES,
    StepFacts,
    advised_choice,
    choices,
    server_advice_lines,
)
from mpidist.bench.server_group.server_sweep import Case, sweep_cases, sweep_lines
from mpidist.bench.server_group.step_histogram import histogram_lines, step_histogram
from mpidist.cli.main import main
from mpidist.errors import ConfigError
from mpidist.simulator.network_model import NetworkModel

#: 1 GB/s without latency: a MB takes a ms.
WIRE = NetworkModel(latency=0.0, gap=1e-9, reduction=0.0)


def facts(**given):
    usual = {"parameters": 8_000_000, "state": 0, "compute": 0.4, "ranks": 8, "network": WIRE}
    return StepFacts(**{**usual, **given})


def test_each_choice_costs_what_its_formula_says():
    """R8, R9: max(M, n M / k) over the busiest link of dedicated servers; colocated, a ring."""
    found = {(each.name, each.servers): each for each in choices(facts())}
    assert len(found) == 10
    assert found["servers", 1].messages == pytest.approx(0.056)
    assert found["servers", 2].messages == pytest.approx(0.024)
    assert found["servers", 4].messages == found["servers", 7].messages == pytest.approx(0.008)
    assert found["colocated servers", 8].messages == pytest.approx(0.014)
    assert found["allreduce", 0].messages == pytest.approx(0.014, rel=0.1)
    assert found["servers", 3].compute == pytest.approx(0.08)
    assert found["one rank", 0].seconds == 0.4
    # Its part, a sum of gradients, and pieces of each worker.
    assert found["servers", 1].memory == 2 * 8_000_000 + 7 * PIECES


CASES = {
    "allreduce": (facts(), "allreduce", "allreduce: a step takes 6"),
    "uneven steps": (facts(slowest=4.0), "colocated servers", "whose workers wait for the slowest"),
    "dedicated": (
        facts(parameters=80_000_000, compute=0.2),
        "servers",
        "4 servers for 4 workers: a step",
    ),
    "little to compute": (facts(compute=0.005), None, "neither: one rank needs 5 ms"),
    "little room": (facts(state=16_000_000, memory=26_000_000), "servers", "allreduce needs 32 MB"),
    "no room": (facts(memory=8_000_000), None, "neither: each way needs 16 MB or more"),
    "one rank": (facts(ranks=1), None, "neither: there is one rank"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_advised(name):
    given, expected, said = CASES[name]
    found = choices(given)
    advised, why = advised_choice(given, found)
    assert (None if advised is None else advised.name) == expected, why
    assert said in why
    lines = list(server_advice_lines(given, found, bound=0.01))
    assert lines[-1 if advised is None else -2] == f"advice: {why}"
    assert ("warning: messages take" in lines[-1]) == (advised is not None)
    assert sum(line.endswith("  <") for line in lines) == (advised is not None)


def test_the_command(tmp_path, capsys):
    """R9: a job file, and the numbers that decide, also as JSON."""
    words = ["advise", "servers", "jobs/digits.toml", "--ranks", "4", "--json", str(tmp_path / "a")]
    assert main([*words, "--compute", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "0.243 MB of parameters, 0.243 MB of optimizer state; a batch of 64" in out
    assert "advice: allreduce: a step takes 12" in out
    rows = json.loads((tmp_path / "a").read_text())
    assert [row["name"] for row in rows if row["advised"]] == ["allreduce"]
    assert rows[0]["seconds"] == 0.5
    assert main([*words, "--set", "global_batch=8"]) == 0
    assert "a batch of 8 takes one rank" in capsys.readouterr().out


WRONG = {
    ("--ranks", "0"): "--ranks 0: expected more than 0",
    ("--slowest", "0.5"): "--slowest 0.5: expected 1 or more",
    ("--compute", "nan"): "--compute nan: expected more than 0",
    ("--set", "model.name=lenat"): "unknown model 'lenat'",
    ("--parameters", "nowhere"): "nowhere: no parameters of a network",
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_one_line(words, capsys):
    assert main(["advise", "servers", "jobs/digits.toml", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert WRONG[words] in line


def test_the_cases_of_a_sweep():
    """R16: all numbers of workers and servers that fit."""
    both = ("dedicated", "colocated")
    assert sweep_cases(4, None, None, both) == [
        Case(1, 1, "dedicated"), Case(1, 2, "dedicated"), Case(2, 1, "dedicated"),
        Case(2, 2, "dedicated"), Case(1, 1, "colocated"), Case(2, 2, "colocated"),
        Case(4, 4, "colocated"),
    ]  # fmt: skip
    assert sweep_cases(6, [3], [1, 2, 4], both) == [
        Case(3, 1, "dedicated"), Case(3, 2, "dedicated"),
        Case(3, 1, "colocated"), Case(3, 2, "colocated"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"--workers \[8\] --servers any: no case .* 4 ranks"):
        sweep_cases(4, [8], None, ("dedicated",))


def test_what_is_said_of_a_sweep():
    """R10: a warning where communication takes too much of a step."""
    row = {"bytes": 8, "workers": 2, "servers": 1, "placement": "dedicated", "ideal": 2}
    rows = [{**row, "speed_up": 1.5, "share": 0.25}, {**row, "servers": 2, "speed_up": 0.9,
                                                     "share": 0.55}]  # fmt: skip
    best, warning = sweep_lines(rows, 0.5)
    assert best.startswith("8 bytes: 2 workers and 1 server (dedicated) are fastest, 1.50 times")
    assert "in 1 of 2 cases communication takes more than 0.5 of a step" in warning
    assert "2 workers and 2 servers (dedicated): 0.55" in warning
    assert len(sweep_lines(rows, 0.6)) == 1


def test_a_histogram_of_steps():
    """R65: each step of each rank is in one bin."""
    found = step_histogram([[1.0, 1.0, 1.04, 0.95], [1.0, 1.0, 2.5, 9.0]])
    assert found["edges_us"][2] == 1.1e6
    assert found["counts"] == [[0, 0, 4, 0, 0, 0, 0, 0], [0, 0, 2, 0, 0, 1, 0, 1]]
    lines = list(histogram_lines(found))
    assert len(lines) == 3
    assert lines[2].split() == ["worker", "1", ".", ".", "2", ".", ".", "1", ".", "1"]
