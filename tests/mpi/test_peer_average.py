"""md.PeerAverage: ranks with models of their own, averaged with peers (R75)."""

import json
import os
import signal
import time

import numpy as np
import pytest
from mpi4py import MPI
from test_bad_records import Source
from test_bad_records import fit as fit_records
from test_train import TEST, TRAIN, close

import mpidist as md
from mpidist import models, optim
from mpidist.errors import ConfigError, MismatchError, MpidistError
from mpidist.fault_tolerance.guard import Stopped
from mpidist.training.exchanges.evaluation import parameters_digest
from mpidist.training.exchanges.peer_exchange import Peers

MODES = [md.BSP(), 2, md.ASP()]


def fit(comm, strategy, optimizer=None, sleep=None, **settings):
    """Train; the rank `sleep` is slow."""
    model = models.mlp([12, 16, 3], seed=7 + comm.rank)
    settings = {"global_batch": 20, **settings}
    if "steps" not in settings:
        settings.setdefault("epochs", 3)
    settings.setdefault("callbacks", [lambda report: time.sleep(0.004 * (comm.rank == sleep))])
    result = md.train(
        comm, model, TRAIN, optimizer=optimizer or optim.momentum(0.05), seed=1, test_data=TEST,
        strategy=strategy, **settings,
    )  # fmt: skip
    assert len(set(comm.allgather(parameters_digest(model.parameters)))) == 1
    assert comm.allgather(result) == [result] * comm.size
    return model, result


def plain(comm, graph, every, steps, lr=0.05):
    """The same run in plain NumPy, with the matrices of the plan. Returns the mean."""
    from mpidist.data import Position, Sampler
    from mpidist.partition import BlockPartition
    from mpidist.peers.peer_plan import peer_plan

    size, plan = comm.size, peer_plan(graph, comm.size)
    ranks = [models.mlp([12, 16, 3], seed=7) for _ in range(size)]
    gradients = {name: np.zeros_like(p) for name, p in ranks[0].parameters.items()}
    sampler, position, rounds = Sampler(150, 20, 1), Position(), 0
    for step in range(1, steps + 1):
        indices, position = sampler.batch(position)
        for rank, model in enumerate(ranks):
            start, stop = BlockPartition(len(indices), size).range(rank)
            mine = indices[start:stop]
            model.loss_and_gradients((TRAIN[0][mine], TRAIN[1][mine]), gradients)
            for name, array in model.parameters.items():
                array -= lr * (len(mine) * size / len(indices)) * gradients[name]
        if step % every == 0:
            matrix = plan.matrix(rounds)
            rounds += 1
            for name in gradients:
                stack = np.stack([model.parameters[name] for model in ranks])
                for model, mixed in zip(ranks, np.tensordot(matrix, stack, 1), strict=True):
                    model.parameters[name][...] = mixed
    return {name: np.mean([m.parameters[name] for m in ranks], axis=0) for name in gradients}


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 4, 5)
@pytest.mark.parametrize("graph", ["all", "ring", "butterfly", "halton"])
def test_it_is_what_the_matrices_say(comm, graph):
    model, result = fit(comm, md.PeerAverage(graph, 3), optim.sgd(0.05))
    close(model.parameters, plain(comm, graph, 3, 24))
    assert (result.steps, result.epochs, result.finished) == (24, 3, True)
    assert result.peers["rounds"] == 8
    assert result.peers["oldest"] == result.peers["skipped"] == 0
    # Where all ranks are peers, an allreduce averages.
    ends = {"all": 0, "ring": 3, "butterfly": 2, "halton": 2}[graph]
    expected = {"ring": 2, "butterfly": 1}.get(graph)
    if comm.size <= ends or graph == "all":
        expected = 0
    if expected is not None:
        assert result.peers["messages"] == 8 * comm.size * expected


@pytest.mark.ranks(1, 2, further=(4,))
def test_every_step_with_all_is_allreduce(comm):
    """With plain gradient descent, up to rounding; one rank has nobody to average with."""
    if comm.size == 1:
        with pytest.raises(ConfigError, match="PeerAverage needs 2 ranks or more, got 1"):
            fit(comm, md.PeerAverage("all", 1))
        return
    model, result = fit(comm, md.PeerAverage("all", 1), optim.sgd(0.05))
    other, expected = fit(comm, None, optim.sgd(0.05))
    close(model.parameters, other.parameters)
    assert result.train_loss == pytest.approx(expected.train_loss, abs=1e-5)


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_slow_rank(comm, mode):
    """All do all steps. The bound is kept; under ASP fast ranks skip sends and never wait."""
    for graph in ("ring", "butterfly"):
        strategy = md.PeerAverage(graph, 2, mode)
        _, result = fit(comm, strategy, sleep=comm.size - 1, epochs=5, optimizer=optim.sgd(0.1))
        assert (result.steps, result.finished) == (40, True)
        assert result.peers["rounds"] == 20
        if mode != md.ASP():
            assert result.peers["oldest"] <= (0 if mode == md.BSP() else 2)
            assert result.peers["skipped"] == 0
        assert result.peers["messages"] + result.peers["skipped"] == 20 * comm.size * (
            2 if graph == "ring" else 1
        )
        if mode != md.ASP():  # there, models of a rank that is much slower pull the others back
            assert result.test_accuracy > 0.5


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(optim.momentum(0.05), marks=pytest.mark.exhaustive), optim.adam(0.01)],
    ids=repr,
)
def test_a_checkpoint_restarts(comm, folder, optimizer):
    """On as many ranks, with the same bits as the run that saved and went on; and on others."""
    strategy = md.PeerAverage("ring", 3)
    settings = {"optimizer": optimizer, "checkpoint_every": 7, "steps": 24}
    _, expected = fit(comm, strategy, checkpoint=folder / "whole", **settings)
    _, first = fit(comm, strategy, checkpoint=folder / "a", stop_after=14, **settings)
    assert (first.steps, first.finished) == (14, False)
    _, second = fit(comm, strategy, checkpoint=folder / "a", resume=True, **settings)
    assert (second.resumed_at, second.steps) == (14, 24)
    assert second.parameters_sha256 == expected.parameters_sha256
    for ranks, other in ((3, strategy), (2, None), (4, md.ParameterServer())):
        part = comm.Split(int(comm.rank >= ranks))
        if comm.rank < ranks:
            target = folder / f"{ranks}"
            fit(comm=part, strategy=md.PeerAverage(), checkpoint=target, stop_after=3, **settings)
            if other is not None and not isinstance(other, md.ParameterServer):
                _, result = fit(part, other, checkpoint=target, resume=True, **settings)
                assert (result.resumed_at, result.steps) == (3, 24)
            else:
                model = models.mlp([12, 16, 3], seed=1)
                result = md.train(part, model, TRAIN, seed=1, global_batch=20, strategy=other,
                                  checkpoint=target, resume=True, **settings)  # fmt: skip
                assert (result.resumed_at, result.steps) == (3, 24)
            md.free(part)
        comm.Barrier()
        part.Free()


@pytest.mark.covering
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_signal_stops_all_after_one_step(comm, folder, mode):
    def note(report):
        if comm.rank == 1 and report.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.002 * (comm.rank == 0))

    strategy = md.PeerAverage("ring", 2, mode)
    with pytest.raises(Stopped) as stopped:
        fit(comm, strategy, checkpoint=folder, callbacks=[note], epochs=30)
    steps = comm.allgather(stopped.value.step)
    assert len(set(steps)) == 1
    assert 5 < steps[0] < 240
    _, result = fit(comm, strategy, checkpoint=folder, resume=True, steps=steps[0] + 3)
    assert (result.resumed_at, result.steps) == (steps[0], steps[0] + 3)


@pytest.mark.ranks(3, further=(2,))
def test_bad_records(comm):
    """Each is skipped by the rank that has it; a batch of bad records only is no update there."""
    _, result = fit_records(comm, Source({7, 33, 80}), strategy=md.PeerAverage("ring", 2))
    assert result.skipped_records == 6
    assert result.finished
    bad = set(range(40))
    _, result = fit_records(comm, Source(bad), strategy=md.PeerAverage("all", 1), max_bad=0.9)
    assert result.skipped_records == 80


@pytest.mark.ranks(3)
def test_a_loss_that_is_not_finite_ends_the_run(comm, folder):
    model = models.mlp([12, 16, 3], seed=7)
    usual, calls = model.loss_and_gradients, []

    def torn(batch, gradients, ready=None):
        calls.append(len(batch[0]))
        loss = usual(batch, gradients)
        return float("nan") if comm.rank == 1 and len(calls) == 6 else loss

    model.loss_and_gradients = torn
    with pytest.raises(MpidistError, match="the loss is not a number any more near step"):
        md.train(
            comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, epochs=2,
            strategy=md.PeerAverage("ring", 2), checkpoint=folder,
        )  # fmt: skip
    if comm.rank == 0:
        saved = md.load(folder)
        assert all(np.isfinite(array).all() for array in saved["parameters"].values())
    comm.Barrier()


@pytest.mark.ranks(2)
def test_a_gradient_that_is_not_finite_in_the_last_step(comm):
    """No later loss shows it; the summary is still valid JSON."""
    model = models.mlp([12, 16, 3], seed=7)
    usual, calls = model.loss_and_gradients, []

    def torn(batch, gradients, ready=None):
        calls.append(len(batch[0]))
        loss = usual(batch, gradients)
        if comm.rank == 1 and len(calls) == 5:
            gradients["dense1.bias"][...] = np.nan
        return loss

    model.loss_and_gradients = torn
    result = md.train(comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=5,
                      strategy=md.PeerAverage("ring", 2))  # fmt: skip
    assert result.peers["apart"] is None
    json.dumps(result.as_dict(), allow_nan=False)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_exception_of_one_rank_ends_all(comm, mode):
    """Also where the others wait for it, in a round or to stop; within seconds."""

    def note(report):
        if comm.rank == 1 and report.step == 3:
            raise RuntimeError("torn")

    kind = RuntimeError if comm.rank == 1 else MpidistError
    part, began = comm.Dup(), time.monotonic()
    with pytest.raises(kind, match="torn"):
        fit(part, md.PeerAverage("ring", 2, mode), callbacks=[note])
    assert time.monotonic() - began < 20
    comm.Barrier()


@pytest.mark.ranks(3)
def test_an_exception_ends_ranks_that_never_wait(comm):
    steps = []

    def note(report):
        if comm.rank == 1 and report.step == 3:
            raise RuntimeError("torn")
        steps.append(report.step)
        time.sleep(0.005)

    part = comm.Dup()
    with pytest.raises(RuntimeError if comm.rank == 1 else MpidistError, match="torn"):
        fit(part, md.PeerAverage("ring", 2, md.ASP()), callbacks=[note], steps=5000)
    assert len(steps) < 5000
    comm.Barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_too_little_memory_on_one_rank(comm, mode, monkeypatch):
    """All ranks raise, and the next run on this communicator works."""

    def torn(*_):
        raise MemoryError("no room")

    strategy = md.PeerAverage("ring", 2, mode)
    for name in ("_allocate", "_messages"):
        with monkeypatch.context() as patch:
            if comm.rank == 1:
                patch.setattr(Peers, name, torn)
            kind = MemoryError if comm.rank == 1 else MpidistError
            with pytest.raises(kind, match="no room"):
                fit(comm, strategy)
    assert fit(comm, strategy)[1].finished


@pytest.mark.ranks(2, 3)
def test_what_needs_one_model_is_refused(comm):
    strategy = md.PeerAverage("ring", 2)
    for settings, text in (
        ({"check_replicas": 2}, "the models of the ranks differ between two averages"),
        ({"patience": 2}, "each rank has a loss of its own"),
        ({"microbatches": 4}, "each rank has a model of its own"),
        ({"elastic": True}, "elastic: PeerAverage cannot go on after a death: the model of a dead"),
    ):
        with pytest.raises(ConfigError, match=text):
            fit(comm, strategy, **settings)


@pytest.mark.ranks(3)
def test_functions_that_differ_are_refused(comm):
    ahead = 1 + (comm.rank == 1)

    def graph(rank, ranks, number):
        return [(rank + ahead) % ranks]

    with pytest.raises(MismatchError, match="the graphs of the ranks differ"):
        fit(comm, md.PeerAverage(graph, 2))
    ahead = 1
    _, result = fit(comm, md.PeerAverage(graph, 2))
    assert result.peers["messages"] == 12 * comm.size


@pytest.mark.ranks(4)
def test_bits_of_a_butterfly(comm):
    """After log2 p rounds without a step between them all ranks have the same bits."""
    strategy = md.PeerAverage("butterfly", 1)
    model = models.mlp([12, 16, 3], seed=7)
    exchange = strategy.open(comm, model, optim.sgd(0.1), global_batch=8, seed=0)
    assert isinstance(exchange, Peers)
    for array in model.parameters.values():
        array += comm.rank
    for _ in range(2):
        exchange._since += 1
        exchange._round()
    assert len(set(comm.allgather(parameters_digest(model.parameters)))) == 1
    exchange.finish()
    exchange.close()


@pytest.mark.ranks(3)
def test_half_precision_and_odd_shapes(comm):
    """Values of 2 bytes are added as float32; integers and empty arrays are left alone."""
    from mpidist.peers.async_messages import AsyncMessages
    from mpidist.peers.mixed_arrays import MixedArrays
    from mpidist.peers.peer_messages import PeerMessages
    from mpidist.peers.peer_plan import peer_plan

    for kind in (PeerMessages, AsyncMessages):
        arrays = [
            np.full((3, 5), comm.rank, "f2"), np.full(7, comm.rank, "f8")[::2],
            np.empty((0, 2), "f4"), np.array(float(comm.rank)), np.arange(3),
        ]  # fmt: skip
        private = comm.Dup()
        mixed = MixedArrays(arrays)
        more = (0,) if kind is PeerMessages else ()
        messages = kind(private, peer_plan("ring", 3), mixed, *more)

        def wait(test):
            while not test():
                pass

        messages.average(wait)
        private.Barrier()
        if kind is PeerMessages:
            for array in arrays[:2]:
                np.testing.assert_allclose(array, 1, atol=1e-3)
            assert arrays[3] == pytest.approx(1)
        assert arrays[4].tolist() == [0, 1, 2]
        messages.finish(wait)
        messages.close()
        private.Free()


class Counted:
    """Plain gradient descent, whose state has numbers of many kinds."""

    def init(self, parameters):
        return {"n": 0, "more": {"n": np.int64(0), "rate": np.float64(1), "name": "a"}, "on": False}

    def update(self, gradients, state, parameters):
        state["n"], state["on"] = state["n"] + 1, True
        state["more"]["n"] += 1
        state["more"]["rate"] = state["more"]["rate"] * 0.5
        for name, array in parameters.items():
            array -= 0.05 * gradients[name]


@pytest.mark.ranks(3, further=(2,))
def test_numbers_in_the_state_of_an_optimizer(comm, folder):
    """A count becomes the largest of all ranks, other numbers their mean, also in a checkpoint."""
    from mpidist.peers.mixed_arrays import average_state

    result = fit(comm, md.PeerAverage("ring", 2), Counted(), checkpoint=folder, steps=7)[1]
    assert result.finished
    assert md.load(folder)["optimizer"]["n"] == 7
    state = Counted().init({})
    for _ in range(comm.rank):
        Counted().update({}, state, {})
    average_state(comm, state)
    most = comm.size - 1
    rate = np.mean([0.5**rank for rank in range(comm.size)])
    assert state == {"n": most, "more": {"n": most, "rate": rate, "name": "a"}, "on": True}
    assert [type(state["more"][name]) for name in ("n", "rate")] == [np.int64, np.float64]


def test_a_message_of_many_pieces(monkeypatch):
    from mpidist.peers import peer_messages

    monkeypatch.setattr(peer_messages, "PIECE", 100)
    found = peer_messages.message_pieces(np.zeros(250, np.uint8))
    assert [len(piece) for piece in found] == [100, 100, 50]
    assert MPI.COMM_WORLD.size >= 1
