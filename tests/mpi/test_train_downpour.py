"""Downpour SGD: pushes and pulls every few steps."""

import numpy as np
import pytest
from test_train import TRAIN, close, fit

import mpidist as md
from mpidist import data, models, optim
from mpidist.errors import ConfigError
from mpidist.training.exchanges.evaluation import parameters_digest

STEPS = 24


def downpour(optimizer, push_every, pull_every, batch=20, flush_at=()):
    """One worker and one server, in plain NumPy."""
    model, server = models.mlp([12, 16, 3], seed=7), models.mlp([12, 16, 3], seed=7).parameters
    mine, theirs = optimizer.init(model.parameters), optimizer.init(server)
    gradients = {name: np.zeros_like(p) for name, p in server.items()}
    sums, samples, step = {name: np.zeros_like(p) for name, p in server.items()}, 0, 0

    def push():
        nonlocal samples
        if samples:
            mean = {name: total / samples for name, total in sums.items()}
            optimizer.update(mean, theirs, server, weight=samples / batch)
        for total in sums.values():
            total[...] = 0
        samples = 0

    def pull():
        for name, values in server.items():
            model.parameters[name][...] = values

    sampler, position = data.Sampler(150, batch, 1), data.Position()
    for done in range(1, STEPS + 1):
        indices, position = sampler.batch(position)
        model.loss_and_gradients((TRAIN[0][indices], TRAIN[1][indices]), gradients)
        for name, total in sums.items():
            total += gradients[name] * len(indices)
        samples, step = samples + len(indices), step + 1
        if step % push_every == 0:
            push()
        if step % pull_every == 0:
            pull()
        else:
            optimizer.update(gradients, mine, model.parameters, weight=len(indices) / batch)
        if done in flush_at:
            push()
            pull()
            step = 0
    push()
    return server


@pytest.mark.ranks(2)
@pytest.mark.parametrize("every", [(1, 3), (2, 1), (2, 2), (2, 3), (5, 7)])
def test_one_worker_equals_the_serial_reference(comm, every):
    for make in (optim.sgd(0.1), optim.momentum(0.05)):
        strategy = md.ParameterServer(1, md.ASP(), push_every=every[0], pull_every=every[1])
        parameters, result = fit(comm, make, strategy=strategy)
        assert result.steps == STEPS
        if comm.rank == 0:
            close(parameters, downpour(make, *every))


@pytest.mark.ranks(2)
def test_a_checkpoint_has_all_gradients(comm, folder):
    """A save pushes what is left; a run goes on from it as one that was not stopped."""
    strategy = md.ParameterServer(1, md.SSP(2), push_every=3, pull_every=4)
    sgd = optim.sgd(0.1)
    saving = {"strategy": strategy, "checkpoint_every": 11}
    whole, _ = fit(comm, sgd, checkpoint=f"{folder}/a", **saving)
    fit(comm, sgd, checkpoint=f"{folder}/b", stop_after=11, **saving)
    again, result = fit(comm, sgd, checkpoint=f"{folder}/b", **saving)
    assert result.resumed_at == 11
    if comm.rank == 0:
        close(whole, downpour(sgd, 3, 4, flush_at=(11, 22)))
        assert parameters_digest(again) == parameters_digest(whole)


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.parametrize("mode", [md.ASP(), md.SSP(1), md.DSSP(1, 3)])
def test_it_learns(comm, mode, placement):
    strategy = md.ParameterServer(2, mode, placement, push_every=2, pull_every=3)
    parameters, result = fit(comm, optim.sgd(0.1), epochs=6, batch=25, strategy=strategy)
    assert result.steps == 36
    assert result.test_accuracy > 0.55
    digests = comm.allgather(parameters_digest(parameters) if comm.rank < result.workers else None)
    assert len(set(digests) - {None}) == 1


@pytest.mark.parametrize("mode", [md.BSP(), md.SSP(0), md.BackupWorkers(1)])
def test_modes_that_exchange_in_each_step(mode):
    for name in ("push_every", "pull_every"):
        with pytest.raises(ConfigError, match=f"{name}=2 needs consistency ASP"):
            md.ParameterServer(1, mode, **{name: 2})


@pytest.mark.ranks(2)
def test_half_precision(comm):
    """Gradients of float16 times 2000 samples would overflow."""
    model = models.mlp([12, 16, 3], seed=7)
    for name, array in model.parameters.items():
        model.parameters[name] = array.astype(np.float16)
    usual = model.loss_and_gradients

    def large(batch, gradients, ready=None):
        loss = usual(batch, gradients)
        for array in gradients.values():
            array[...] = 40
        return loss

    model.loss_and_gradients = large
    before = model.parameters["dense1.bias"].copy()
    many = tuple(np.repeat(array, 20, axis=0) for array in TRAIN)
    strategy = md.ParameterServer(1, md.ASP(), push_every=2, pull_every=3)
    rate = 2**-12
    md.train(comm, model, many, optimizer=optim.sgd(rate), global_batch=2000, steps=4, seed=1,
             strategy=strategy)  # fmt: skip
    if comm.rank == 0:
        moved = before - model.parameters["dense1.bias"]
        # Batches of 2000, 1000, 2000 and 1000 samples.
        np.testing.assert_allclose(moved, (1 + 0.5 + 1 + 0.5) * 40 * rate, rtol=0.01)


@pytest.mark.ranks(3)
def test_another_optimizer_after_a_resize(comm, folder):
    """The local updates use it, too: with a rate of 0 nothing moves."""
    strategy = md.ParameterServer(1, md.ASP(), "colocated", push_every=50, pull_every=50)
    part = comm.Split(int(comm.rank >= 2))
    if comm.rank < 2:
        fit(part, optim.sgd(0.1), strategy=strategy, checkpoint=folder, stop_after=5)
        md.free(part)
    comm.Barrier()
    part.Free()
    model, seen = models.mlp([12, 16, 3], seed=7), []

    def slower(before, now, run):
        run.exchange.optimizer = optim.sgd(0.0)

    md.train(comm, model, TRAIN, optimizer=optim.sgd(0.1), global_batch=20, steps=12, seed=1,
             strategy=strategy, checkpoint=folder, resume=True, on_resize=slower,
             callbacks=[lambda report: seen.append(parameters_digest(model.parameters))],
    )  # fmt: skip
    assert len(seen) == 7
    assert len(set(seen)) == 1
