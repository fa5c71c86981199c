"""A dense layer split over ranks: the values of the whole layer, alone and in stages (R156)."""

import numpy as np
import pytest
from mpi4py import MPI
from test_train import TEST, TRAIN

import mpidist as md
from mpidist import models, optim
from mpidist.errors import ConfigError, MismatchError
from mpidist.models.layers import Dense, Relu

SPLITS = "columns", "rows"
#: What may differ: a sum over ranks adds in another order than one product does.
ROUNDING = {"rtol": 2e-5, "atol": 2e-6}


def network(make):
    return models.Network([Dense("a", 12, 30), Relu(), make("b", 30, 25), Relu(),
                           make("c", 25, 3)], (12,), seed=3)  # fmt: skip


def split(comm, how):
    return network(lambda *words: models.SplitDense(comm, *words, split=how))


def whole(comm, model, arrays):
    """Put the parts of all ranks together."""
    found = {}
    for layer in model.layers:
        for name in layer.shapes():
            if not hasattr(layer, "window"):
                found[name] = arrays[name]
                continue
            parts = comm.allgather((layer.window(name), arrays[name]))
            found[name] = np.full(layer.whole_shapes()[name], np.nan, np.float32)
            for window, array in parts:
                found[name][window] = array
    return found


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("how", SPLITS)
def test_the_values_are_those_of_the_whole_layer(comm, how):
    """Initial weights equal, gradients equal but for the order of sums; parts of unequal size."""
    ours, theirs = split(comm, how), network(Dense)
    assert ours.classes == 3
    for name, array in whole(comm, ours, ours.parameters).items():
        assert array.tobytes() == theirs.parameters[name].tobytes(), name
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((16, 12)).astype(np.float32), rng.integers(0, 3, 16)
    got = {name: np.empty_like(a) for name, a in ours.parameters.items()}
    expected = {name: np.empty_like(a) for name, a in theirs.parameters.items()}
    loss = ours.loss_and_gradients(batch, got)
    assert loss == pytest.approx(theirs.loss_and_gradients(batch, expected), rel=1e-5)
    for name, array in whole(comm, ours, got).items():
        np.testing.assert_allclose(array, expected[name], **ROUNDING, err_msg=name)
    np.testing.assert_allclose(ours.predict(batch[0]), theirs.predict(batch[0]), **ROUNDING)
    same = ours.predict(batch[0]).tobytes()
    assert comm.allgather(same) == [same] * comm.size


@pytest.mark.ranks(2, 3)
def test_what_is_gathered_has_the_bits_of_the_whole_layer(comm):
    """With integers every order of additions is exact, so that also sums are equal."""
    rng = np.random.default_rng(1)
    x, dy = (rng.integers(-4, 5, (1, 6, n)).astype(np.float32) for n in (20, 3862))
    plain = Dense("d", 20, 3862)
    weights = {name: rng.integers(-4, 5, shape).astype(np.float32)
               for name, shape in plain.shapes().items()}  # fmt: skip
    y, saved = plain.forward(weights, x)
    gradients = {name: np.empty_like(a)[None] for name, a in weights.items()}
    dx = plain.backward(weights, saved, dy.copy(), gradients)
    for how in SPLITS:
        layer = models.SplitDense(comm, "d", 20, 3862, split=how)
        mine = {name: a[layer.window(name)].copy() for name, a in weights.items()}
        got = {name: np.empty_like(a)[None] for name, a in mine.items()}
        out, kept = layer.forward(mine, x)
        assert out.tobytes() == y.tobytes()
        assert out.flags.c_contiguous
        assert layer.backward(mine, kept, dy.copy(), got).tobytes() == dx.tobytes()
        assert layer.backward(mine, kept, dy.copy(), got, first=True) is None
        for name, array in got.items():
            assert array[0].tobytes() == gradients[name][0][layer.window(name)].tobytes(), name


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("how", SPLITS)
def test_a_layer_over_the_ranks_of_a_stage(comm, how, schedule):
    """Two pipelines of two stages beside each other; the stages' ranks share their layers."""
    pipeline, stage_ranks = comm.Split(comm.rank // 2), comm.Split(comm.rank % 2)
    settings = {"global_batch": 20, "steps": 12, "microbatches": 4, "seed": 1,
                "optimizer": optim.momentum(0.05)}  # fmt: skip
    model = split(stage_ranks, how)
    strategy = md.Pipeline(cuts=[2], schedule=schedule)
    result = md.train(pipeline, model, TRAIN, strategy=strategy, test_data=TEST, **settings)
    alone = network(Dense)
    expected = md.train(MPI.COMM_SELF, alone, TRAIN, test_data=TEST, **settings)
    assert result.train_loss == pytest.approx(expected.train_loss, rel=1e-3)
    assert result.test_accuracy == pytest.approx(expected.test_accuracy, abs=0.03)
    mine = {name for layer in model.layers[:2] for name in layer.shapes()}
    if comm.rank % 2:
        for layer in model.layers[2:]:
            for name in layer.shapes():
                np.testing.assert_allclose(
                    model.parameters[name], alone.parameters[name][layer.window(name)],
                    rtol=1e-3, atol=1e-4, err_msg=name,
                )  # fmt: skip
    else:
        assert set(model.parameters) == mine
    for each in (pipeline, stage_ranks, MPI.COMM_SELF):
        md.free(each)
    pipeline.Free()
    stage_ranks.Free()


@pytest.mark.ranks(2)
def test_parts_are_not_taken_for_copies(comm):
    """Also if all parts have one size."""
    model = models.Network([models.SplitDense(comm, "a", 12, 4)], (12,))
    settings = {"optimizer": optim.sgd(0.1), "global_batch": 20, "steps": 2}
    with pytest.raises(MismatchError, match=r"model\.part of a\.weight differs"):
        md.train(comm, model, TRAIN, **settings)
    model = split(comm, "columns")
    with pytest.raises(MismatchError, match="part"):
        md.train(comm, model, TRAIN, **settings, microbatches=4, strategy=md.Pipeline(stages=1))
    grid = md.pipeline.plan_stages(5, cuts=[], ranks=2, microbatches=4)
    with pytest.raises(MismatchError, match="parts of layers differ"):
        md.Stage(comm, models.Network([*model.layers[:1], Relu(), Relu(), Relu(),
                 models.SplitDense(comm, "z", 30, 4)], (12,)), grid)  # fmt: skip


@pytest.mark.ranks(2)
def test_wrong_layers_raise_on_all_ranks(comm):
    with pytest.raises(ConfigError, match="1 columns on 2 ranks"):
        models.SplitDense(comm, "a", 4, 1)
    with pytest.raises(ConfigError, match="1 rows on 2 ranks"):
        models.SplitDense(comm, "a", 1, 4, split="rows")
    with pytest.raises(ConfigError, match="split='colums'; expected 'rows' or 'columns'"):
        models.SplitDense(comm, "a", 4, 4, split="colums")
    with pytest.raises(MismatchError, match="outputs"):
        models.SplitDense(comm, "a", 4, 4 + comm.rank)
    with pytest.raises(MismatchError):
        models.SplitDense(comm, "a", 4, 4, split=SPLITS[comm.rank])


def layer_of(comm, how):
    """A layer, its weights, and memory for their gradients."""
    layer = models.SplitDense(comm, "a", 4, 4, split=how)
    weights = {name: np.ones(shape, np.float32) for name, shape in layer.shapes().items()}
    return layer, weights, {name: np.empty_like(array)[None] for name, array in weights.items()}


def call(what, layer, weights, gradients, x):
    if what == "forward":
        layer.forward(weights, x)
    elif what == "backward":
        layer.backward(weights, x, x.copy(), gradients)
    else:
        layer.backward_input(weights, x, x.copy())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("what", ["forward", "backward", "backward_input"])
def test_batches_of_other_sizes(comm, what, how):
    """One rank has a sample more."""
    own = comm.Dup()
    layer, weights, gradients = layer_of(own, how)
    x = np.ones((1, 5 + comm.rank, 4), np.float32)
    with pytest.raises(MismatchError):
        call(what, layer, weights, gradients, x)
    md.free(own)
    own.Free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("how", SPLITS)
def test_a_rank_that_raises_ends_the_others(comm, how):
    """The last rank has no weights; nobody waits for it."""
    own = comm.Dup()
    layer = models.SplitDense(own, "a", 4, 4, split=how)
    weights = {name: np.ones(shape, np.float32) for name, shape in layer.shapes().items()}
    last = comm.rank == comm.size - 1
    if last:
        weights["a.weight"] = np.ones((7, 7), np.float32)
    with pytest.raises(ValueError if last else MismatchError, match=r"matmul|rank"):
        layer.forward(weights, np.ones((1, 5, 4), np.float32))
    md.free(own)
    own.Free()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("what", ["forward", "backward", "backward_input"])
def test_a_missing_parameter_of_one_rank_ends_the_others(comm, how, what):
    own = comm.Dup()
    layer, weights, gradients = layer_of(own, how)
    last = comm.rank == comm.size - 1
    if last:
        (gradients if what == "backward" else weights).pop("a.weight")
    x = np.ones((1, 5, 4), np.float32)
    with pytest.raises(KeyError if last else MismatchError, match=r"a\.weight"):
        call(what, layer, weights, gradients, x)
    comm.Barrier()
