"""Ranks get the stages and replicas with which few bytes cross hosts (R88, R126)."""

import pytest
from mpi4py import MPI
from test_train import TEST, TRAIN

import mpidist as md
from mpidist import models, optim
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.errors import MpidistError
from mpidist.models.layers import Relu
from mpidist.runtime.context import of


def fit(comm, strategy, microbatches, **more):
    """The parameters of a stage have 1,300 bytes; 16 numbers for a sample cross the cut."""
    model = models.mlp([12, 16, 16, 3], seed=7)
    given = {"global_batch": 20, "steps": 12, "test_data": TEST, **more}
    return md.train(
        comm, model, TRAIN, optimizer=optim.adam(0.01), microbatches=microbatches,
        strategy=strategy, **given,
    )  # fmt: skip


def alone(microbatches, **more):
    try:
        return fit(MPI.COMM_SELF, md.AllReduce(), microbatches, **more)
    finally:
        md.free(MPI.COMM_SELF)


@pytest.mark.ranks(4)
def test_pipelines_or_replicas_inside_a_host(comm, folder):
    """Two hosts of two ranks; the bits and the accuracy do not depend on the order."""
    memory_of(of(comm), 2)
    strategy, wide, deep = md.Pipeline(cuts=[2], replicas=[2, 2]), [0, 1, 0, 1], [0, 0, 1, 1]
    for batch, stages in ((200, wide), (4, deep)):
        expected = alone(4, global_batch=batch)
        found = fit(comm, strategy, 4, global_batch=batch)
        assert found.parameters_sha256 == expected.parameters_sha256
        assert found.test_accuracy == expected.test_accuracy
        assert found.pipeline["stages"] == stages
        # In the order of the ranks, too: the first stage keeps more microbatches.
        assert found.pipeline["kept"] == [2 - stage for stage in stages]
    # A checkpoint of this order restarts with the ranks in theirs, and the other way round.
    given = {"checkpoint": folder, "global_batch": 200, "resume": "auto"}
    fit(comm, strategy, 4, stop_after=5, **given)
    plain = comm.Dup()
    half = fit(plain, strategy, 4, stop_after=8, **given)
    assert half.pipeline["stages"] == deep
    whole = fit(comm, strategy, 4, **given)
    assert (whole.resumed_at, whole.pipeline["stages"]) == (8, wide)
    assert whole.parameters_sha256 == alone(4, global_batch=200).parameters_sha256
    md.free(plain)
    plain.Free()


class Fails(Relu):
    calls = 0

    def forward(self, parameters, x):
        Fails.calls += 1
        if Fails.calls == 30:
            raise ZeroDivisionError("the layer failed")
        return super().forward(parameters, x)


@pytest.mark.ranks(4)
def test_an_exception_ends_ranks_in_another_order(comm):
    memory_of(of(comm), 2)
    Fails.calls = 0
    model = models.mlp([12, 16, 16, 3], seed=7)
    model.layers[3] = Fails()
    with pytest.raises((ZeroDivisionError, MpidistError), match="the layer failed"):
        md.train(
            comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=200, steps=90,
            microbatches=4, strategy=md.Pipeline(cuts=[2], replicas=[2, 2]),
        )  # fmt: skip
