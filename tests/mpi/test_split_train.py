"""``Pipeline(split=...)``: ranks share dense layers; a checkpoint has the whole arrays (R156)."""

import numpy as np
import pytest
from mpi4py import MPI
from test_bad_records import Source, X, Y
from test_bad_records import fit as fit_records
from test_train import TEST, TRAIN

import mpidist as md
from mpidist import models, optim
from mpidist.errors import ConfigError, MismatchError, ReplicaError
from mpidist.models.split_model import parts_of, split_model
from mpidist.training.exchanges import evaluation
from mpidist.training.exchanges.evaluation import parameters_digest

#: Layers of odd widths: no number of ranks divides all of them.
SIZES = [12, 16, 17, 13, 3]
SPLIT = {"dense1": "rows", "dense2": "columns", "dense3": "rows", "dense4": "columns"}


def fit(comm, strategy=None, optimizer=None, model=None, **settings):
    model = models.mlp(SIZES, seed=7) if model is None else model
    settings = {"steps": 12, "microbatches": 4, "test_data": TEST, **settings}
    result = md.train(
        comm, model, TRAIN, optimizer=optimizer or optim.momentum(0.05), global_batch=20, seed=1,
        strategy=strategy, **settings,
    )  # fmt: skip
    return model, result


def on_ranks(comm, count, work):
    """Call `work` with the first ranks; return its result on all ranks."""
    part = comm.Split(int(comm.rank >= count), comm.rank)
    result = work(part) if comm.rank < count else None
    md.free(part)
    part.Free()
    return comm.bcast(result)


#: How a run may go on: the ranks, and the strategy.
STARTS = [
    (4, md.Pipeline(stages=2, split=SPLIT)),
    (3, md.Pipeline(stages=1, split={"dense2": "rows", "dense4": "columns"})),
    (1, md.AllReduce()),
    (4, md.Pipeline(cuts=[4], split={"dense3": "columns"}, split_ranks=2, schedule="gpipe")),
    (2, md.AllReduce()),
    (4, md.Pipeline(stages=1, split_ranks=2, split=SPLIT)),
    (2, md.Pipeline(cuts=[2])),
    (3, md.Pipeline(stages=3, split=SPLIT, split_ranks=1)),
    (4, md.Pipeline(stages=1, replicas=[2], split={"dense2": "columns"})),
]


@pytest.mark.ranks(4)
def test_a_checkpoint_restarts_with_any_other_split(comm, folder, monkeypatch):
    """Whole arrays, the same bits after each restart, and the course of one rank but for sums."""
    monkeypatch.setattr(evaluation, "BLOCK", 300)  # several blocks of each array
    optimizer, saved = optim.adam(0.01), None
    for step, (ranks, strategy) in enumerate(STARTS, 1):

        def run(part, strategy=strategy, step=step):
            if step > 1:  # no step: the parameters of the checkpoint
                _, before = fit(part, strategy, optimizer, checkpoint=folder, stop_after=step - 1)
                assert before.resumed_at == step - 1
                restarted = before.parameters_sha256, before.test_accuracy
            else:
                restarted = None
            _, result = fit(part, strategy, optimizer, checkpoint=folder, stop_after=step)
            return restarted, (result.parameters_sha256, result.test_accuracy), result.train_loss

        restarted, reached, loss = on_ranks(comm, ranks, run)
        if restarted is not None:
            assert restarted == saved, STARTS[step - 1]
        saved = reached
        state = md.load(folder, step)
        assert parameters_digest(state["parameters"]) == reached[0]
        for name, array in state["parameters"].items():
            assert state["optimizer"]["mean"][name].shape == array.shape
    _, expected = fit(MPI.COMM_SELF, None, optimizer, stop_after=len(STARTS))
    md.free(MPI.COMM_SELF)
    assert loss == pytest.approx(expected.train_loss, rel=1e-4)
    assert reached[1] == expected.test_accuracy


@pytest.mark.ranks(4)
def test_each_schedule_with_a_split(comm):
    """The course of the same schedule without a split; measured cuts, a stage without arrays."""
    optimizer = optim.momentum(0.05)
    for strategy in (
        md.Pipeline(stages=2, split=SPLIT, split_ranks=2),  # measured cuts
        md.Pipeline(cuts=[1, 3, 5], split=SPLIT, chunks=2, schedule="interleaved"),
        md.Pipeline(cuts=[3], split=SPLIT, schedule="zero_bubble"),
        md.Pipeline(cuts=[1], split=SPLIT, schedule="zero_bubble"),
        md.Pipeline(cuts=[3], split=SPLIT, schedule="pipedream", flush=3),
    ):
        model, result = fit(comm, strategy, optimizer, steps=3)
        alone = md.AllReduce()
        if strategy.schedule == "pipedream":
            alone = md.Pipeline(cuts=[3], schedule="pipedream", flush=3)
        _, expected = on_ranks(comm, 2, lambda part, one=alone: fit(part, one, optimizer, steps=3))
        assert result.train_loss == pytest.approx(expected.train_loss, rel=1e-4)
        assert result.test_accuracy == expected.test_accuracy
        assert comm.allgather(result) == [result] * comm.size
        facts = result.pipeline
        assert (facts["split"], facts["split_ranks"]) == (SPLIT, 2)
        assert [len(facts[name]) for name in ("idle", "kept", "staleness")] == [4] * 3
        # Ranks 2 k and 2 k + 1 have stage k.
        assert facts["kept"][::2] == facts["kept"][1::2]
        assert sum(facts["cut_bytes"]) == pytest.approx(sum(facts["bytes_sent"]), abs=4) != 0
        assert facts["bubble"] == pytest.approx(np.mean(facts["idle"]), abs=1e-4)
        assert 0 < facts["bubble_simulated"] < 1
        names = set(model.parameters)
        assert comm.allgather(names)[comm.rank ^ 1] == names
        sizes = comm.allgather({name: a.size for name, a in model.parameters.items()})
        for name in names:  # weights are shared
            both = sizes[comm.rank][name] + sizes[comm.rank ^ 1][name]
            whole = np.prod(models.mlp(SIZES).parameters[name].shape)
            bias_of_rows = name.endswith("bias") and SPLIT[name.split(".")[0]] == "rows"
            assert both == (2 * whole if bias_of_rows else whole), name


@pytest.mark.ranks(1, 3, further=(2,))
@pytest.mark.parametrize("dtype", [None, "f8"])
def test_a_split_model_has_the_values_of_the_whole_one(comm, dtype):
    """Made by the seed, or given; given arrays are neither changed nor made anew."""
    model, whole = models.mlp(SIZES, seed=5), models.mlp(SIZES, seed=5)
    if dtype:
        whole.parameters = {name: a.astype(dtype) + 1 for name, a in whole.parameters.items()}
        model.parameters = {name: a.copy() for name, a in whole.parameters.items()}
    new = split_model(model, comm, SPLIT)
    assert ("parameters" in vars(model)) == bool(dtype)
    parts = parts_of(new)
    assert len(parts) == (6 if comm.size > 1 else 0)  # not the biases of rows
    for name, array in new.parameters.items():
        shape, start = parts.get(name, (whole.parameters[name].shape, (0,) * array.ndim))
        assert shape == whole.parameters[name].shape
        window = tuple(slice(a, a + n) for a, n in zip(start, array.shape, strict=True))
        assert array.tobytes() == whole.parameters[name][window].tobytes(), name
        assert array.dtype == whole.parameters[name].dtype
        assert array.flags.c_contiguous
        if name in parts:
            counts = comm.allreduce(array.size)
            assert counts == np.prod(shape)
            assert not dtype or not np.shares_memory(array, model.parameters[name])
    batch = TRAIN[0][:8], TRAIN[1][:8]
    np.testing.assert_allclose(new.predict(batch[0]), whole.predict(batch[0]), rtol=1e-4, atol=1e-5)
    if dtype:
        strategy = md.Pipeline(stages=1, split=SPLIT)
        _, result = fit(comm, strategy, model=model, steps=3)
        _, expected = fit(MPI.COMM_SELF, model=whole, steps=3)
        md.free(MPI.COMM_SELF)
        assert result.train_loss == pytest.approx(expected.train_loss, rel=1e-9)


@pytest.mark.ranks(4)
def test_bad_records_are_left_out_by_all(comm):
    """Also one that only rank 3 cannot read."""
    strategy = md.Pipeline(cuts=[2], split={"dense1": "columns", "dense2": "rows"})
    settings = {"microbatches": 3, "max_bad": 0.5}
    for source, alone in (
        (Source({7, 33, 80}), Source({7, 33, 80})),
        (Source({7} if comm.rank == 3 else set()), Source({7})),
    ):
        _, expected = fit_records(MPI.COMM_SELF, alone, **settings)
        md.free(MPI.COMM_SELF)
        _, result = fit_records(comm, source, strategy=strategy, **settings)
        assert result.skipped_records == expected.skipped_records > 0
        assert result.train_loss == pytest.approx(expected.train_loss, rel=1e-4)
    with pytest.raises((ConfigError, MismatchError), match="model input has shape"):
        fit_records(comm, (X[:, :4], Y), strategy=strategy, **settings)


@pytest.mark.ranks(4)
def test_copies_are_compared(comm):
    """Rank 1 changes a bias, of which its neighbour has a copy because the rows are split."""
    model = models.mlp(SIZES, seed=7)

    def spoil(report):
        if report.step == 2 and comm.rank == 1:
            model.parameters["dense2.bias"][0] += 1

    strategy = md.Pipeline(cuts=[4], split={"dense2": "rows", "dense4": "columns"})
    with pytest.raises(ReplicaError, match=r"replicas differ after step 3: .* between both ranks"):
        fit(comm, strategy, model=model, callbacks=[spoil], check_replicas=3)


@pytest.mark.ranks(4)
def test_a_rank_that_raises_ends_all(comm):
    """In a layer, where one rank of each kind waits for it: as sharer, stage and replica."""

    class Fails(models.Network):
        calls = 0

        def loss(self, scores, labels):
            self.calls += 1
            if comm.rank == 3 and self.calls == 6:
                raise ArithmeticError("a fault of rank 3")
            return super().loss(scores, labels)

    whole = models.mlp(SIZES, seed=7)
    model = Fails(whole.layers, whole.sample_shape, 7)
    # The error of the rank itself, or one that tells of it.
    with pytest.raises((ArithmeticError, MismatchError), match="rank 3"):
        fit(comm, md.Pipeline(cuts=[3], split=SPLIT), model=model)


WRONG = [
    ({"split": {"dense9": "columns"}}, "no dense layer 'dense9'.*'dense1', 'dense2'"),
    ({"split": {"dense4": "columns"}, "split_ranks": 4}, "dense4 has 3 columns, and 4 ranks"),
    ({"split": {"dense4": "columns"}}, "dense4 has 3 columns, and 4 ranks share it; use 3"),
    ({"split": {"dense2": "columns"}, "split_ranks": 3}, "4 ranks are no multiple of split_ranks"),
    ({"split": {"dense2": "columns"}, "stages": 3}, "4 ranks are no multiple of the 3 ranks"),
    ({"split": {"dense2": "columns"}, "stages": None}, "split needs stages, cuts"),
    ({"split": {"dense2": "columns"}, "stages": 2, "replicas": [2, 1]}, "no multiple of the 3"),
]


@pytest.mark.ranks(4)
def test_what_cannot_be_split_is_refused_on_all_ranks(comm):
    for given, words in WRONG:
        with pytest.raises(ConfigError, match=words):
            fit(comm, md.Pipeline(**{"stages": 1, **given}))
    strategy = md.Pipeline(stages=2, split=SPLIT)
    with pytest.raises(ConfigError, match="needs whole arrays"):
        fit(comm, strategy, optim.clipped(optim.sgd(0.1), 1.0))
    model = models.Network([models.SplitDense(comm, "dense1", 12, 4)], (12,))
    with pytest.raises(ConfigError, match="no dense layer 'dense1'"):
        fit(comm, md.Pipeline(stages=1, split={"dense1": "rows"}), model=model)
    trained, _ = fit(comm, strategy, steps=1)
    with pytest.raises(ConfigError, match="make a new model"):
        fit(comm, strategy, model=trained, steps=1)
    for given, words in (
        ({"split": {"dense2": "colums"}}, "expected 'columns' or 'rows'; did you mean"),
        ({"split": {"dense2": 1}}, "expected 'columns' or 'rows'"),
        ({"split": {}}, "expected the names of dense layers"),
        ({"split": "dense2"}, "expected the names of dense layers"),
        ({"split_ranks": 2}, "split_ranks=2 needs split"),
        ({"split": SPLIT, "split_ranks": 0}, "split_ranks is 0"),
    ):
        with pytest.raises(ConfigError, match=words):
            md.Pipeline(stages=1, **given)
