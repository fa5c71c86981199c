"""All ranks together skip bad and slow data, count and list them, up to a limit (R42 to R44)."""

import json

import numpy as np
import pytest

import mpidist as md
from mpidist import data, events, models, optim
from mpidist.data import Position, Sampler
from mpidist.errors import BadRecord, TooManyBadRecords

COUNT, BATCH, EPOCHS = 90, 8, 2
RNG = np.random.default_rng(1)
X = RNG.standard_normal((COUNT, 5)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(np.int64)


class Source(data.ArraySource):
    """Records `bad` cannot be read; `asked` counts how often each was asked for."""

    name = "made up"

    def __init__(self, bad=(), x=X, y=Y):
        super().__init__(x, y)
        self.bad, self.asked = set(bad), np.zeros(COUNT, int)

    def take(self, indices):
        np.add.at(self.asked, indices, 1)
        for index in indices:
            if index in self.bad:
                raise BadRecord(int(index), "torn")
        return super().take(indices)


def fit(comm, source, optimizer=None, **settings):
    model = models.mlp([5, 8, 2], seed=3)
    settings.setdefault("epochs", EPOCHS)
    settings.setdefault("max_bad", 0.1)
    settings.setdefault("global_batch", BATCH)
    result = md.train(comm, model, source, optimizer=optimizer or optim.momentum(0.1), **settings)
    return model, result


def serial(bad, batch=BATCH):
    """The same run without MPI: what is bad is not in its batch, and the mean is over the rest."""
    model, optimizer = models.mlp([5, 8, 2], seed=3), optim.momentum(0.1)
    state = optimizer.init(model.parameters)
    gradients = {name: np.zeros_like(p) for name, p in model.parameters.items()}
    sampler, position = Sampler(COUNT, batch), Position()
    while position.epoch < EPOCHS:
        indices, position = sampler.batch(position)
        indices = np.array([i for i in indices if i not in bad])
        if len(indices):
            model.loss_and_gradients((X[indices], Y[indices]), gradients)
            optimizer.update(gradients, state, model.parameters)
    return model.parameters


def near(parameters, expected):
    for name, array in expected.items():
        np.testing.assert_allclose(parameters[name], array, atol=2e-5, err_msg=name)


@pytest.mark.ranks(1, 2, 3, further=(5,))
def test_bad_records_are_skipped_by_all_together(comm, folder):
    """R42: the mean is over the rest; each is looked at once, and then known on all ranks."""
    bad = {7, 33, 80}
    source = Source(bad)
    path = folder / "quarantine.jsonl"
    model, result = fit(comm, source, quarantine=path)
    near(model.parameters, serial(bad))
    assert result.skipped_records == EPOCHS * len(bad)
    assert result.finished
    assert len(set(comm.allgather(result.parameters_sha256))) == 1
    asked = comm.allreduce(source.asked)
    good = np.setdiff1d(np.arange(COUNT), list(bad))
    assert set(asked[list(bad)]) == {2}, "once with its batch and once alone, in the first epoch"
    assert (asked[good] >= EPOCHS).all()
    assert (asked[good] <= EPOCHS + 1).all()
    comm.Barrier()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["index"] for line in lines) == sorted(bad)
    assert lines[0] == {"source": "made up", "index": lines[0]["index"], "reason": "torn"}


@pytest.mark.ranks(2)
def test_whole_batches_of_bad_records(comm):
    """Nothing to learn from: no update at all, momentum does not go on alone; the run does."""
    order = Sampler(COUNT, BATCH).order(0)
    bad = {int(i) for i in order[2 * BATCH : 4 * BATCH]}
    # Nor do they count as steps without a loss, after which no loss would be less.
    model, result = fit(comm, Source(bad), max_bad=0.5, patience=5)
    near(model.parameters, serial(bad))
    assert result.skipped_records == EPOCHS * len(bad)
    pieces, _ = fit(comm, Source(bad), max_bad=0.5, microbatches=4)
    near(pieces.parameters, serial(bad))


@pytest.mark.ranks(1, 3)
def test_what_the_model_rejects(comm):
    """A label that no class has; found among others, by asking about each alone."""
    labels = Y.copy()
    labels[[11, 57]] = 9
    model, result = fit(comm, (X, labels))
    near(model.parameters, serial({11, 57}))
    assert result.skipped_records == 4
    known = [e[2]["reason"] for e in events.recent if e[1] == "bad_record"]
    everyone = [reason for reasons in comm.allgather(known) for reason in reasons]
    assert any("the model says ConfigError: labels run from 9 to 9" in r for r in everyone)


@pytest.mark.ranks(2)
def test_accumulation_skips_them_too(comm):
    model, result = fit(comm, Source({7, 33}), strategy=md.AllReduce(accumulate=2))
    near(model.parameters, serial({7, 33}))
    assert result.skipped_records == 4


@pytest.mark.ranks(3)
def test_a_mistake_in_the_model_is_no_bad_record(comm):
    """It rejects whatever it is given: its own exception goes up, on the ranks that meet it."""
    with pytest.raises(md.ConfigError, match="model input has shape"):
        fit(comm, (X[:, :4], Y), max_bad=1.0)


BITS: dict = {}


@pytest.mark.ranks(1, 3, further=(2, 5))
def test_microbatches_keep_their_bits(comm):
    """Whatever the number of ranks, with records bad in the source and in the model."""
    labels = Y.copy()
    labels[[11, 57]] = 9
    for settings in ({"microbatches": 8}, {"microbatches": 3}):
        model, result = fit(comm, Source({7, 33, 80}, X, labels), **settings)
        near(model.parameters, serial({7, 11, 33, 57, 80}))
        assert result.skipped_records == 10
        key = str(settings)
        digest = comm.bcast(BITS.setdefault(key, result.parameters_sha256))
        assert result.parameters_sha256 == digest


class Running:
    """A model with a running mean, which only whole means may enter."""

    def __init__(self):
        self.parameters = {"w": np.zeros(5)}
        self.state = {"mean": np.zeros(5)}

    def predict(self, x):
        return np.stack([np.zeros(len(x)), x @ self.parameters["w"]], 1)

    def loss_and_gradients(self, batch, gradients, ready=None):
        x, y = batch
        self.state["mean"][...] = 0.5 * self.state["mean"] + 0.5 * x.mean(axis=0)
        if (y > 1).any():
            raise ValueError("no such class")
        error = x @ self.parameters["w"] - y
        gradients["w"][...] = 2 * error @ x / len(y)
        return float(error @ error / len(y))


@pytest.mark.ranks(1, 3)
def test_state_of_a_model_with_microbatches(comm):
    labels = Y.copy()
    labels[11] = 9
    model, state = Running(), np.zeros(5)
    md.train(
        comm, model, Source({7}, X.astype(float), labels), optimizer=optim.sgd(0.01),
        global_batch=8, epochs=1, microbatches=8, max_bad=0.1,
    )  # fmt: skip
    sampler, position = Sampler(COUNT, 8), Position()
    while position.epoch < 1:
        indices, position = sampler.batch(position)
        indices = np.setdiff1d(indices, [7, 11])
        state = 0.5 * state + 0.5 * X[indices].astype(float).mean(axis=0)
    np.testing.assert_allclose(model.state["mean"], state, atol=1e-12)


@pytest.mark.ranks(1, 3)
def test_too_many_stop_the_run_with_the_list_and_a_checkpoint(comm, folder):
    """R42, R43: an error on all ranks; mended data go on where it stopped, with the list known."""
    bad = {7, 33, 80, 81}
    settings = {"checkpoint": folder / "run", "quarantine": folder / "bad.jsonl"}
    with pytest.raises(TooManyBadRecords, match=r"of the 90 records of made up are bad") as caught:
        fit(comm, Source(bad), max_bad=0.03, **settings)
    assert len(caught.value.records) == 3
    assert {index for index, _ in caught.value.records} < bad
    assert "max_bad=0.03 allows 2" in str(caught.value)
    assert "\n" not in str(caught.value)
    state = md.load(folder / "run")["run"]
    assert [tuple(record) for record in state["bad"]] == list(caught.value.records)
    # The same limit stops it at once, before any step.
    with pytest.raises(TooManyBadRecords, match=f"the state was saved as step {state['step']}"):
        fit(comm, Source(bad), max_bad=0.03, **settings)
    # A resumed run knows the list: it does not even ask for these records.
    source = Source(bad)
    model, result = fit(comm, source, **settings)
    known = [index for index, _ in caught.value.records]
    assert comm.allreduce(source.asked)[known].sum() == 0
    near(model.parameters, serial(bad))
    assert result.skipped_records == EPOCHS * len(bad)
    comm.Barrier()
    lines = [json.loads(line)["index"] for line in (folder / "bad.jsonl").read_text().splitlines()]
    assert sorted(lines) == sorted(bad)


@pytest.mark.ranks(2)
def test_mended_records_are_used_again(comm, folder):
    """R43: retry_bad looks at them again, from where the run stands."""
    settings = {"checkpoint": folder / "run", "quarantine": folder / "bad.jsonl"}
    fit(comm, Source({7, 33}), epochs=1, **settings)
    _, result = fit(comm, Source(), retry_bad=True, **settings)
    assert result.skipped_records == 2, "those of the first epoch"
    assert md.load(folder / "run")["run"]["bad"] == []
    assert (folder / "bad.jsonl").read_text() == ""


@pytest.mark.ranks(1)
def test_a_thousandth_by_default(comm):
    """One of 90 is more than 0.1 %: what is skipped silently is decided by the user, not by us."""
    model = models.mlp([5, 8, 2])
    with pytest.raises(TooManyBadRecords, match=r"max_bad=0\.001 allows 0"):
        md.train(comm, model, Source({7}), optimizer=optim.sgd(0.1), global_batch=8, epochs=1)


@pytest.mark.covering
@pytest.mark.ranks(3, 5)
@pytest.mark.parametrize("mode", [md.BSP(), md.ASP()], ids=str)
def test_workers_of_servers(comm, folder, mode):
    """They go on with what is good, and agree on the list at checkpoints."""
    strategy = md.ParameterServer(1, mode)
    bad = {7, 33, 80}
    _, result = fit(
        comm, Source(bad), optim.sgd(0.1), strategy=strategy, checkpoint=folder / "run",
        checkpoint_every=5,
    )  # fmt: skip
    state = md.load(folder / "run")["run"]
    assert [index for index, _ in state["bad"]] == sorted(bad)
    assert result.skipped_records == EPOCHS * len(bad) == state["skipped"]
    if mode == md.BSP():
        model, _ = fit(comm, Source(bad), strategy=strategy)
        if comm.rank < comm.size - 1:
            near(model.parameters, serial(bad))


@pytest.mark.ranks(2)
def test_a_worker_counts_a_record_once(comm):
    """R42: without checkpoints workers never agree, and each epoch finds the same record again."""
    _, result = fit(comm, Source({7}), strategy=md.ParameterServer(1), max_bad=1 / COUNT, epochs=3)
    assert result.finished
    assert result.skipped_records == 3


@pytest.mark.ranks(3)
def test_too_many_for_servers(comm, folder):
    bad = set(range(0, 90, 2))
    strategy = md.ParameterServer(1, md.ASP())
    with pytest.raises(TooManyBadRecords):
        fit(comm, Source(bad), strategy=strategy, checkpoint=folder / "run", epochs=20)
    assert md.load(folder / "run")["run"]["step"] < 100, "long before the end"
