"""A layer of a pipeline that does not write its gradients whole is refused in its first pass."""

import numpy as np
import pytest
from test_stage import Whole, batches, network

import mpidist as md
from mpidist.errors import ConfigError, MpidistError
from mpidist.models.layers import Dense
from mpidist.pipeline import plan_stages
from mpidist.pipeline.stages.unwritten import Checked


class Unwritten(Dense):
    """Writes no bias, or all of the weights but a row, or adds to what is there."""

    how = ""

    def backward_weights(self, parameters, saved, dy, gradients, ready=lambda name: None):
        weight, bias = (gradients[name] for name in self.shapes())
        made = {name: np.zeros_like(gradients[name]) for name in self.shapes()}
        super().backward_weights(parameters, saved, dy, made, ready)
        new, bias_too = made.values()
        if self.how == "adds":
            weight += new
            bias += bias_too
            return
        weight[:, 1 if self.how == "row" else 0 :] = new[:, 1 if self.how == "row" else 0 :]
        if self.how != "bias":
            bias[...] = bias_too


#: What is not written -> what the error says.
SAID = {
    "bias": "16 of 16 numbers of the gradient of 'dense2.bias'",
    "row": "16 of 256 numbers of the gradient of 'dense2.weight'",
    "adds": "256 of 256 numbers of the gradient of 'dense2.weight'",
}


def stage_of(comm, how, whole, **plan):
    """A stage of a model whose second dense layer is `Unwritten`."""
    model = network("mlp")
    place = [k for k, layer in enumerate(model.layers) if layer.shapes()][1]
    layer = Unwritten("dense2", 16, 16)
    layer.how = how
    model.layers[place] = Whole(layer) if whole else layer
    grid = plan_stages(len(model.layers), ranks=comm.size, **plan)
    return md.Stage(comm, model, grid, gradients=plan["schedule"] == "pipedream" and md.Gradients)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "pipedream"])
def test_all_ranks_hear_of_it(comm, schedule):
    """In a whole backward pass and in its half, by a layer without halves, on both stages."""
    for how, whole, cuts in (("bias", False, [2]), ("row", True, [6]), ("adds", False, [6])):
        group = comm.Dup()  # nothing else is possible on a communicator that has failed
        stage = stage_of(group, how, whole, cuts=cuts, microbatches=4, schedule=schedule)
        layer = "Whole" if whole else "Unwritten"
        with pytest.raises(MpidistError, match=f"layer {layer} has not written {SAID[how]}") as one:
            stage.step(batches("mlp")[0], *[lambda *given: None] * (schedule == "pipedream"))
        knows = comm.rank == (0 if cuts == [6] else 1)
        assert isinstance(one.value, ConfigError) == knows
        stage.close()


@pytest.mark.ranks(2)
def test_a_nan_is_written_and_later_passes_are_not_checked(comm):
    stage = stage_of(comm, "", False, cuts=[4], microbatches=4, schedule="1f1b")
    for array in stage.parameters.values():
        array[...] = np.nan
    assert np.isnan(stage.step(batches("mlp")[0]))
    [chunk] = stage.chunks.values()
    assert chunk._layers("backward") is chunk.layers
    stage.close()


class Fills:
    """Writes all numbers of its gradient but the first ones."""

    def __init__(self, value, first):
        self.value, self.first = value, first

    def shapes(self):
        return {"w": (3,)}

    def backward(self, parameters, saved, dy, gradients, ready, first=False):
        gradients["w"][:, self.first :] = self.value


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8", "c16", "bfloat16"])
def test_numbers_of_each_dtype(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    ones = np.full(16, 255, np.uint8).view(dtype)[0]  # the negative of a GPU's NaN
    for value in (0, -1, np.nan, -np.nan, ones, np.inf, -np.inf):
        given = None, None, None, {"w": np.zeros((1, 3), dtype)}, None
        Checked(Fills(value, 0)).backward(*given)
        with pytest.raises(ConfigError, match=r"1 of 3|2 of 6"):
            Checked(Fills(value, 1)).backward(*given)
