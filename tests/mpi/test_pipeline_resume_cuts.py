"""New cuts at a resume, if the last run was not as planned (R60, R62)."""

import time

import pytest
from mpi4py import MPI
from test_train import TRAIN

import mpidist as md
from mpidist import models, optim
from mpidist.models.layers import Relu


class Naps(Relu):
    """Sleeps in each pass; the last ones of a model longer, as soon as `tired`."""

    seconds, tired = 0.003, False

    def __init__(self, late):
        self.late = late

    def forward(self, parameters, x):
        time.sleep(self.seconds * (4 if self.late and Naps.tired else 1))
        return super().forward(parameters, x)


@pytest.mark.ranks(2)
def test_a_resume_cuts_anew_if_a_stage_took_longer_than_planned(comm, folder, capsys):
    """All ranks decide as rank 0, and the bits do not depend on it."""
    layers = models.mlp([12, 16, 3]).layers
    layers = [*layers[:2], *[Naps(k > 2) for k in range(6)], *layers[2:]]
    given = {"optimizer": optim.momentum(0.05), "global_batch": 20, "steps": 6, "microbatches": 4}

    def fit(comm, strategy, **more):
        return md.train(comm, models.Network(layers, (12,), 7), TRAIN, strategy=strategy,
                        **given, **more)  # fmt: skip

    Naps.tired = False
    expected = fit(MPI.COMM_SELF, md.AllReduce())
    md.free(MPI.COMM_SELF)

    def tire(report):
        Naps.tired = True

    first = fit(comm, md.Pipeline(), checkpoint=folder, stop_after=3, callbacks=[tire])
    assert first.pipeline["cuts_from"] == "measured"
    capsys.readouterr()
    second = fit(comm, md.Pipeline(), checkpoint=folder)
    told = capsys.readouterr().err
    found = second.pipeline
    [before], [cut] = first.pipeline["cuts"], found["cuts"]
    assert (found["cuts_from"], found["cuts_before"]) == ("changed", [before])
    assert cut > before
    assert found["plan_off"] > 0.2
    assert (f"mpidist: pipeline: cuts [{cut}] instead of [{before}]" in told) == (comm.rank == 0)
    assert second.parameters_sha256 == expected.parameters_sha256
    assert (second.resumed_at, second.steps) == (3, 6)
    # Cuts that are given stay, whatever the times were.
    given["steps"] = 7
    third = fit(comm, md.Pipeline(cuts=[before]), checkpoint=folder)
    assert (third.pipeline["cuts_from"], third.pipeline["plan_off"]) == ("given", None)


@pytest.mark.ranks(4)
def test_a_split_model_is_cut_anew_at_a_resume(comm, folder, monkeypatch):
    """By the times of its own last run, but not by those of a run with another split."""
    layers = models.mlp([12, 16, 17, 3]).layers
    layers = [*layers[:2], *[Naps(k > 2) for k in range(6)], *layers[2:]]
    reached = {}
    monkeypatch.setattr(Naps, "seconds", 0.001)

    def fit(strategy, stop, **more):
        model = models.Network(layers, (12,), 7)
        result = md.train(
            comm, model, TRAIN, strategy=strategy, optimizer=optim.momentum(0.05), seed=1,
            global_batch=20, steps=9, microbatches=4, checkpoint=folder, stop_after=stop, **more,
        )  # fmt: skip
        reached[stop] = result
        return result.pipeline

    def tire(report):
        Naps.tired = True

    Naps.tired = False
    split = {"dense1": "columns", "dense2": "rows"}
    first = fit(md.Pipeline(stages=2, split=split), 2, callbacks=[tire])
    assert first["cuts_from"] == "measured"
    second = fit(md.Pipeline(stages=2, split=split, split_ranks=2), 4)
    # Which of the two depends on what else the machine does: the layers are measured.
    assert second["cuts_from"] in ("changed", "kept")
    assert second["plan_off"] > 0
    for k, other in enumerate((
        md.Pipeline(stages=2, split={"dense1": "rows", "dense2": "rows"}),
        md.Pipeline(stages=2, split=split),
        md.Pipeline(stages=2),
        md.Pipeline(stages=2, split=split, split_ranks=1),
        md.Pipeline(stages=2, split=split),
    )):  # fmt: skip
        assert fit(other, 5 + k)["cuts_from"] == "measured", k
        assert reached[5 + k].resumed_at == 4 + k
    assert comm.allgather(second) == [second] * 4
    monkeypatch.setattr(Naps, "seconds", 0)
    expected = md.train(
        MPI.COMM_SELF, models.Network(layers, (12,), 7), TRAIN, optimizer=optim.momentum(0.05),
        seed=1, global_batch=20, steps=9, microbatches=4, strategy=md.AllReduce(),
    )  # fmt: skip
    md.free(MPI.COMM_SELF)
    assert reached[9].train_loss == pytest.approx(expected.train_loss, rel=1e-4)
