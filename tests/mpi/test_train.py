"""md.train: p ranks equal one rank, servers equal allreduce, resume on p ranks (R27, R4, R53)."""

import shutil

import numpy as np
import pytest

import mpidist as md
from mpidist import data, models, optim
from mpidist.errors import CheckpointError, ConfigError, MpidistError, NoCheckpoint
from mpidist.runtime.context import of
from mpidist.training.exchanges.evaluation import parameters_digest

RNG = np.random.default_rng(3)
INPUTS = RNG.standard_normal((210, 12)).astype(np.float32)
LABELS = (INPUTS[:, :3].argmax(axis=1)).astype(np.int64)
TRAIN = (INPUTS[:150], LABELS[:150])
TEST = (INPUTS[150:], LABELS[150:])


def fit(comm, optimizer=None, seed=1, batch=20, **kwargs):
    model = models.mlp([12, 16, 3], seed=7)
    kwargs.setdefault("epochs", 3)
    result = md.train(
        comm, model, TRAIN, optimizer=optimizer or optim.momentum(0.05), global_batch=batch,
        seed=seed, test_data=TEST, **kwargs,
    )  # fmt: skip
    return model.parameters, result


def serial(optimizer=None, epochs=3, batch=20):
    """The same run in ten lines of plain NumPy."""
    model = models.mlp([12, 16, 3], seed=7)
    optimizer = optimizer or optim.momentum(0.05)
    state = optimizer.init(model.parameters)
    gradients = {name: np.zeros_like(p) for name, p in model.parameters.items()}
    sampler, position = data.Sampler(150, batch, 1), data.Position()
    while position.epoch < epochs:
        indices, position = sampler.batch(position)
        model.loss_and_gradients((TRAIN[0][indices], TRAIN[1][indices]), gradients)
        optimizer.update(gradients, state, model.parameters)
    return model.parameters


def close(a, b, tolerance=2e-5):
    for name in b:
        np.testing.assert_allclose(a[name], b[name], atol=tolerance, err_msg=name)


@pytest.mark.ranks(1, 2, 3, 5, further=(4, 6, 7, 8))
def test_p_ranks_equal_one(comm):
    """The promise of data parallelism, with a short last batch and uneven local batches (R109)."""
    parameters, result = fit(comm)
    close(parameters, serial())
    assert result.steps == 24
    assert result.epochs == 3
    assert result.test_accuracy > 0.6
    assert len(set(comm.allgather(parameters_digest(parameters)))) == 1
    assert comm.allgather(result) == [result] * comm.size


@pytest.mark.ranks(3)
def test_every_algorithm_gives_the_model(comm):
    """R27: the strategy is one word."""
    expected, sent = serial(), {}
    for algorithm in ("ring", "tree", "butterfly", "native"):
        before = of(comm).counters.snapshot()
        close(fit(comm, strategy=md.AllReduce(algorithm))[0], expected)
        after = of(comm).counters.snapshot()
        sent[algorithm] = [after[k] - before[k] for k in ("bytes_sent", "native_calls")]
    # And it was that one: a ring sends fewer bytes than the others, MPI's own is called per step.
    assert sent["native"][1] >= 24 > max(sent[name][1] for name in ("ring", "tree", "butterfly"))
    if comm.rank == 0:
        assert 0 < sent["ring"][0] < 0.8 * sent["tree"][0]


@pytest.mark.ranks(2, 3, further=(5, 8))
def test_bsp_servers_equal_serial(comm):
    """R4, R66: servers under BSP are serial SGD on the global batch, also with adam."""
    for optimizer in (optim.sgd(0.1), optim.momentum(0.05), optim.adam(0.01)):
        expected = serial(optimizer)
        for servers in {1, comm.size - 1}:
            parameters, result = fit(comm, optimizer, strategy=md.ParameterServer(servers))
            if comm.rank < comm.size - servers:
                close(parameters, expected)
            assert result.workers == comm.size - servers
            assert result.ranks == comm.size


@pytest.mark.ranks(1, 3)
def test_colocated_servers(comm):
    """R151, R122: servers inside worker ranks."""
    strategy = md.ParameterServer(comm.size, placement="colocated")
    close(fit(comm, strategy=strategy)[0], serial())


@pytest.mark.ranks(4)
def test_asynchronous_servers_learn(comm):
    """SSP(0) is BSP for plain SGD; a push weighs samples / global batch, so batches are full."""
    for consistency in (md.ASP(), md.SSP(2), md.SSP(0), md.DSSP(0, 2)):
        strategy = md.ParameterServer(1, consistency)
        parameters, result = fit(comm, optim.sgd(0.1), epochs=6, strategy=strategy, batch=25)
        assert result.test_accuracy > 0.55
        workers = comm.allgather(parameters_digest(parameters))[:3]
        assert len(set(workers)) == 1
        if consistency == md.SSP(0) and comm.rank < 3:
            close(parameters, serial(optim.sgd(0.1), 6, 25), 1e-4)


STRATEGIES = [
    md.AllReduce(),
    md.ParameterServer(1),
    md.ParameterServer(2),
    md.ParameterServer(2, placement="colocated"),
]


@pytest.mark.ranks(4)
def test_resume_is_bit_identical_on_the_same_ranks(comm, folder):
    for k, strategy in enumerate(STRATEGIES):
        whole, _ = fit(comm, strategy=strategy)
        path = f"{folder}/{k}"
        _, half = fit(comm, strategy=strategy, checkpoint=path, stop_after=11)
        assert half.steps == 11
        assert not half.finished
        again, result = fit(comm, strategy=strategy, checkpoint=path)
        assert result.resumed_at == 11
        assert result.finished
        if comm.rank < 2:
            assert parameters_digest(again) == parameters_digest(whole), strategy


@pytest.mark.ranks(4)
def test_resume_with_another_strategy_and_fewer_ranks(comm, folder):
    """From any strategy to any other, on another number of ranks."""
    expected = serial(epochs=2)
    smaller = comm.Split(0 if comm.rank < 3 else 1)
    for a, before in enumerate(STRATEGIES):
        fit(comm, strategy=before, checkpoint=folder / str(a), stop_after=10, epochs=2)
        for b, after in enumerate(STRATEGIES):
            path = folder / f"{a}{b}"
            if comm.rank == 0:
                shutil.copytree(folder / str(a), path)
            comm.Barrier()
            if comm.rank < 3:
                parameters, result = fit(
                    smaller, strategy=after, checkpoint=path, resume=True, epochs=2
                )
                assert (result.resumed_at, result.steps) == (10, 16)
                if comm.rank < result.workers:
                    close(parameters, expected, 5e-5)
    md.free(smaller)
    smaller.Free()


@pytest.mark.ranks(2)
def test_periodic_checkpoints_are_readable(comm, folder):
    parameters, _ = fit(comm, checkpoint=folder, checkpoint_every=5)
    comm.Barrier()
    state = md.load(folder)
    assert state["run"]["step"] == 24
    for name, array in parameters.items():
        np.testing.assert_array_equal(state["parameters"][name], array)
    assert set(state["optimizer"]) == {"velocity", "step", "progress"}
    comm.Barrier()


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_saves_and_stops_with_a_bound_that_moves(comm, folder, placement):
    """R69: under DSSP, too, all workers come to a save and to a planned stop, and go on."""
    strategy = md.ParameterServer(2, md.DSSP(0, 3), placement)
    settings = {"strategy": strategy, "checkpoint": folder, "checkpoint_every": 4, "epochs": 6}
    _, half = fit(comm, optim.sgd(0.1), batch=25, stop_after=11, **settings)
    assert (half.steps, half.finished) == (11, False)
    _, result = fit(comm, optim.sgd(0.1), batch=25, **settings)
    assert (result.resumed_at, result.steps, result.finished) == (11, 36, True)
    assert result.test_accuracy > 0.55


class Poisoned:
    """A model whose loss is not a number from some call on."""

    def __init__(self, at, rank):
        self.inner = models.mlp([12, 16, 3], seed=7)
        self.parameters = self.inner.parameters
        self.calls, self.at, self.rank = 0, at, rank

    def loss_and_gradients(self, batch, gradients, ready=None):
        loss = self.inner.loss_and_gradients(batch, gradients, ready)
        self.calls += 1
        return float("nan") if self.calls > self.at and self.rank == 0 else loss

    def predict(self, inputs):
        return self.inner.predict(inputs)


@pytest.mark.ranks(3)
def test_a_bad_loss_stops_all_ranks_with_a_checkpoint(comm, folder):
    """R141 first part: NaN stops with a checkpoint, on all ranks together."""
    for k, strategy in enumerate((md.AllReduce(), md.ParameterServer(1, md.ASP()))):
        path = f"{folder}/{k}"
        with pytest.raises(MpidistError, match=r"not a number|loss is nan"):
            md.train(comm, Poisoned(4, comm.rank), TRAIN, optimizer=optim.sgd(0.1),
                     global_batch=20, epochs=4, strategy=strategy, checkpoint=path)  # fmt: skip
        comm.Barrier()
        saved = md.load(path)
        assert saved["run"]["step"] >= 4
        assert all(np.isfinite(p).all() for p in saved["parameters"].values())
        comm.Barrier()


@pytest.mark.ranks(3)
def test_bad_input(comm, folder):
    with pytest.raises(ConfigError, match="global_batch=2 is smaller than the 3 workers"):
        md.train(comm, models.mlp([12, 3]), TRAIN, optimizer=optim.sgd(0.1), global_batch=2,
                 epochs=1)  # fmt: skip
    with pytest.raises(ConfigError, match="give one of the two"):
        fit(comm, steps=3)
    with pytest.raises(ConfigError, match="3 servers leave 0 workers; use at most 2"):
        fit(comm, strategy=md.ParameterServer(3))
    with pytest.raises(ConfigError, match="staleness"):
        md.SSP(-1)
    with pytest.raises(NoCheckpoint):
        fit(comm, checkpoint=f"{folder}/empty", resume=True)
    with pytest.raises(ConfigError, match="did you mean 'ring'"):
        md.AllReduce("rnig")
    fit(comm, checkpoint=f"{folder}/one", epochs=1)
    with pytest.raises(CheckpointError, match="dense"):
        md.train(comm, models.mlp([12, 8, 3]), TRAIN, optimizer=optim.momentum(0.1),
                 global_batch=20, epochs=2, checkpoint=f"{folder}/one", seed=1)  # fmt: skip
    with pytest.raises(ConfigError, match="has checkpoints up to step 8"):
        fit(comm, checkpoint=f"{folder}/one", resume=False)
    with (
        md.CheckpointStore(comm, f"{folder}/one") as store,
        pytest.raises(ConfigError, match="up to step 8; open the store with fresh=True"),
    ):
        fit(comm, checkpoint=store, resume="fresh")
    with pytest.raises(ConfigError, match="made with seed 1"):
        fit(comm, checkpoint=f"{folder}/one", seed=2)


@pytest.mark.ranks(1, 3)
def test_a_run_that_begins_anew(comm, folder):
    """Issue 10, line 1: what was there is set aside, and a shorter run is what is gone on from."""
    fit(comm, checkpoint=folder, epochs=2)
    longer = md.load(folder)["run"]["step"]
    comm.Barrier()
    _, summary = fit(comm, checkpoint=folder, epochs=1, resume="fresh")
    assert summary.resumed_at == 0
    assert md.load(folder)["run"]["step"] == summary.steps < longer
    assert md.load(folder, history=0)["run"]["step"] == longer
    comm.Barrier()
    assert fit(comm, checkpoint=folder, epochs=1)[1].resumed_at == summary.steps
