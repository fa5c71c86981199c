"""Errors while microbatches of "pipedream" are under way end all ranks (R83, R88)."""

import numpy as np
import pytest
from test_pipedream import batch
from test_stage import network

import mpidist as md
from mpidist.errors import MpidistError
from mpidist.models.layers import Relu
from mpidist.pipeline import plan_stages


class Fails(Relu):
    """Raises on one rank, in its sixth backward pass, which is in the second step."""

    def __init__(self, here):
        self.calls, self.here = 0, here

    def backward(self, *given, **more):
        self.calls += 1
        if self.here and self.calls == 6:
            raise ZeroDivisionError("the layer failed")
        return super().backward(*given, **more)


@pytest.mark.ranks(3, 4)
def test_a_layer_that_raises_between_two_updates(comm):
    """The other replica waits in the update for this one, and the next stage for its messages."""
    replicas = {3: [2, 1], 4: [1, 2, 1]}[comm.size]
    model = network("mlp")
    place = [type(layer) for layer in model.layers].index(Relu)
    model.layers[place] = Fails(comm.rank == {3: 1, 4: 0}[comm.size])
    grid = plan_stages(8, cuts=[4, 6][: len(replicas) - 1], ranks=comm.size, microbatches=4,
                       replicas=replicas, schedule="pipedream")  # fmt: skip
    stage = md.Stage(comm, model, grid, gradients=md.Gradients)

    def steps():
        for _ in range(4):
            stage.step(batch("mlp", 12), lambda *given: None)

    with pytest.raises((ZeroDivisionError, MpidistError), match="the layer failed"):
        steps()
    stage.close()


@pytest.mark.ranks(2)
def test_an_optimizer_that_raises_in_an_update(comm):
    """In the drain of `predict`, too, which has the updates of the last microbatches."""
    grid = plan_stages(8, cuts=[4], ranks=2, microbatches=2, schedule="pipedream")
    for late in (0, 1):
        group = comm.Dup()  # nothing else is possible on a communicator that has failed
        stage, calls = md.Stage(group, network("mlp"), grid), []

        def update(gradients, parameters, weight, late=late, calls=calls):
            calls.append(weight)
            if comm.rank == 0 and len(calls) == 1 + late:
                raise ZeroDivisionError("no update")

        def all_of_it(stage=stage, update=update):
            stage.step((np.zeros((8, 12), np.float32), np.zeros(8, int)), update)
            stage.predict(np.zeros((4, 12), np.float32))

        with pytest.raises((ZeroDivisionError, MpidistError), match="no update"):
            all_of_it()
        assert len(calls) <= 2
        stage.close()
