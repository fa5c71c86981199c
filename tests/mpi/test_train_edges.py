"""md.train with stops, resumes and unusual arguments (R27, R53, R141)."""

import os
import signal
import time

import numpy as np
import pytest
from test_train import TEST, TRAIN, fit

import mpidist as md
from mpidist import models, optim
from mpidist.checkpoint.interval import FIRST
from mpidist.errors import ConfigError
from mpidist.gradients.flat_views import flat_views
from mpidist.training.exchanges.evaluation import parameters_digest


@pytest.mark.ranks(2)
def test_a_resumed_run_stops_where_it_was_to_stop(comm, folder):
    """`stop_after` counts all steps, also when they are over; a finished run changes nothing."""
    _, first = fit(comm, checkpoint=folder, stop_after=9)
    _, again = fit(comm, checkpoint=folder, stop_after=4)
    assert (first.steps, again.steps, again.finished) == (9, 9, False)
    whole, done = fit(comm, checkpoint=folder)
    same, after = fit(comm, checkpoint=folder, stop_after=100)
    assert done.finished
    assert after.finished
    assert parameters_digest(same) == parameters_digest(whole)
    assert after.as_dict()["train_loss"] is None
    with pytest.raises(ConfigError, match="stop_after=0"):
        fit(comm, stop_after=0)
    with pytest.raises(ConfigError, match="checkpoint_every=-2"):
        fit(comm, checkpoint=folder, checkpoint_every=-2)


@pytest.mark.ranks(2)
def test_another_global_batch_ends_with_the_same_epochs(comm, folder):
    """150 samples: 11 steps of 20 are epoch 1 and 60 samples; 10 a step then need 9 and 15."""
    fit(comm, checkpoint=folder, stop_after=11)
    _, result = fit(comm, checkpoint=folder, batch=10)
    assert (result.epochs, result.steps) == (3, 11 + 9 + 15)
    assert result.finished


class Replacing:
    """A model that puts gradients of its own into the dict."""

    def __init__(self):
        self.inner = models.mlp([12, 16, 3], seed=7)
        self.parameters = self.inner.parameters

    def loss_and_gradients(self, batch, gradients, ready=None):
        loss = self.inner.loss_and_gradients(batch, gradients, ready)
        for name in gradients:
            gradients[name] = gradients[name].copy()
        return loss


@pytest.mark.ranks(2)
def test_replaced_gradients_are_refused(comm):
    """They would never be sent: replicas would drift apart in silence."""
    with pytest.raises(ConfigError, match=r"replaced gradients\['dense1.weight'\]"):
        md.train(comm, Replacing(), TRAIN, optimizer=optim.sgd(0.1), global_batch=20, epochs=1)


class Counting:
    """A linear model with a running mean of its inputs, which its predictions use."""

    def __init__(self, dtype=np.float32):
        self.parameters = {"w": np.zeros((12, 3), dtype), "b": np.zeros(3, np.float64)}
        self.state = {"mean": np.zeros(12, np.float32)}

    def loss_and_gradients(self, batch, gradients, ready=None):
        inputs, labels = batch
        self.state["mean"] += 0.1 * (inputs.mean(axis=0) - self.state["mean"])
        scores = self.predict(inputs) - np.eye(3)[labels]
        gradients["w"][...] = inputs.T @ scores / len(inputs)
        gradients["b"][...] = scores.mean(axis=0)
        return float((scores**2).mean()) * 1e5

    def predict(self, inputs):
        return (inputs - self.state["mean"]) @ self.parameters["w"] + self.parameters["b"]


@pytest.mark.ranks(3)
def test_state_is_averaged_with_and_without_checkpoints(comm, folder):
    """What is evaluated does not depend on whether it is saved."""
    means = []
    for checkpoint in (None, folder):
        model = Counting()
        md.train(comm, model, TRAIN, optimizer=optim.sgd(0.01), global_batch=30, epochs=1,
                 test_data=TEST, checkpoint=checkpoint)  # fmt: skip
        assert len(set(comm.allgather(parameters_digest(model.state)))) == 1
        means.append(model.state["mean"])
    np.testing.assert_array_equal(*means)


@pytest.mark.ranks(3)
def test_colocated_servers_serve_while_state_is_saved(comm, folder):
    """A worker that is early at a checkpoint still serves those that are late."""
    strategy = md.ParameterServer(3, md.ASP(), placement="colocated")

    def uneven(step):
        time.sleep(0.01 * comm.rank)

    md.train(comm, Counting(), TRAIN, optimizer=optim.sgd(0.001), global_batch=30, epochs=3,
             checkpoint=folder, strategy=strategy, callbacks=[uneven])  # fmt: skip
    assert md.load(folder)["model"]["mean"].shape == (12,)


@pytest.mark.ranks(4)
def test_optimizers_without_state_are_saved_by_several_servers(comm, folder):
    """R53: only the first server has something to save for plain descent."""
    strategy = md.ParameterServer(2)
    whole, _ = fit(comm, optim.sgd(0.1), strategy=strategy)
    fit(comm, optim.sgd(0.1), strategy=strategy, checkpoint=folder, stop_after=11)
    parameters, result = fit(comm, optim.sgd(0.1), strategy=strategy, checkpoint=folder)
    assert result.resumed_at == 11
    if comm.rank < 2:
        assert parameters_digest(parameters) == parameters_digest(whole)


@pytest.mark.ranks(2)
def test_parameters_of_several_dtypes(comm):
    """The loss is summed in a wide type whatever comes first: here it is beyond float16."""
    model, seen = Counting(np.float16), []
    md.train(comm, model, TRAIN, optimizer=optim.sgd(0.01), global_batch=30, epochs=1,
             callbacks=[lambda step: seen.append(step.loss)])  # fmt: skip
    assert max(seen) > 20_000
    assert len(set(comm.allgather(parameters_digest(model.parameters)))) == 1
    gradients, vectors = flat_views({"h": np.zeros(3, np.float16)})
    assert [(v.dtype.name, v.size) for v in vectors] == [("float32", 2), ("float16", 3)]
    assert gradients["h"].dtype == np.float16


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_a_slow_worker_may_stop_a_fast_one_that_waits(comm, folder, placement):
    """ASP: the fast worker waits in a checkpoint, or at the end, when the slow one is signalled."""
    strategy = md.ParameterServer(1, md.ASP(), placement=placement)

    def signalled(step):
        if (comm.rank, step.step) == (0, 20):
            comm.send("ahead", 1)
        if (comm.rank, step.step) == (1, 6):
            comm.recv(source=0)
            time.sleep(0.1)  # by now rank 0 waits: in the checkpoint, or for the end
            os.kill(os.getpid(), signal.SIGUSR1)

    def run(name, **kwargs):
        return fit(comm, optim.sgd(0.05), checkpoint=f"{folder}/{name}", strategy=strategy,
                   callbacks=[signalled], **kwargs)  # fmt: skip

    with pytest.raises(SystemExit) as stopped:
        run("a", epochs=None, steps=200, checkpoint_every=20)
    assert stopped.value.code == 75
    assert md.load(f"{folder}/a")["run"]["step"] == 22
    comm.Barrier()
    # Here the fast one has finished, so all that is left is to come to the end.
    _, result = run("b", epochs=None, steps=20, checkpoint_every=99)
    assert result.finished


@pytest.mark.ranks(1, further=(3,))
@pytest.mark.parametrize("every", ["auto 1h", "0.05s"])
def test_a_time_between_checkpoints(comm, folder, every):
    """R52, issue 4 point 4: all ranks save the same steps, and write while they train."""
    with md.CheckpointStore(comm, folder, keep=None) as store:
        fit(comm, checkpoint=store, checkpoint_every=every, epochs=None, steps=60)
        steps = store.all_steps()
    assert steps[0] == FIRST
    assert steps[-1] == 60
    assert len(set(comm.allgather(str(steps)))) == 1
