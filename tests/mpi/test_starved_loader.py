"""A loader that reads ahead, with a slow or missing source, and its state after the run."""

import json
import threading

import numpy as np
import pytest
from test_bad_records import COUNT, EPOCHS, Running, Source, X, Y, fit, near, serial
from until import wait_until

import mpidist as md
from mpidist import data, events, optim
from mpidist.data import Loading, Sampler
from mpidist.errors import MpidistError, SourceError


def told_starved():
    """What this rank has said of samples that did not come in time: step -> seconds."""
    told = {}
    for _, kind, details in list(events.recent):  # another thread may look
        if kind == "starved":
            told.setdefault(details["step"], []).append(details["seconds"])
    return told


class Slow(Source):
    """Does not answer its call number `at` until this rank has waited for it in vain, twice."""

    reads = True

    def __init__(self, at):
        super().__init__()
        self.at, self.calls = at, 0

    def take(self, indices):
        self.calls += 1

        def waited_for():
            return self.calls != self.at or max(map(len, told_starved().values()), default=0) >= 2

        wait_until(waited_for, 20, otherwise="nobody waits for this")
        return super().take(indices)


@pytest.mark.ranks(3, further=(1,))
def test_a_starved_loader_checkpoints_and_goes_on(comm, folder):
    """R44: state saved, said in an event, the same result as if nothing had been."""
    last = comm.rank == comm.size - 1
    for k, settings in enumerate(({}, {"microbatches": 4})):
        expected = fit(comm, Source(), **settings)[1].parameters_sha256
        loading = Loading(prefetch=1, starved_after=0.1 if last else 60.0)
        events.recent.clear()
        _, result = fit(
            comm, Slow(9 if last else 0), checkpoint=folder / str(k), checkpoint_every=1000,
            loading=loading, **settings,
        )  # fmt: skip
        assert result.parameters_sha256 == expected
        told = told_starved()
        saved = [event[2]["step"] for event in events.recent if event[1] == "checkpoint"]
        if last:
            assert all(waits == [0.1 * 2**k for k in range(len(waits))] for waits in told.values())
            # On a slow machine other steps may have had to wait, too.
            assert any(0 < step < saved[-1] and len(waits) > 1 for step, waits in told.items())
            assert saved[:-1] == list(told)
        else:
            assert told == {}
        assert comm.allgather(saved) == [saved] * comm.size


class Held(Source):
    """Gives nothing until a file is there."""

    reads = True

    def __init__(self, path):
        super().__init__()
        self.path = path

    def take(self, indices):
        wait_until(self.path.exists, 20, otherwise="the other workers got nowhere meanwhile")
        return super().take(indices)


@pytest.mark.ranks(3, further=(2,))
def test_a_starved_worker_serves_the_others(comm, folder):
    """R44, R67: it holds the parameters of all, and what is missing is missing to itself alone."""
    path = folder / "come"
    last = comm.rank == comm.size - 1

    def come(step):
        if comm.rank == 0 and step.step == 10:
            path.touch()

    strategy = md.ParameterServer(1, md.ASP(), placement="colocated")
    loading = Loading(prefetch=1, starved_after=0.001 if last else 60.0)
    events.recent.clear()
    _, result = fit(
        comm, Held(path) if last else Source(), optim.sgd(0.1), strategy=strategy, loading=loading,
        callbacks=[come],
    )  # fmt: skip
    assert result.finished
    assert bool(told_starved()) == last


@pytest.mark.ranks(2)
@pytest.mark.parametrize("settings", [{}, {"microbatches": 4}], ids=str)
def test_what_counts_for_nothing_leaves_no_trace(comm, folder, settings):
    """R42, R44: neither a rejected batch nor a step that is tried again changes running statistics.

    One record of each batch is bad, also in the step for which the other rank has no data yet.
    """
    bad = Sampler(COUNT, 9).order(0)[::9]
    labels = Y.copy()
    labels[bad] = 9
    slow = Slow(6 if comm.rank else 0)
    slow.arrays = (X, labels)
    events.recent.clear()
    found = []
    for source, more in ((Source(set(bad.tolist())), {}), (slow, {"checkpoint": folder / "run"})):
        model = Running()
        result = md.train(
            comm, model, source, optimizer=optim.momentum(0.01), global_batch=9, epochs=1,
            max_bad=0.2, loading=Loading(prefetch=1, starved_after=0.1), **settings, **more,
        )  # fmt: skip
        assert result.skipped_records == len(bad)
        found.append((model.parameters["w"], model.state["mean"]))
    assert comm.allreduce(bool(told_starved()))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1, True])
def test_reading_ahead_changes_nothing(comm, prefetch):
    """Also where a bad record changes everybody's part in the middle of what was read ahead."""
    expected, _ = fit(comm, Source({7, 33}))
    got, _ = fit(comm, Source({7, 33}), loading=Loading(prefetch=prefetch))
    for name, array in expected.parameters.items():
        assert got.parameters[name].tobytes() == array.tobytes()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("settings", [{}, {"microbatches": 4}], ids=str)
def test_numbers_that_are_not_finite(comm, folder, settings):
    """R42: skipped by all together, counted and listed, exactly as records that are unreadable."""
    x = X.copy()
    x[7, 2], x[33, 0] = np.nan, np.inf
    path = folder / "quarantine.jsonl"
    model, result = fit(comm, Source({80}, x), quarantine=path, **settings)
    near(model.parameters, serial({7, 33, 80}))
    assert result.skipped_records == EPOCHS * 3
    comm.Barrier()
    listed = {line["index"]: line["reason"] for line in map(json.loads, path.open())}
    assert listed == {7: "a number in it is not finite", 33: listed[7], 80: "torn"}
    with pytest.raises(MpidistError, match="the loss is n"):
        fit(comm, (x, Y), loading=Loading(finite=False), **settings)


def threads():
    return [t for t in threading.enumerate() if t.name == "mpidist-loader" and t.is_alive()]


@pytest.mark.ranks(1, 2)
def test_an_exception_ends_the_loader(comm):
    """Whatever ends the loop: no thread goes on reading."""

    def stop(step):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        fit(comm, Source(), loading=Loading(prefetch=True), callbacks=[stop])
    # One that is about to end is waited for a second at most.
    wait_until(lambda: not threads(), 20)


@pytest.mark.ranks(1, 2)
def test_a_source_that_is_gone_ends_the_run_with_a_checkpoint(comm, folder, monkeypatch):
    """R42: on all ranks here; none of the records is called bad."""
    monkeypatch.setattr(data.skip_bad, "WAIT", 0.001)

    class Away(Source):
        def take(self, indices):
            if self.asked.sum() > 30 / comm.size:
                raise OSError(5, "Input/output error")
            return super().take(indices)

    path = folder / "bad.jsonl"
    with pytest.raises(SourceError, match="nothing of made up can be read: OSError"):
        fit(comm, Away(), checkpoint=folder / "run", checkpoint_every=1000, quarantine=path)
    comm.Barrier()
    state = md.load(folder / "run")["run"]
    assert state["step"] >= 1
    assert state["bad"] == []
    assert not path.exists()
