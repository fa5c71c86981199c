"""``train(..., microbatches=V)`` gives equal bits on any number of ranks (issue 3, point 5)."""

import functools

import numpy as np
import pytest
from mpi4py import MPI
from test_train import TRAIN, Poisoned, fit

import mpidist as md
from mpidist import data, models, optim
from mpidist.collectives.engines.piecewise import PieceSum
from mpidist.errors import ConfigError, MpidistError
from mpidist.gradients.flat_views import flat_views
from mpidist.partition import BlockPartition
from mpidist.training.exchanges.evaluation import parameters_digest


def tree(vectors):
    """The sum in the order that is promised, by its definition."""
    if len(vectors) == 1:
        return vectors[0]
    middle = 1 << ((len(vectors) - 1).bit_length() - 1)
    return tree(vectors[:middle]) + tree(vectors[middle:])


@functools.cache
def serial(pieces, epochs=3, batch=20):
    """The promise in plain NumPy: pieces by position, weighted, added in the tree."""
    model = models.mlp([12, 16, 3], seed=7)
    optimizer = optim.momentum(0.05)
    state = optimizer.init(model.parameters)
    gradients, [flat] = flat_views(model.parameters)
    sampler, position = data.Sampler(150, batch, 1), data.Position()
    while position.epoch < epochs:
        indices, position = sampler.batch(position)
        vectors = []
        for piece in range(pieces):
            mine = indices[slice(*BlockPartition(len(indices), pieces).range(piece))]
            model.loss_and_gradients((TRAIN[0][mine], TRAIN[1][mine]), gradients)
            vectors.append(flat * np.float32(len(mine) / len(indices)))
        flat[...] = tree(vectors)
        optimizer.update(gradients, state, model.parameters)
    return parameters_digest(model.parameters)


@pytest.mark.ranks(1, 2, 3, 5, further=(4, 6, 7, 8))
def test_any_number_of_ranks_gives_the_serial_bits(comm):
    """V of any kind, V < p, a last batch of 10 with fewer samples than pieces, equal losses."""
    for pieces in (1, 3, 16, 20):
        parameters, result = fit(comm, microbatches=pieces)
        assert parameters_digest(parameters) == serial(pieces), pieces
        assert comm.allgather(result) == [result] * comm.size
    _, alone = fit(MPI.COMM_SELF, microbatches=pieces)
    assert (result.parameters_sha256, result.train_loss) == (
        alone.parameters_sha256,
        alone.train_loss,
    )
    md.free(MPI.COMM_SELF)


class OneByOne:
    """A model without a call for several pieces."""

    def __init__(self):
        self.inner = models.mlp([12, 16, 3], seed=7)
        self.parameters = self.inner.parameters

    def loss_and_gradients(self, batch, gradients, ready=None):
        return self.inner.loss_and_gradients(batch, gradients)

    def predict(self, inputs):
        return self.inner.predict(inputs)


@pytest.mark.ranks(1, 3)
def test_a_model_need_not_take_several_pieces(comm):
    """Nor need all of them fit in one call: the bits are those of single calls."""
    expected = serial(16)
    settings = {"optimizer": optim.momentum(0.05), "global_batch": 20, "epochs": 3, "seed": 1}
    for limit, model in ((0, None), (2500, None), (None, OneByOne())):
        model = model or models.mlp([12, 16, 3], seed=7)
        with pytest.MonkeyPatch.context() as patch:
            if limit is not None:
                patch.setattr(
                    "mpidist.training.exchanges.microbatch_exchange.TOGETHER_BYTES", limit
                )
            md.train(comm, model, TRAIN, microbatches=16, **settings)
        assert parameters_digest(model.parameters) == expected, limit


@pytest.mark.ranks(4)
def test_the_algorithm_does_not_matter(comm):
    hashes = {
        fit(comm, microbatches=6, strategy=md.AllReduce(name))[1].parameters_sha256
        for name in ("auto", "ring", "native", "tree")
    }
    assert hashes == {serial(6)}


@pytest.mark.ranks(4)
def test_a_resume_on_other_ranks_keeps_the_bits(comm, folder):
    """Two stops in the middle of epochs: 4 ranks, then 3, then 1; adam has state of its own."""
    smaller = comm.Split(0 if comm.rank < 3 else 1)
    optimizer = optim.adam(0.01)
    settings = {"checkpoint": folder, "microbatches": 7}
    whole = fit(comm, optimizer, microbatches=7)[1].parameters_sha256
    assert fit(comm, optimizer, stop_after=5, **settings)[1].steps == 5
    if comm.rank < 3:
        result = fit(smaller, optimizer, stop_after=13, resume=True, **settings)[1]
        assert (result.resumed_at, result.steps) == (5, 13)
    comm.Barrier()
    if comm.rank == 0:
        result = fit(MPI.COMM_SELF, optimizer, resume=True, **settings)[1]
        assert (result.resumed_at, result.finished) == (13, True)
        assert result.parameters_sha256 == whole
    comm.Barrier()
    md.free(MPI.COMM_SELF)
    md.free(smaller)
    smaller.Free()


class Normed:
    """A model with running statistics that its gradients depend on."""

    def __init__(self):
        self.inner = models.mlp([12, 16, 3], seed=7)
        self.parameters = self.inner.parameters
        self.state = {"mean": np.zeros(12, np.float32), "scale": np.ones((), np.float64)}

    def loss_and_gradients(self, batch, gradients, ready=None):
        inputs, labels = batch
        shifted = (inputs - self.state["mean"]) * np.float32(self.state["scale"])
        loss = self.inner.loss_and_gradients((shifted, labels), gradients)
        self.state["mean"] *= 0.9
        self.state["mean"] += 0.1 * inputs.mean(axis=0)
        self.state["scale"] *= 1 + 0.01 * loss
        return loss

    def predict(self, inputs):
        return self.inner.predict(inputs - self.state["mean"])


@pytest.mark.ranks(1, 2, 3, further=(5,))
def test_the_state_of_a_model_is_that_of_the_pieces(comm):
    """Each piece begins with the step's state; the weighted mean of what they leave goes on."""
    found = []
    for group in (comm, MPI.COMM_SELF):
        model = Normed()
        md.train(
            group, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=12,
            microbatches=6,
        )  # fmt: skip
        found.append(parameters_digest({**model.parameters, **model.state}))
    md.free(MPI.COMM_SELF)
    assert len(set(found)) == 1
    assert len(set(comm.allgather(found[0]))) == 1


@pytest.mark.ranks(3)
def test_a_bad_loss_in_one_piece_stops_all_ranks(comm, folder):
    """R141 first part: one piece of one rank is enough; the state before it is saved."""
    with pytest.raises(MpidistError, match="loss is nan"):
        md.train(
            comm, Poisoned(9, comm.rank), TRAIN, optimizer=optim.sgd(0.1), global_batch=20,
            epochs=4, checkpoint=folder, microbatches=6,
        )  # fmt: skip
    comm.Barrier()
    saved = md.load(folder)
    assert saved["run"]["step"] == 4  # two pieces a step: the tenth is one of the fifth step
    assert all(np.isfinite(p).all() for p in saved["parameters"].values())
    comm.Barrier()


@pytest.mark.ranks(2, further=(5,))
def test_a_rank_without_a_piece_may_stop_the_run(comm, folder):
    """Every rank's wish counts, also of one that has no piece (p > V)."""
    import os
    import signal

    def ask(step):
        if step.step == 3 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(SystemExit) as stopped:
        fit(comm, microbatches=1, checkpoint=folder, callbacks=[ask])
    assert stopped.value.code == 75
    comm.Barrier()
    assert md.load(folder)["run"]["step"] == 4
    comm.Barrier()


@pytest.mark.ranks(1, 3)
def test_the_price_is_measured(comm):
    """Issue 3, point 5: its price printed."""
    price = fit(comm, microbatches=5, steps=2, epochs=None)[1].ordered_sum_overhead
    if comm.size == 1:
        assert price is None
    else:
        assert price["microbatches"] == 5
        assert price["ordered_us"] > 0
        assert price["ratio"] == pytest.approx(price["ordered_us"] / price["plain_us"], rel=0.01)
    assert fit(comm, steps=2, epochs=None)[1].ordered_sum_overhead is None


@pytest.mark.ranks(3)
def test_bad_numbers_of_pieces(comm):
    for pieces in (0, 2.5, True):
        with pytest.raises(ConfigError, match="microbatches="):
            fit(comm, microbatches=pieces)
    with pytest.raises(ConfigError, match="more than the 20 samples"):
        fit(comm, microbatches=21)
    with pytest.raises(ConfigError, match="needs the allreduce strategy"):
        fit(comm, microbatches=4, strategy=md.ParameterServer(1))
    model = Normed()
    model.state["count"] = np.zeros((), np.int64)
    with pytest.raises(ConfigError, match=r"state\['count'\] of the model is int64"):
        md.train(
            comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=1, microbatches=2
        )
    # Fewer samples than ranks are enough for pieces: ranks without one take part in the sums.
    assert fit(comm, batch=2, microbatches=2, steps=3, epochs=None)[1].steps == 3
    assert PieceSum(comm, 3, np.float32, 1).mine == (range(1) if comm.rank == 0 else range(1, 1))
