"""If data, results or exceptions of one rank differ in md.train, all ranks raise one error."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from test_train_disagreement import INPUTS, LABELS, ODD, TRAIN, fit, mlp

import mpidist as md
from mpidist import data, optim
from mpidist.collectives.engines.node_barrier import memory_of
from mpidist.data import records
from mpidist.errors import ConfigError, MismatchError, MpidistError, ReplicaError
from mpidist.fault_tolerance.watch import active
from mpidist.runtime.context import of
from mpidist.training.settings import settings_difference


class Noisy(data.sources.ArraySource):
    """Its samples are new ones whenever they are read."""

    remote = False

    def take(self, indices):
        inputs, labels = super().take(indices)
        return inputs + np.random.default_rng().random(inputs.shape, np.float32), labels


class Own(data.sources.ArraySource):
    """Its samples depend on the rank."""

    taken = 0

    def take(self, indices):
        self.taken += 1
        inputs, labels = super().take(indices)
        return inputs + np.float32(MPI.COMM_WORLD.rank), labels


@pytest.mark.ranks(2)
def test_records_of_sources(comm):
    """Those of a user's own are not read for it unless they say that they may be."""
    fit(comm, data=Noisy(*TRAIN))
    for remote, reads in ((None, 2), (True, 2), (False, 0)):
        source = Own(*TRAIN)
        if remote is not None:
            source.remote = remote
        if reads:
            fit(comm, data=source)
            assert source.taken == reads  # by the two steps
            fit(comm, data=data.sources.Part(source, 0, 40))
            continue
        with pytest.raises(MismatchError, match=r"first good record, number 0, of rank \d differs"):
            fit(comm, data=source)
        with pytest.raises(MismatchError, match=r"first good record, number 0, of rank \d differs"):
            fit(comm, data=data.sources.Part(source, 4, 40))
    stream = data.sources.Stream(lambda: zip(*TRAIN, strict=True), 40)
    fit(comm, data=stream, shuffle=False)


class Hole(list):
    """Samples of which one rank cannot read the first and the last."""

    def __getitem__(self, index):
        if index in (0, 39) and MPI.COMM_WORLD.rank == ODD:
            raise OSError("torn")
        return super().__getitem__(index)


@pytest.mark.ranks(2)
def test_a_record_that_one_rank_cannot_read(comm):
    """It is found bad when it is used, and skipped by all: no reason to refuse the run."""
    source = data.sources.Items(Hole((INPUTS[k], LABELS[k]) for k in range(40)))
    source.remote = False
    assert fit(comm, data=source, steps=10, max_bad=0.5).finished


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", [{"x": INPUTS}, INPUTS, [INPUTS.tolist()], None])
def test_a_source_that_gives_no_tuple(comm, batch):
    source = type("Broken", (), {"__len__": lambda self: 40, "take": lambda self, indices: batch})()
    with pytest.raises(
        ConfigError, match=r"take of Broken returned .*; expected a tuple of arrays"
    ):
        fit(comm, data=source)


class Pushing:
    """A model that changes a parameter on one rank, behind everybody's back."""

    def __init__(self, at):
        self.inner, self.calls, self.at = mlp(5, 2), 0, at
        self.parameters = self.inner.parameters

    def loss_and_gradients(self, batch, gradients, ready=None):
        self.calls += 1
        if self.calls == self.at and MPI.COMM_WORLD.rank == ODD:
            self.parameters["dense1.bias"] += 1e-3
        return self.inner.loss_and_gradients(batch, gradients)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("microbatches", [None, 4])
def test_replicas_are_compared_at_the_end(comm, microbatches):
    """Without a store too: the digest in the summary is everybody's, or there is no summary."""
    with pytest.raises(ReplicaError, match=r"after step 2: rank 1's 'dense1.bias' differs"):
        fit(comm, model=Pushing(1), microbatches=microbatches)
    assert fit(comm).finished


@pytest.mark.ranks(3)
@pytest.mark.parametrize("strategy", [md.AllReduce(), md.AllReduce(accumulate=2), "pieces",
                                      md.ParameterServer(1)])  # fmt: skip
@pytest.mark.parametrize("loss", [None, "0.1", [0.1]])
def test_a_loss_that_is_no_number(comm, strategy, loss):
    model = mlp(5, 2)
    pieces = {"microbatches": 3} if strategy == "pieces" else {"strategy": strategy}
    odd = SimpleNamespace(parameters=model.parameters, loss_and_gradients=lambda *given: loss)
    with pytest.raises(Exception, match=r"loss_and_gradients returned (None|'0.1'|\[0.1\]); exp"):
        fit(comm, model=odd, **pieces)


class Failing:
    """A model that fails at a step, when half of its gradients are told."""

    def __init__(self, rank, at):
        self.inner, self.calls, self.rank, self.at = mlp(5, 9, 2), 0, rank, at
        self.parameters = self.inner.parameters

    def loss_and_gradients(self, batch, gradients, ready=None):
        self.calls += 1

        def told(name):
            ready(name)
            if self.rank == ODD and self.calls == self.at:
                raise KeyError("mine")

        return self.inner.loss_and_gradients(batch, gradients, told)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("progress", ["hooks", "thread"])
def test_an_exception_while_gradients_are_under_way(comm, progress):
    """A bucket that the others wait for is broken off; and no thread goes on."""
    own = comm.Dup()
    memory_of(of(own), 1)
    strategy = md.AllReduce("ring", bucket_bytes=64, progress=progress)
    with pytest.raises((KeyError, MpidistError), match="mine") as caught:
        fit(own, model=Failing(comm.rank, 4), steps=9, strategy=strategy)
    assert isinstance(caught.value, KeyError) == (comm.rank == ODD)
    if comm.rank == ODD:
        assert "mpidist-progress" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "strategy",
    ["allreduce", "pieces", "parameter_server", md.ParameterServer(2, md.ASP(), "colocated")],
)
def test_an_exception_that_one_rank_catches(comm, strategy):
    """The others do not wait for it."""

    def fails(step):
        if comm.rank == ODD and step.step == 2:
            raise KeyError("mine")

    own = comm.Dup()
    how = {"microbatches": 4} if strategy == "pieces" else {"strategy": strategy}
    with pytest.raises((KeyError, MpidistError), match="mine") as caught:
        fit(own, steps=9, callbacks=[fails], **how)
    assert isinstance(caught.value, KeyError) == (comm.rank == ODD)
    assert "contextlib.py" not in str(caught.value)  # which calls the ends of our blocks


@pytest.mark.ranks(3)
def test_a_wrong_name_that_is_ready_on_one_rank(comm):
    """`ready` sends the error; the end of the run must not send it again, as another one."""
    own, model = comm.Dup(), mlp(5, 2)
    usual = model.loss_and_gradients

    def fails(batch, gradients, ready=None):
        loss = usual(batch, gradients, ready)
        if comm.rank == ODD and ready is not None:
            ready("no such name")
        return loss

    model.loss_and_gradients = fails
    with pytest.raises(MpidistError, match="no such name"):
        fit(own, model=model)
    comm.Barrier()


@pytest.mark.ranks(2)
def test_an_exception_that_all_ranks_catch(comm):
    """The communicator stays usable."""

    def fails(step):
        raise KeyError("all")

    expected = fit(comm).parameters_sha256
    for _ in range(2):
        with pytest.raises(KeyError, match="all"):
            fit(comm, callbacks=[fails])
        assert fit(comm).parameters_sha256 == expected


@pytest.mark.ranks(1, 2)
def test_what_is_no_communicator(comm):
    """Arguments that were swapped, none, and a communicator that was given away."""
    given = {"optimizer": optim.sgd(0.1), "global_batch": 8, "steps": 1}
    for wrong, what in ((None, "comm is None"), (mlp(5, 2), "comm is a value of type Network"),
                        (MPI.COMM_NULL, "comm is COMM_NULL")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"md.train: {what}"):
            md.train(wrong, comm, TRAIN, **given)


@pytest.mark.ranks(2)
def test_an_intercommunicator_is_refused(comm):
    mine = comm.Split(comm.rank)
    between = mine.Create_intercomm(0, comm, 1 - comm.rank)
    with pytest.raises(ConfigError, match="comm is an intercommunicator"):
        fit(between)
    between.Free()
    mine.Free()


@pytest.mark.ranks(1, 3)
def test_a_run_is_watched_once(comm):
    """By the program's own watch where there is one, on some rank; on one rank by none."""
    seen = []

    def look(step):
        seen.append([one.seconds for one in active])

    with pytest.raises(ConfigError, match="checkpoint"):
        fit(comm, checkpoint=len)  # this run ends before its first step, and its watch with it
    fit(comm, callbacks=[look])
    assert seen == [[600.0] if comm.size > 1 else []] * 2
    fit(comm, callbacks=[look], watch_seconds=30)
    assert seen[2:] == [[30.0] if comm.size > 1 else []] * 2
    fit(comm, callbacks=[look], watch_seconds=0)
    assert seen[4:] == [[]] * 2
    assert active == []
    with md.watch(comm, 50):
        fit(comm, callbacks=[look])
    assert seen[6:] == [[50.0]] * 2
    with md.watch(MPI.COMM_SELF, 40) if comm.rank == 0 else nullcontext():
        fit(comm, callbacks=[look])
    assert seen[8:] == [[40.0] if comm.rank == 0 else []] * 2
    assert active == []


def test_who_differs_in_words():
    """Pure: the fewest ranks first, one setting with its values, the names of others."""
    a, b = {"seed": "0", "steps": "5"}, {"seed": "1", "steps": "6"}
    everyone = [("x", a), ("y", b), ("x", None), ("x", None)]
    assert settings_difference(everyone) == (
        "md.train: seed differs: rank 1 has 1, ranks 0,2,3 have 0 (and so do steps); give all "
        "ranks the same"
    )
    long = [("x", {"path": "p" * 200}), ("y", {"path": "p" * 201})]
    assert len(settings_difference(long)) < 300
    assert records.differing([records.Content(), records.Content("f")]) is None
