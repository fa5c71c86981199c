"""``md.Pipeline`` in `md.train`: allreduce's bits on any grid, through restarts (R60, R88)."""

import numpy as np
import pytest
from mpi4py import MPI
from test_bad_records import Source, X, Y
from test_bad_records import fit as fit_records
from test_train import TEST, TRAIN

import mpidist as md
from mpidist import models, optim
from mpidist.data import Loading, Sampler
from mpidist.errors import ConfigError, MismatchError, MpidistError, ReplicaError
from mpidist.models.layers import Relu

PIECES = 6


def fit(comm, strategy=None, optimizer=None, **settings):
    model = models.mlp([12, 16, 16, 16, 3], seed=7)
    settings.setdefault("epochs", 3)
    settings.setdefault("microbatches", PIECES)
    result = md.train(
        comm, model, TRAIN, optimizer=optimizer or optim.momentum(0.05), global_batch=20,
        seed=1, test_data=TEST, strategy=strategy, **settings,
    )  # fmt: skip
    return model, result


def alone(**settings):
    """The same run with allreduce on one rank."""
    try:
        return fit(MPI.COMM_SELF, **settings)[1]
    finally:
        md.free(MPI.COMM_SELF)


def same(result, expected):
    facts = ("parameters_sha256", "train_loss", "test_accuracy", "steps", "skipped_records")
    for name in facts:
        assert getattr(result, name) == getattr(expected, name), name


GRIDS = {
    1: [md.Pipeline(), md.Pipeline(cuts=[3], chunks=2, schedule="interleaved")],
    2: [md.Pipeline(cuts=[5]), md.Pipeline(schedule="gpipe"), md.Pipeline(stages=1)],
    3: [md.Pipeline(cuts=[1, 7], schedule="zero_bubble"), md.Pipeline(cuts=[4], replicas=[2, 1])],
    4: [
        md.Pipeline(cuts=[2, 4, 6]), md.Pipeline(stages=2), md.Pipeline(cuts=[5], replicas=[3, 1]),
        md.Pipeline(cuts=[1, 3], replicas=[1, 2, 1], schedule="gpipe"),
    ],
}  # fmt: skip


@pytest.mark.ranks(1, 2, 3, 4)
def test_any_grid_has_the_bits_of_allreduce(comm):
    """Also with adam, whose state has arrays and scalars; every rank gets the same summary."""
    for optimizer in (optim.momentum(0.05), optim.adam(0.01)):
        expected = alone(optimizer=optimizer)
        for strategy in GRIDS[comm.size]:
            model, result = fit(comm, strategy, optimizer)
            same(result, expected)
            assert comm.allgather(result) == [result] * comm.size
            names = comm.allgather(sorted(model.parameters))
            assert len({name for each in names for name in each}) == 8, "all ranks have all"


@pytest.mark.ranks(4)
def test_a_checkpoint_restarts_on_any_other_grid(comm, folder):
    """Pipelines of 4, 3 and 2 ranks, allreduce on 2, one rank: all in the middle of epochs."""
    optimizer, expected = optim.adam(0.01), alone(optimizer=optim.adam(0.01))
    starts = (
        (4, md.Pipeline(stages=2)),
        (4, md.Pipeline(cuts=[4], replicas=[3, 1])),
        (3, md.Pipeline(cuts=[1, 5])),
        (2, md.AllReduce()),
        (2, md.Pipeline(cuts=[3])),
        (4, md.Pipeline(cuts=[1, 2, 7])),
        (1, md.AllReduce()),
    )
    seen = []
    for k, (ranks, strategy) in enumerate(starts):
        part = comm.Split(int(comm.rank >= ranks))
        if comm.rank < ranks:
            settings = {} if k == len(starts) - 1 else {"stop_after": 3 * k + 2}
            _, result = fit(
                part, strategy, optimizer, checkpoint=folder, resume="auto" if not k else True,
                on_resize=lambda *ranks: seen.append(ranks[:2]), **settings,
            )  # fmt: skip
            md.free(part)
        comm.Barrier()
        part.Free()
    if comm.rank == 0:
        assert result.parameters_sha256 == expected.parameters_sha256
        assert result.test_accuracy == expected.test_accuracy
        assert (result.resumed_at, result.steps) == (17, 24)
        assert seen == [(4, 3), (3, 2), (2, 4), (4, 1)]
        saved = md.load(folder, 17)
        assert sorted(saved["parameters"]) == sorted(saved["optimizer"]["mean"])
        assert saved["parameters"]["dense1.weight"].shape == (12, 16)
    comm.Barrier()


@pytest.mark.ranks(4, further=(2,))
def test_bad_records_are_agreed_before_their_microbatch_enters(comm):
    """Found by those who read inputs and by those who read labels; whole batches, too."""
    order = Sampler(len(X), 8).order(0)
    labels = Y.copy()
    labels[[11, 57]] = 9
    for source in (
        lambda: Source({7, 33, 80}), lambda: Source({int(i) for i in order[16:32]}),
        lambda: Source({3}, y=labels),
    ):  # fmt: skip
        settings = {"microbatches": 3, "max_bad": 0.5}
        _, expected = fit_records(MPI.COMM_SELF, source(), **settings)
        md.free(MPI.COMM_SELF)
        for strategy in (md.Pipeline(stages=2), md.Pipeline(cuts=[2], replicas=None)):
            _, result = fit_records(comm, source(), strategy=strategy, **settings)
            assert result.skipped_records == expected.skipped_records > 0
            assert result.parameters_sha256 == expected.parameters_sha256
    with pytest.raises((ConfigError, MismatchError), match="model input has shape"):
        fit_records(comm, (X[:, :4], Y), strategy=md.Pipeline(cuts=[2]), **settings)


class Counted(models.Network):
    """Notes which layers parameters were made for."""

    made = ()

    def initial_parameters(self, start=0, stop=None):
        self.made = (*self.made, (start, stop))
        return super().initial_parameters(start, stop)


@pytest.mark.ranks(3)
def test_a_rank_makes_the_parameters_of_its_layers_only(comm):
    """Also to measure the layers: one after the other."""
    layers = models.mlp([12, 16, 16, 16, 3]).layers
    for cuts in ([1, 4], "auto"):
        model = Counted(layers, (12,), seed=7)
        result = md.train(
            comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=4,
            microbatches=4, test_data=TEST, strategy=md.Pipeline(stages=3, cuts=cuts),
        )  # fmt: skip
        assert all(stop is not None and stop - start < 8 for start, stop in model.made)
        grid = result.pipeline
        mine = (0, *grid["cuts"], 8)[comm.rank : comm.rank + 2]
        assert model.made[-1] == mine
        names = {name for layer in layers[slice(*mine)] for name in layer.shapes()}
        assert set(model.parameters) == names
        assert (grid["replicas"], grid["schedule"], grid["kept"]) == ([1, 1, 1], "1f1b", [3, 2, 1])
        assert all(0 <= idle < 1 for idle in grid["idle"])
        assert grid["bytes_sent"][0] > 0


class History:
    """An optimizer whose state is an array that belongs to no parameter."""

    def init(self, parameters):
        return {"rates": np.full(3, 0.1, np.float32)}

    def update(self, gradients, state, parameters):
        state["rates"] *= np.float32(0.99)
        for name in parameters:
            parameters[name] -= state["rates"][0] * gradients[name]


@pytest.mark.ranks(2)
def test_an_optimizer_may_keep_arrays_of_no_parameter(comm, folder):
    expected = alone(optimizer=History())
    for ranks in ({"stop_after": 5}, {}):
        _, result = fit(comm, md.Pipeline(cuts=[3]), History(), checkpoint=folder, **ranks)
    assert result.resumed_at == 5
    same(result, expected)


@pytest.mark.ranks(2)
def test_the_figures_are_those_of_steps(comm):
    """No evaluation, and no digest of the parameters, is in them."""
    rng = np.random.default_rng(0)
    large = rng.standard_normal((4000, 12)).astype(np.float32), np.zeros(4000, int)
    settings = {"optimizer": optim.sgd(0.1), "global_batch": 20, "steps": 2, "microbatches": 4}
    figures = [
        md.train(
            comm, models.mlp([12, 16, 3]), TRAIN, strategy=md.Pipeline(cuts=[2]), **settings,
            test_data=test_data,
        ).pipeline
        for test_data in (None, large)
    ]  # fmt: skip
    assert all(0 <= idle < 1 for one in figures for idle in one["idle"])
    bytes_of_a_step = 20 * 16 * 4
    assert [one["bytes_sent"] for one in figures] == [[bytes_of_a_step] * 2] * 2
    assert [one["cut_bytes"] for one in figures] == [[2 * bytes_of_a_step]] * 2
    # Two microbatches of 5 samples with 12 inputs. The last rank keeps the 16 outputs of the ReLU
    # of one, which two layers save.
    assert [one["stash_bytes"] for one in figures] == [[2 * 5 * 12 * 4, 5 * 16 * 4]] * 2
    assert all(one["staleness"] == [0, 0] for one in figures)
    assert all(0 <= one["bubble_simulated"] < 1 for one in figures)
    assert all(abs(one["bubble"] - np.mean(one["idle"])) < 1e-3 for one in figures)


@pytest.mark.ranks(3, further=(4,))
@pytest.mark.parametrize("schedule", ["zero_bubble", "1f1b", "gpipe"])
def test_what_is_reported_of_a_grid(comm, schedule):
    """Each cut once in each direction; with uneven replicas the sums over their ranks."""
    replicas = {3: None, 4: [3, 1]}[comm.size]
    if replicas and schedule == "zero_bubble":
        schedule = "1f1b"
    cuts = [3] if replicas else [2, 5]
    strategy = md.Pipeline(cuts=cuts, replicas=replicas, schedule=schedule)
    _, result = fit(comm, strategy, steps=2, epochs=None)
    found = result.pipeline
    assert found["cut_bytes"] == [2 * 20 * 16 * 4] * len(cuts)
    assert sum(found["bytes_sent"]) == sum(found["cut_bytes"])
    assert 0 < found["bubble_simulated"] < 1
    assert min(found["stash_bytes"]) > 0


@pytest.mark.ranks(2)
def test_models_of_different_seeds_are_refused(comm):
    """Each rank would make its layers from its own seed."""
    model = models.mlp([12, 16, 3], seed=comm.rank)
    settings = {"optimizer": optim.sgd(0.1), "global_batch": 20, "steps": 2, "microbatches": 4}
    with pytest.raises(MismatchError, match=r"model\.seed differs"):
        md.train(comm, model, TRAIN, strategy=md.Pipeline(), **settings)


class Halve(Relu):
    """Has no parameters, and may be the last layer."""

    def forward(self, parameters, x):
        return x / 2, None

    def backward(self, parameters, saved, dy, gradients, ready=None, first=False):
        return dy / 2


@pytest.mark.ranks(3, further=(2,))
def test_the_loss_has_the_dtype_of_the_whole_model(comm):
    """Also on a last stage with parameters of another dtype, or without any."""
    layers = [Halve(), *models.mlp([12, 16, 3]).layers, Halve()]
    kinds = {"double": ["f8"] * 4, "wide first": ["f8", "f8", "f4", "f4"],
             "wide last": ["f4", "f4", "f4", "f8"]}  # fmt: skip

    def trained(comm, kind, strategy):
        model = models.Network(layers, (12,), seed=7)
        arrays = model.initial_parameters()
        model.parameters = {
            name: array.astype(dtype)
            for (name, array), dtype in zip(arrays.items(), kinds[kind], strict=True)
        }
        return md.train(
            comm, model, TRAIN, optimizer=optim.momentum(0.05), global_batch=20, steps=7,
            microbatches=4, strategy=strategy, test_data=TEST,
        )  # fmt: skip

    for kind in kinds:
        expected = trained(MPI.COMM_SELF, kind, md.AllReduce())
        md.free(MPI.COMM_SELF)
        for last in (3, 5):
            cuts = [1, last][3 - comm.size :]
            same(trained(comm, kind, md.Pipeline(cuts=cuts)), expected)


@pytest.mark.ranks(2)
def test_a_model_that_was_cut_is_trained_again_with_the_same_cuts_only(comm):
    model = models.mlp([12, 16, 3], seed=7)
    settings = {"optimizer": optim.sgd(0.1), "global_batch": 20, "steps": 2, "microbatches": 4}
    for cuts in ([2], [2]):
        md.train(comm, model, TRAIN, strategy=md.Pipeline(cuts=cuts), **settings)
    for cuts in ([1], "auto"):
        with pytest.raises(ConfigError, match="make a new model"):
            md.train(comm, model, TRAIN, strategy=md.Pipeline(cuts=cuts), **settings)


class Late(Source):
    """The third read on a rank takes longer than the run waits for it."""

    reads = True

    def __init__(self, late):
        super().__init__()
        self.late, self.calls = late, 0

    def take(self, indices):
        import time

        self.calls += 1
        if self.late and self.calls == 3:
            time.sleep(0.5)
        return super().take(indices)


@pytest.mark.ranks(3)
def test_a_rank_without_its_records_lets_all_wait(comm, folder):
    _, expected = fit_records(MPI.COMM_SELF, Source(), microbatches=3)
    md.free(MPI.COMM_SELF)
    for late in (0, 2):
        _, result = fit_records(
            comm, Late(comm.rank == late), microbatches=3, strategy=md.Pipeline(cuts=[1, 2]),
            loading=Loading(prefetch=1, starved_after=0.1), checkpoint=folder / str(late),
        )  # fmt: skip
        assert result.parameters_sha256 == expected.parameters_sha256


@pytest.mark.ranks(4)
def test_replicas_of_a_stage_are_compared(comm):
    """A bit that flips in one replica is found, and is an error on all ranks."""
    model = models.mlp([12, 16, 3], seed=7)

    def flip(step):
        if step.step == 3 and comm.rank == 3:
            model.parameters["dense2.bias"][0] += 1

    with pytest.raises(ReplicaError, match=r"'dense2\.bias'"):
        md.train(
            comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=6,
            microbatches=4, strategy=md.Pipeline(cuts=[2]), callbacks=[flip], check_replicas=2,
        )  # fmt: skip


class Fails(Relu):
    """Raises in its tenth call."""

    calls = 0

    def forward(self, parameters, x):
        Fails.calls += 1
        if Fails.calls == 10:
            raise ZeroDivisionError("the layer failed")
        return super().forward(parameters, x)


@pytest.mark.ranks(2, 3)
def test_a_layer_that_raises_ends_the_run_on_all_ranks(comm):
    Fails.calls = 0
    model = models.mlp([12, 16, 16, 3], seed=7)
    model.layers[4] = Fails()
    strategy = md.Pipeline(cuts=list(range(3, 2 + comm.size)))
    with pytest.raises((ZeroDivisionError, MpidistError), match="the layer failed"):
        md.train(
            comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=6,
            microbatches=4, strategy=strategy,
        )  # fmt: skip


@pytest.mark.ranks(2)
def test_a_bad_loss_and_patience_stop_all_ranks(comm, folder):
    with (
        np.errstate(all="ignore"),
        pytest.raises(MpidistError, match=r"not a number|loss is nan"),
    ):
        fit(comm, md.Pipeline(), optim.sgd(1e30), checkpoint=folder)
    with pytest.raises(MpidistError, match="the mean loss of 3 steps"):
        fit(comm, md.Pipeline(), optim.sgd(0.0), patience=3)


@pytest.mark.ranks(2)
def test_what_cannot_run_is_refused_in_one_line(comm):
    clipped = optim.clipped(optim.sgd(0.1), 1.0)
    for strategy, settings, told in (
        (md.Pipeline(), {"microbatches": None}, "a pipeline needs microbatches"),
        (md.Pipeline(cuts=[9]), {}, "the model has 8 layers, so the last cut is 7"),
        (md.Pipeline(stages=9), {}, "9 parts for the 8 layers"),
        (md.Pipeline(cuts=[2, 4]), {}, "2 ranks are no multiple of the 3 stages"),
        (md.Pipeline(replicas=[3, 1]), {}, "are 4 ranks, and the job has 2"),
        (md.Pipeline(), {"elastic": True}, "Pipeline cannot go on after a death"),
        (md.Pipeline(), {"optimizer": clipped}, "clip_norm is a norm over all layers"),
        (
            md.Pipeline(schedule="interleaved", chunks=2), {"microbatches": 5},
            "needs a multiple of the 2 stages; the next one is 6",
        ),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told) as caught:
            fit(comm, strategy, **settings)
        assert "\n" not in str(caught.value)
    for wrong, told in (
        ({"schedule": "fast"}, "unknown schedule 'fast'"),
        ({"stages": 0}, "stages=0: expected a whole number of 1 or more"),
        ({"cuts": "even"}, "cuts='even': expected a list of whole numbers"),
        ({"replicas": 2}, "replicas=2: expected a list of whole numbers"),
        ({"stages": 2, "replicas": [1]}, "these give different numbers of stages"),
        ({"stages": 2, "cuts": [1, 2]}, "these give different numbers of stages"),
    ):
        with pytest.raises(ConfigError, match=told):
            md.Pipeline(**wrong)
    with pytest.raises(ConfigError, match="model Tagger has no layers"):
        md.train(
            comm, models.tagger(4, 3), TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=1,
            microbatches=2, strategy="pipeline",
        )  # fmt: skip
