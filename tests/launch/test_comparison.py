"""The comparison of all modes (docs/comparison.md): it trains, simulates and draws (R154)."""

import json
import os
import sys

import numpy as np
import pytest
from benchmarks.comparison import GATES, MODES, RATE, RULES, SCENES, Digits, simulate
from python_path import python_path
from tiers import exhaustive

import mpidist as md
from mpidist import optim
from mpidist.launch.launchers import launch
from mpidist.launch.processes import Started

ENVIRON = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def alone(folder, *words):
    command = [sys.executable, "-m", "benchmarks.comparison", *words]
    job = Started(command, env={**os.environ, **ENVIRON}, cwd=folder)
    return job.finish(240).check().stdout


def test_each_part_is_drawn(tmp_path):
    """R70: a curve and a row for each mode, over time, over samples, and over the age."""
    out = ("--out", str(tmp_path))
    alone(tmp_path, "simulate", "--seeds", "1", "--steps", "40", *out)
    alone(tmp_path, "ages", "--seeds", "1", "--steps", "3", *out)
    said = alone(tmp_path, "draw", "--pictures", str(tmp_path), *out)
    for scene in SCENES:
        rows = json.loads((tmp_path / f"{scene}.json").read_text())
        assert [row["mode"] for row in rows] == [*GATES]
        assert all(row["seconds"] >= row["losses"][-1][0] > 1 for row in rows)
        picture = (tmp_path / f"comparison_{scene}.svg").read_text()
        assert all(f">{name}<" in picture for name in GATES)
    assert all(said.count(f"\n| {name} |") == len(SCENES) for name in GATES)
    picture = (tmp_path / "comparison_ages.svg").read_text()
    assert all(f">{rule}<" in picture for rule in RULES)
    assert all(said.count(f"\n| {rule} |") == 1 for rule in RULES)


def test_one_slow_rank():
    """In simulated time: who waits for the slow worker, and who passes over its steps."""
    delays = np.full((3, 12), 1.0)
    delays[0] = 3.0
    found = {name: simulate(mode, delays, 0) for name, mode in GATES.items()}
    assert {name: each["seconds"] for name, each in found.items()} == {
        "allreduce, BSP": 36, "ASP": 36, "SSP(3)": 36, "DSSP(2, 8)": 36, "BackupWorkers(1)": 15,
        "PeerAverage, every=8": 36,
    }  # fmt: skip
    # A fast worker ends with the last but one step of the slow one, or 3 of its steps before that.
    assert [found[name]["first_end"] for name in ("allreduce, BSP", "SSP(3)", "ASP")] == [
        34,
        25,
        12,
    ]
    assert found["BackupWorkers(1)"]["computed"] < 36


def test_the_simulation_of_bsp_is_serial_descent():
    found = simulate(md.BSP(), np.full((3, 8), 1.0), 0)
    problem = Digits(0)
    optimizer = optim.sgd(optim.cosine(RATE, steps=8), weight_decay=5e-4)
    parameters = problem.values()
    state = optimizer.init(parameters)
    for step in range(8):
        problem.compute(parameters, problem.batch(step))
        optimizer.update(problem.gradients, state, parameters)
    assert found["loss"] == pytest.approx(problem.judge(parameters)[0], rel=1e-4)


#: Those of `make test`; the others are played in `make test-all`.
FIRST = ["allreduce", "SSP(3)"]
OTHERS = [mode for mode in MODES if mode not in FIRST]


@pytest.mark.parametrize("modes", [FIRST, exhaustive(OTHERS)], ids=["some", "others"])
def test_each_mode_learns_mnist10k(tmp_path, data_dir, modes):
    """On 3 workers, with a twenty-fifth of the steps of docs/comparison.md: 0.89 and more."""
    numbers = ["--seeds", "1", "--steps", "60", "--data", data_dir / "mnist10k"]
    words = ["run", *numbers, "--modes", *modes]
    program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.comparison"]
    launch(4, [*program, *words, "--out", "."], env=ENVIRON, cwd=tmp_path, timeout=500).check()
    rows = json.loads((tmp_path / "mnist10k.json").read_text())
    assert [row["mode"] for row in rows] == modes
    assert {row["mode"]: row["accuracy"] for row in rows if row["accuracy"] < 0.86} == {}
