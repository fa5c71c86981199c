"""What shortens a step: the last gradient is sent early, and all layers write into one memory."""

import numpy as np
import pytest
from mpi4py import MPI
from test_stage import batches, network, run

import mpidist as md
from mpidist import models
from mpidist.models.layers import Dense, Relu
from mpidist.pipeline import plan_stages
from mpidist.pipeline.stages.stage_chunk import _has_halves
from mpidist.pipeline.stages.stage_messages import StageMessages


class Twice(Dense):
    """Inherits the halves of the backward pass, and has a whole one of its own."""

    def backward(self, parameters, x, dy, gradients, ready=lambda name: None, first=False):
        return super().backward(parameters, x, 2 * dy, gradients, ready, first)


class Weights(Dense):
    """Has a half of its own, which `Dense.backward` calls."""

    def backward_weights(self, parameters, x, dy, gradients, ready=lambda name: None):
        super().backward_weights(parameters, x, 2 * dy, gradients, ready)


def test_which_layers_have_two_halves():
    layers = models.lenet([1, 8, 8], classes=3, seed=3).layers
    assert all(_has_halves(layer) for layer in layers)
    assert _has_halves(Weights("a", 2, 2))
    assert not _has_halves(Twice("a", 2, 2))
    assert not _has_halves(type("Own", (Relu,), {"backward": Relu.backward})())


@pytest.mark.ranks(3)
def test_the_last_gradient_is_sent_before_those_of_the_weights(comm, monkeypatch):
    """On all stages but the first; and on none if there are microbatches behind."""
    noted = []
    send, weights = StageMessages.send, Dense.backward_weights
    monkeypatch.setattr(
        StageMessages, "send", lambda *given: (noted.append("send"), send(*given))[1]
    )
    monkeypatch.setattr(
        Dense, "backward_weights", lambda *given: (noted.append("weights"), weights(*given))[1]
    )
    model = network("mlp")
    stage = md.Stage(comm, model, plan_stages(8, cuts=[3, 5], ranks=3, microbatches=4))
    for _ in range(2):
        noted.clear()
        stage.step(batches("mlp")[0])
        ends = {0: ["weights"], 1: ["send", "weights"], 2: ["send", "weights", "weights"]}
        assert noted[-len(ends[comm.rank]) :] == ends[comm.rank]
        backward = ["weights", "weights", "send"] if comm.rank == 2 else ["weights"]
        assert noted[: len(backward)] == backward or comm.rank < 2
        assert [one[0] for one in stage.spans].count("B") == 4
    stage.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Twice, Weights])
def test_a_layer_that_overrides_a_part_of_its_backward_pass(comm, kind):
    """Its gradients are those of one rank, with both schedules."""

    def made():
        layers = [
            kind(*layer) if isinstance(layer, Dense) else layer for layer in network("mlp").layers
        ]
        return models.Network(layers, (12,), 7)

    batch = batches("mlp")[0]
    found = {}
    for schedule in ("1f1b", "zero_bubble"):
        grid = plan_stages(8, cuts=[4], ranks=2, microbatches=4, schedule=schedule)
        stage = md.Stage(comm, made(), grid)
        stage.step(batch)
        found[schedule] = {name: one.copy() for name, one in stage.gradients.items()}
        stage.close()
    model, whole = made(), {}
    for piece in range(4):
        inputs, labels = (array[6 * piece : 6 * piece + 6] for array in batch)
        gradients = {name: np.empty_like(one) for name, one in model.parameters.items()}
        model.loss_and_gradients((inputs, labels), gradients)
        whole[piece] = gradients
    for name, one in found["1f1b"].items():
        a, b, c, d = (whole[piece][name] * np.float32(0.25) for piece in range(4))
        assert one.tobytes() == ((a + b) + (c + d)).tobytes(), name
        assert one.tobytes() == found["zero_bubble"][name].tobytes(), name


@pytest.mark.ranks(2)
def test_all_layers_write_their_gradients_into_the_same_memory(comm):
    """It is as large as the largest layer; a stage of one layer has none beside its vector."""
    model = models.mlp([12, 16, 16, 16, 16, 3], seed=7)
    for last, shared in ((9, comm.rank == 0), (2, comm.rank == 1)):
        grid = plan_stages(len(model.layers), cuts=[last], ranks=2, microbatches=4)
        stage = md.Stage(comm, models.mlp([12, 16, 16, 16, 16, 3], seed=7), grid)
        [part] = stage.chunks[comm.rank].parts
        views = [one for name, one in part._one_layer.items() if name.endswith("weight")]
        assert bool(views) == shared
        assert all(np.shares_memory(one, views[0]) for one in views)
        stage.close()


@pytest.mark.ranks(2, 3)
def test_the_bits_of_stages_of_many_layers(comm):
    """Whose gradients are added layer by layer; also with empty and with odd microbatches."""
    for pieces in (1, 2, 5, 16):
        run(comm, "mlp", cuts=[4, 6][: comm.size - 1], microbatches=pieces)
        run(comm, "lenet", cuts=[4, 8][: comm.size - 1], microbatches=pieces)


class Bias:
    """Adds a vector; the gradient of its input is `dy` itself."""

    def __init__(self, name, size):
        self.name, self.size = name, size

    def shapes(self):
        return {self.name: (self.size,)}

    def forward(self, parameters, x):
        return x + parameters[self.name], None

    def backward_input(self, parameters, saved, dy):
        return dy

    def backward_weights(self, parameters, saved, dy, gradients, ready):
        dy.sum(1, out=gradients[self.name])
        ready(self.name)

    def backward(self, parameters, saved, dy, gradients, ready=lambda name: None, first=False):
        self.backward_weights(parameters, saved, dy, gradients, ready)
        return dy


def trained(comm, layers, kinds, strategy):
    """The digest of a trained model, whose parameters have these dtypes in turn."""
    model = models.Network(layers, (12,), seed=7)
    model.parameters = {
        name: array.astype(kinds[k % len(kinds)])
        for k, (name, array) in enumerate(model.initial_parameters().items())
    }
    rng = np.random.default_rng(1)
    data = rng.standard_normal((60, 12)).astype("f4"), rng.integers(0, 3, 60)
    return md.train(
        comm, model, data, optimizer=md.optim.momentum(0.05), global_batch=20, steps=3,
        microbatches=5, strategy=strategy, test_data=data,
    ).parameters_sha256  # fmt: skip


@pytest.mark.ranks(2, 3)
def test_many_layers_of_several_dtypes(comm):
    """The sums of each dtype are parts of their own, which are not sent during the computation."""
    layers = models.mlp([12, 16, 16, 16, 16, 3]).layers
    for kinds in (["f4"], ["f8", "f4"], ["f4", "f8", "f4", "f4"], ["f4", "f4", "f4", "f2"]):
        expected = trained(MPI.COMM_SELF, layers, kinds, md.AllReduce())
        md.free(MPI.COMM_SELF)
        for schedule in ("1f1b", "gpipe", "zero_bubble"):
            cuts = [4, 8][: comm.size - 1]
            strategy = md.Pipeline(cuts=cuts, schedule=schedule)
            assert trained(comm, layers, kinds, strategy) == expected, (kinds, schedule)


@pytest.mark.ranks(2)
def test_a_layer_that_returns_what_it_was_given(comm):
    """The layer before changes it in place, before the gradient of the weights is computed."""
    plain = models.mlp([12, 16, 16, 3]).layers
    layers = [*plain[:5], Bias("bias", 16), *plain[5:]]
    expected = trained(MPI.COMM_SELF, layers, ["f4"], md.AllReduce())
    md.free(MPI.COMM_SELF)
    for schedule in ("1f1b", "zero_bubble"):
        found = trained(comm, layers, ["f4"], md.Pipeline(cuts=[2], schedule=schedule))
        assert found == expected, schedule
