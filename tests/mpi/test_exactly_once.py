"""Each record of an epoch is used once, despite stops, other ranks, other batches (issue 4)."""

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist import data, models, optim
from mpidist.errors import BadRecord, ConfigError

COUNT = 90
X = np.random.default_rng(0).standard_normal((COUNT, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)


def fit(comm, folder, **settings):
    settings.setdefault("epochs", 2)
    settings.setdefault("global_batch", 8)
    return md.train(
        comm, models.logistic(4, 2), settings.pop("data", (X, Y)), optimizer=optim.sgd(0.1),
        checkpoint=folder / "run", **settings,
    )  # fmt: skip


@pytest.mark.ranks(3)
def test_the_shuffle_is_part_of_the_checkpoint(comm, folder):
    """A run goes on in the order it began with, whatever is asked for or chosen later."""
    whole = fit(comm, folder / "whole", shuffle="bijection")
    other = fit(comm, folder / "other")
    assert whole.parameters_sha256 != other.parameters_sha256
    fit(comm, folder, shuffle="bijection", stop_after=7)
    state = md.load(folder / "run")
    assert state["run"]["shuffle"] == "bijection"
    assert fit(comm, folder).parameters_sha256 == whole.parameters_sha256
    with pytest.raises(ConfigError, match="shuffle is 'by size'"):
        fit(comm, folder / "bad", shuffle="by size")


@pytest.mark.ranks(2)
def test_a_checkpoint_without_the_name_was_permuted(comm, folder):
    """Runs of earlier versions keep their order."""
    whole = fit(comm, folder / "whole", shuffle="permutation")
    fit(comm, folder, stop_after=7)
    with md.CheckpointStore(comm, folder / "run") as store:
        step, state = store.restore()
        del state["run"]["shuffle"]
        store.save(step, state)
    assert fit(comm, folder, shuffle="bijection").parameters_sha256 == whole.parameters_sha256


class Recorder:
    """A model that notes which records it was given: a record's number is its first feature."""

    def __init__(self):
        self.parameters = {"w": np.zeros(2)}
        self.seen: list[int] = []

    def predict(self, x):
        return x

    def loss_and_gradients(self, batch, gradients, ready=None):
        self.seen += batch[0][:, 0].astype(int).tolist()
        gradients["w"][...] = batch[0].mean(axis=0)
        return float(batch[0][:, 0].mean())


class Partly(data.ArraySource):
    """Some records are broken."""

    def take(self, indices):
        for index in indices:
            if index in BAD:
                raise BadRecord(int(index), "broken")
        return super().take(indices)


BAD = {3, 44, 45, 89}


class Kill(Exception):
    """Ends a run between two steps, on all ranks, without a word to anybody."""


@pytest.mark.ranks(5)
@pytest.mark.parametrize("pieces", [None, 5])
def test_random_histories_of_the_loop_itself(comm, folder, pieces):
    """Jobs on 1 to 5 ranks, batches of 5 to 12, stops and kills; checkpoints every few steps."""
    rng = np.random.default_rng(11 if pieces else 12)
    numbers = np.stack([np.arange(COUNT), np.ones(COUNT)], 1).astype(float)
    committed, jobs, kills = [], 0, 0
    while True:
        size, batch = int(rng.integers(1, 6)), int(rng.integers(5, 13))
        steps, every = int(rng.integers(2, 8)), int(rng.integers(1, 5))
        killed = jobs == 1 or rng.random() < 0.5
        part = comm.Split(0 if comm.rank < size else MPI.UNDEFINED)
        outcome = None
        if part != MPI.COMM_NULL:
            outcome = _job(part, folder, numbers, batch, every, steps, killed, pieces)
            md.free(part)
            part.Free()
        everyone = [entry for entry in comm.allgather(outcome) if entry is not None]
        assert len({step for step, _, _ in everyone}) == 1
        committed += [record for _, _, records in everyone for record in records]
        jobs, kills = jobs + 1, kills + killed
        if everyone[0][1]:
            break
    good = sorted(set(range(COUNT)) - BAD)
    assert sorted(committed) == sorted(good * 2)
    assert md.load(folder / "run")["run"]["skipped"] == 2 * len(BAD)
    assert jobs > 3
    assert kills > 0


def _job(comm, folder, numbers, batch, every, steps, killed, pieces):
    """Run one job; returns (last committed step, whether all is done, records used until then)."""
    model, by_step = Recorder(), {}
    first = None

    def note(step):
        nonlocal first
        first = step.step if first is None else first
        by_step[step.step], model.seen = model.seen, []
        if killed and step.step == first + steps:
            raise Kill

    try:
        with md.CheckpointStore(comm, folder / "run") as store:
            begin = store.latest_step() or 0
            md.train(
                comm, model, Partly(numbers, np.zeros(COUNT)), optimizer=optim.sgd(0.0),
                global_batch=max(batch, comm.size), epochs=2, checkpoint=store,
                checkpoint_every=every, stop_after=None if killed else begin + steps, max_bad=0.1,
                microbatches=pieces, callbacks=[note],
            )  # fmt: skip
    except Kill:
        pass
    comm.Barrier()
    with md.CheckpointStore(comm, folder / "run") as store:
        last = store.latest_step() or 0
    done = md.load(folder / "run")["run"]["epoch"] == 2 if last else False
    return last, done, [r for step, seen in by_step.items() if step <= last for r in seen]


class Asked(data.ArraySource):
    """Notes which records it is asked for, as if each of them had to be fetched from afar."""

    reads = True
    remote = True

    def __init__(self, *arrays):
        super().__init__(*arrays)
        self.asked: list[int] = []

    def take(self, indices):
        self.asked += np.asarray(indices).tolist()
        return super().take(indices)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("prefetch", [False, "auto"])
def test_a_rank_asks_for_its_own_records_only(comm, prefetch):
    """R133: what others work on is not read and dropped; all ranks together ask once."""
    source = Asked(X, Y)
    md.train(
        comm, models.logistic(4, 2), source, optimizer=optim.sgd(0.1), epochs=1, global_batch=8,
        loading=data.Loading(prefetch=prefetch),
    )  # fmt: skip
    order, mine, after = data.Sampler(COUNT, 8), [], data.Position(0, 0)
    while after.epoch == 0:
        batch, after = order.batch(after)
        mine += order.local(batch, comm.rank, comm.size).tolist()
    # A thread that reads ahead goes on with its own part of what follows the epoch.
    assert source.asked[: len(mine)] == mine
    assert len(source.asked) == len(mine) or prefetch
    assert sorted(np.concatenate(comm.allgather(mine)).tolist()) == list(range(COUNT))
