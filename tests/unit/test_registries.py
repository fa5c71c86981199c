"""A new algorithm, model, optimizer or policy needs only a new name in a table (R149)."""

import numpy as np
import pytest

from mpidist import data, models, optim
from mpidist.collectives.schedules import algorithms, check
from mpidist.errors import ConfigError
from mpidist.servers.consistency import SSP
from mpidist.training import job, strategies
from mpidist.training.exchanges import server_strategy

JOB = {
    "global_batch": 20,
    "steps": 1,
    "data": {"name": "digits"},
    "model": {"name": "logistic", "inputs": [1, 8, 8], "classes": 10},
    "optimizer": {"name": "sgd", "lr": 0.1},
}


@pytest.mark.parametrize(
    ("table", "part", "like"),
    [
        (models.MODELS, "model", "logistic"),
        (data.SOURCES, "data", "digits"),
        (optim.OPTIMIZERS, "optimizer", "sgd"),
    ],
)
def test_one_line_makes_it_known_to_job_files(monkeypatch, table, part, like):
    """R149: models, sources, optimizers."""
    values = {**JOB, part: {**JOB[part], "name": "brand_new"}}
    with pytest.raises(ConfigError, match="unknown .*'brand_new'.*'" + like):
        job.build_run(job.check_job(values), None)
    monkeypatch.setitem(table, "brand_new", table[like])
    parts = job.build_run(job.check_job(values), None)
    assert len(parts.train) == 1437


def test_a_schedule_and_a_policy(monkeypatch):
    """R149: learning-rate schedules and consistencies."""
    monkeypatch.setitem(optim.SCHEDULES, "half", lambda lr: optim.constant(lr / 2))
    made = optim.from_settings("sgd", {"lr": {"schedule": "half", "lr": 0.5}})
    parameters, gradients = {"w": np.ones(1)}, {"w": np.ones(1)}
    made.update(gradients, made.init(parameters), parameters)
    assert parameters["w"][0] == 0.75
    monkeypatch.setitem(server_strategy.CONSISTENCIES, "loose", lambda: SSP(100))
    strategy = strategies.from_settings("parameter_server", {"consistency": "loose"})
    assert strategy.consistency == SSP(100)


def test_an_algorithm(monkeypatch):
    """R149: a builder of steps in the table has a name for `md.allreduce` and a proof."""
    with pytest.raises(ConfigError, match="'mine'"):
        algorithms.check_name("mine", algorithms.ALLREDUCE)
    naive = algorithms.ALLREDUCE["naive"]
    monkeypatch.setitem(algorithms.ALLREDUCE, "mine", naive)
    algorithms.check_name("mine", algorithms.ALLREDUCE)
    assert strategies.AllReduce("mine").algorithm == "mine"
    check.check_allreduce(lambda p, r, n: algorithms.ALLREDUCE["mine"](p, r, n, 4), 5, 7)
