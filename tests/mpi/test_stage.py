"""``md.Stage``: the bits of one rank on any grid, and no hang (R60, R62, R63, R88)."""

import functools
import itertools

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist import models, optim
from mpidist.collectives.engines.piecewise import PieceSum
from mpidist.collectives.schedules import fixed_tree
from mpidist.errors import ClosedError, ConfigError, MismatchError, MpidistError
from mpidist.gradients.flat_views import flat_views
from mpidist.models.layers import Dense, Relu
from mpidist.partition import BlockPartition
from mpidist.pipeline import plan_stages
from mpidist.pipeline.stages.piece_order import AnyOrderSum

#: Samples of the batches: fewer than microbatches, and microbatches of two sizes.
SAMPLES = (24, 3, 21)


class Whole:
    """A dense layer without the two halves of its backward pass."""

    def __init__(self, dense):
        self.shapes, self.forward, self.backward = dense.shapes, dense.forward, dense.backward


def network(kind):
    if kind in ("mlp", "whole"):
        model = models.mlp([12, 16, 16, 16, 3], seed=7)
        if kind == "whole":
            layers = [Whole(layer) if layer.shapes() else layer for layer in model.layers]
            model = models.Network(layers, (12,), 7)
        return model
    return models.lenet([1, 8, 8], classes=3, seed=3, channels=(4, 8), hidden=(12, 9))


@functools.cache
def batches(kind):
    rng = np.random.default_rng(0)
    shape = network(kind).sample_shape
    return [
        (rng.standard_normal((n, *shape)).astype(np.float32), rng.integers(0, 3, n))
        for n in SAMPLES
    ]


def tree(vectors):
    """The sum in the order that is promised, by its definition."""
    if len(vectors) == 1:
        return vectors[0]
    middle = 1 << ((len(vectors) - 1).bit_length() - 1)
    return tree(vectors[:middle]) + tree(vectors[middle:])


@functools.cache
def serial(kind, pieces):
    """The parameters and losses of one rank, in plain NumPy."""
    model, optimizer, losses = network(kind), optim.momentum(0.05), []
    state = optimizer.init(model.parameters)
    gradients, [flat] = flat_views(model.parameters)
    for inputs, labels in batches(kind):
        vectors = []
        for piece in range(pieces):
            mine = slice(*BlockPartition(len(inputs), pieces).range(piece))
            loss = model.loss_and_gradients((inputs[mine], labels[mine]), gradients)
            flat[-2] = loss
            vectors.append(flat * np.float32((mine.stop - mine.start) / len(inputs)))
        flat[...] = tree(vectors)
        losses.append(float(flat[-2]))
        optimizer.update(gradients, state, model.parameters)
    return model, losses


def run(comm, kind, **plan):
    """Train on a grid; check bits and losses against one rank, and the scores of `predict`."""
    model = network(kind)
    expected, losses = serial(kind, plan["microbatches"])
    stage = md.Stage(comm, model, plan_stages(len(model.layers), ranks=comm.size, **plan))
    optimizer, found = optim.momentum(0.05), []
    state = optimizer.init(stage.parameters)
    for batch in batches(kind):
        found.append(stage.step(batch))
        optimizer.update(stage.gradients, state, stage.parameters)
    assert found == losses, plan
    for name, array in stage.parameters.items():
        assert array.tobytes() == expected.parameters[name].tobytes(), (plan, name)
    inputs = batches(kind)[0][0]
    np.testing.assert_allclose(stage.predict(inputs), expected.predict(inputs), atol=1e-6)
    stage.close()
    return stage


def even_cuts(kind, parts):
    layers = len(network(kind).layers)
    return [round(layers * k / parts) for k in range(1, parts)]


@pytest.mark.covering
@pytest.mark.ranks(1, 2, 3, further=(4, 5))
@pytest.mark.parametrize("kind", ["mlp", "lenet"])
def test_synchronous_schedules_have_the_bits_of_one_rank(comm, kind):
    """Fewer microbatches than stages, also one; numbers of ranks that the stages do not divide."""
    numbers = (1, 2, 5, 8) if comm.size < 5 else (2, 8)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
        for stages, pieces in itertools.product(range(1, comm.size + 1), numbers):
            replicas = None
            if comm.size % stages:
                replicas = [comm.size - stages + 1] + [1] * (stages - 1)
            cuts = even_cuts(kind, stages * chunks)
            plan = {"microbatches": pieces, "replicas": replicas, "schedule": name}
            if name == "zero_bubble" and replicas is not None:
                continue
            if name == "interleaved":
                blocks = itertools.pairwise(fixed_tree.cuts(pieces, comm.size // stages))
                uneven = replicas is not None or any((b - a) % stages for a, b in blocks)
                if uneven or len(set(cuts)) < len(cuts) or 0 in cuts:
                    continue
            run(comm, kind, cuts=cuts, chunks=chunks, **plan)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cut", range(1, 13))
def test_each_cut_of_lenet(comm, cut):
    """Also behind the transposed view of `Features`, and before the first layer with parameters."""
    run(comm, "lenet", cuts=[cut], microbatches=4)
    run(comm, "lenet", cuts=[cut], microbatches=4, schedule="zero_bubble")


@pytest.mark.ranks(2, further=(4,))
def test_a_layer_without_halves_is_run_whole(comm):
    cuts = even_cuts("whole", comm.size)
    run(comm, "whole", cuts=cuts, microbatches=8, schedule="zero_bubble")
    run(
        comm, "mlp", cuts=[4], microbatches=8, schedule="zero_bubble", replicas=[comm.size // 2] * 2
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("replicas", [[3, 1], [1, 3], [2, 2], [1, 2, 1], [4]])
def test_grids(comm, replicas):
    cuts = even_cuts("lenet", len(replicas))
    stage = run(comm, "lenet", cuts=cuts, microbatches=16, replicas=replicas)
    assert stage.replicas == MPI.COMM_NULL


@pytest.mark.ranks(2)
def test_what_a_stage_keeps(comm):
    """1f1b: at most p - s microbatches at a time."""
    stage = run(comm, "mlp", cuts=[4], microbatches=8)
    assert stage.kept == 2 - comm.rank
    stage = run(comm, "mlp", cuts=[4], microbatches=8, schedule="gpipe")
    assert stage.kept == 8


class Fails(Relu):
    """A layer that raises on one rank, in the third of its calls."""

    calls = 0

    def forward(self, parameters, x):
        Fails.calls += 1
        if Fails.calls == 3:
            raise ZeroDivisionError("the layer failed")
        return super().forward(parameters, x)


@pytest.mark.ranks(3, 4)
def test_a_layer_that_raises_ends_the_step_on_all_ranks(comm):
    """Also on ranks that wait for their replica in the sum already."""
    Fails.calls = 0
    layers = [Dense("a", 12, 8), Relu(), Dense("b", 8, 8), Fails(), Dense("c", 8, 3)]
    model = models.Network(layers, (12,), 0)
    replicas = {3: [1, 1, 1], 4: [1, 2, 1]}[comm.size]
    grid = plan_stages(
        5, cuts=[2, 4], ranks=comm.size, microbatches=8, replicas=replicas
    )  # fmt: skip
    stage = md.Stage(comm, model, grid)
    with pytest.raises((ZeroDivisionError, MpidistError), match="the layer failed"):
        stage.step((np.zeros((16, 12), np.float32), np.zeros(16, np.int64)))
    stage.close()


@pytest.mark.ranks(2)
def test_ranks_that_pass_batches_of_different_sizes_get_an_error(comm):
    n = 8 + comm.rank
    inputs = np.zeros((n, 12), np.float32)
    for name in ("step", "predict"):
        group = comm.Dup()  # nothing else is possible on a communicator that has failed
        stage = md.Stage(group, network("mlp"), plan_stages(8, cuts=[3], ranks=2, microbatches=4))
        with pytest.raises(MismatchError, match=rf"md\.Stage\.{name}"):
            stage.predict(inputs) if name == "predict" else stage.step((inputs, np.zeros(n, int)))
        stage.close()


@pytest.mark.ranks(2)
def test_wrong_arguments_are_an_error_on_all_ranks(comm):
    grid = plan_stages(8, cuts=[3], ranks=2, microbatches=4)
    tagger = models.tagger(4, 3)
    stateful = network("mlp")
    stateful.state = {"mean": np.zeros(3)}
    for model, given, told in (
        (tagger, grid, "model Tagger has no layers"),
        (stateful, grid, "has a state"),
        (network("mlp"), 3, "grid is int"),
        (network("lenet"), grid, "the grid has 8 layers, the model 13"),
        (network("mlp"), plan_stages(8, cuts=[3], ranks=4, microbatches=4), "the grid has 4 ranks"),
    ):
        with pytest.raises(ConfigError, match=told):
            md.Stage(comm, model, given)
    other = plan_stages(8, cuts=[3 + comm.rank], ranks=2, microbatches=4)
    with pytest.raises(MismatchError, match="grid differs"):
        md.Stage(comm, network("mlp"), other)
    stage = md.Stage(comm, network("mlp"), grid)
    stage.close()
    stage.close()
    with pytest.raises(ClosedError, match="this stage is closed"):
        stage.predict(np.zeros((4, 12), np.float32))


@pytest.mark.ranks(2, further=(3,))
def test_a_wrong_batch_on_one_rank_is_an_error_on_all(comm):
    """Also if the rank catches its error, and does not come back."""
    inputs, labels = np.zeros((8, 12), np.float32), np.zeros(8, int)
    first = comm.rank == 0
    for call, own in (
        (lambda s: s.step((inputs, labels[: 5 if first else 8])), "8 inputs but 5 labels"),
        (lambda s: s.step((inputs,) if first else (inputs, labels)), "not enough values"),
        (lambda s: s.predict(None if first else inputs), "has no len"),
        (lambda s: s.predict(set(range(8)) if first else inputs), "not subscriptable"),
    ):
        group = comm.Dup()  # nothing else is possible on a communicator that has failed
        cuts = even_cuts("mlp", comm.size)
        grid = plan_stages(8, cuts=cuts, ranks=comm.size, microbatches=4)
        stage = md.Stage(group, network("mlp"), grid)
        kinds = (ConfigError, ValueError, TypeError) if first else MismatchError
        with pytest.raises(kinds, match=own):
            call(stage)
        comm.Barrier()


@pytest.mark.ranks(2, further=(3,))
def test_a_wrong_argument_of_run_on_one_rank_is_an_error_on_all(comm):
    """R83: also if the rank catches its error, and does not come back."""
    inputs, labels = np.zeros((8, 12), np.float32), np.zeros(8, int)
    first, update = comm.rank == 0, lambda *given: None
    for schedule, sizes, function, own, told in (
        ("1f1b", [2, 2, 1 + first, 2], None, MismatchError, "microbatches of"),
        ("1f1b", None if first else [2] * 4, None, TypeError, "NoneType"),
        ("1f1b", [2] * 4, update if first else None, ConfigError, "takes none"),
        ("pipedream", [2] * 4, None if first else update, ConfigError, "needs a function"),
    ):
        group = comm.Dup()  # nothing else is possible on a communicator that has failed
        cuts = even_cuts("mlp", comm.size)
        grid = plan_stages(8, cuts=cuts, ranks=comm.size, microbatches=4, schedule=schedule)
        stage = md.Stage(group, network("mlp"), grid)
        with pytest.raises(own if first else MismatchError, match=told):
            stage.run(inputs, labels, sizes, 8, function)
        comm.Barrier()


@pytest.mark.ranks(2)
def test_inputs_may_lie_in_memory_in_any_way(comm):
    """The first stage passes its inputs on; the next one gets them in one layout."""
    rng = np.random.default_rng(2)
    wide = rng.standard_normal((8, 20)).astype(np.float32)
    plain, labels = wide[:, :12].copy(), np.arange(8) % 3
    for pieces in (2, 8):
        model = network("mlp")
        stage = md.Stage(comm, model, plan_stages(8, cuts=[1], ranks=2, microbatches=pieces))
        losses = [
            stage.step((inputs, labels))
            for inputs in (plain, wide[:, :12], np.asfortranarray(plain), plain.astype("f8"))
        ]
        assert losses == losses[:1] * 4
        for k in range(2):  # one sample, whose stride along the axis of samples means nothing
            stage.step((wide[k : k + 1, :12], labels[:1]))
            stage.step((plain[k : k + 1], labels[:1]))
        stage.close()


@pytest.mark.ranks(2, 3)
def test_arrays_may_be_visited_again(comm):
    model, cuts = network("mlp"), even_cuts("mlp", comm.size)
    stage = md.Stage(comm, model, plan_stages(8, cuts=cuts, ranks=comm.size, microbatches=4))
    for _ in range(3):
        seen = {}
        stage.visit(stage.parameters, lambda name, array, seen=seen: seen.update({name: array + 0}))
        if comm.rank == 0:
            expected = network("mlp").parameters
            assert sorted(seen) == sorted(expected)
            assert all(seen[name].tobytes() == expected[name].tobytes() for name in seen)
    stage.close()


@pytest.mark.ranks(2)
def test_what_is_no_array_ends_a_visit_on_all_ranks(comm):
    stage = md.Stage(comm, network("mlp"), plan_stages(8, cuts=[3], ranks=2, microbatches=4))
    with pytest.raises(TypeError if comm.rank == 1 else MpidistError, match="not iterable"):
        stage.visit(3 if comm.rank == 1 else stage.parameters, print)
    wrong = {"wrong": "text"} if comm.rank == 1 else {}
    with pytest.raises((AttributeError, MismatchError), match="'str' object has no"):
        stage.visit({**stage.parameters, **wrong}, lambda name, array: None)
    stage.close()


@pytest.mark.ranks(2)
def test_parameters_that_do_not_fit_the_layers_are_refused_on_all_ranks(comm):
    """One stage has them, and both ranks can go on."""
    grid = plan_stages(8, cuts=[3], ranks=2, microbatches=4)
    for name, array, told in (
        ("dense1.weight", None, "has no array with the name 'dense1.weight'"),
        ("dense4.bias", np.zeros(4, "f4"), r"an array of shape \(4,\) with the name 'dense4.bias'"),
    ):
        model = network("mlp")
        model.parameters[name] = array
        if array is None:
            del model.parameters[name]
        with pytest.raises(ConfigError, match=told):
            md.Stage(comm, model, grid)
    md.Stage(comm, network("mlp"), grid).close()


@pytest.mark.ranks(1, 2, 3)
def test_pieces_in_any_order_have_the_same_sum(comm):
    """All orders of a few pieces, and some of many, twice with the same object."""
    rng, orders = np.random.default_rng(1), np.random.default_rng(comm.rank)
    for pieces in (1, 3, 5, 12, 29):
        vectors = [rng.standard_normal(20).astype(np.float32) for _ in range(pieces)]
        vectors[0] = None
        sums = PieceSum(comm, 20, np.float32, pieces)
        adding = AnyOrderSum(sums)
        zeros = np.zeros(20, np.float32)
        expected = tree([zeros if v is None else v * np.float32(0.3) for v in vectors])
        for _ in range(5):
            for piece in orders.permutation(sums.mine):
                adding.add(int(piece), vectors[piece], 0.3)
            out = np.empty(20, np.float32)
            adding.finish(out)
            assert out.tobytes() == expected.tobytes()
        sums.close()


@pytest.mark.ranks(2)
def test_gradients_are_written_into_the_memory_of_the_sum(comm, monkeypatch):
    """Every second microbatch, in both halves of a backward pass too; an empty one is not."""
    added = []
    plain = PieceSum.add_row
    monkeypatch.setattr(PieceSum, "add_row", lambda *given: (added.append(1), plain(*given)))
    for schedule in ("1f1b", "zero_bubble"):
        grid = plan_stages(8, cuts=[3], ranks=2, microbatches=5, schedule=schedule)
        stage = md.Stage(comm, network("mlp"), grid)
        for samples, expected in ((24, 2), (3, 2), (1, 1)):
            added.clear()
            stage.step(tuple(array[:samples] for array in batches("mlp")[0]))
            assert len(added) == expected, (schedule, samples)
        stage.close()
