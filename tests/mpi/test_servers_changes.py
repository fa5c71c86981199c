"""A model's mode and optimizer change during training, in one clock for all (R69, R72)."""

import time

import numpy as np
import pytest
from test_train import fit

import mpidist as md
from mpidist.errors import ConfigError, ProtocolError

SGD = md.optim.sgd(1.0)
ORDER = [md.SSP(2), md.BSP(), md.ASP(), md.SSP(0), md.DSSP(1, 3), md.BSP(), md.SSP(1)]
ROLES = [{"servers": 1}, {"servers": 2}, {"servers": 2, "placement": "colocated"}]


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("roles", ROLES, ids=str)
@pytest.mark.parametrize("size", [9, 40_000])
def test_modes_follow_each_other(comm, roles, size):
    """No push is lost; the gap of each clock is in the bound of its mode; under BSP all are equal.

    The larger model travels in pieces under BSP.
    """
    with md.parameter_server(comm, {"w": np.zeros(size)}, optimizer=SGD, **roles) as client:
        if client is not None:
            workers, ones = client.group.workers.size, {"w": np.ones(size)}
            modes = {}
            for clock in range(3 * len(ORDER)):
                if clock % 3 == 1:
                    client.consistency = ORDER[clock // 3]
                    assert client.consistency == ORDER[clock // 3]
                modes[clock + 1] = client.consistency
                if clock % 5 == client.group.workers.rank:
                    time.sleep(0.002)
                gaps = dict(client.gaps)
                if clock % 4:
                    out = client.push_pull(ones)
                else:
                    client.push(ones)
                    client.clock()
                    out = client.pull()
                gap = next(g for g, n in client.gaps.items() if n != gaps.get(g, 0))
                if (bound := modes[clock + 1].bound) is not None:
                    assert gap <= bound
                low, high = out["w"].min(), out["w"].max()
                assert -low < clock + 1 + 3
                if isinstance(modes[clock + 1], md.BSP):  # all pushes of all clocks, no others
                    assert np.allclose([low, high], -(clock + 1))
            client.group.barrier()
            assert np.allclose(client.pull()["w"], -3.0 * len(ORDER))
            assert workers == comm.size - (0 if "placement" in roles else roles["servers"])
            assert client.finished == 3 * len(ORDER)


def refused(comm, text, work, **settings):
    """All ranks get an error with this text, within seconds."""
    own = comm.Dup()
    start = time.monotonic()

    def train():
        with md.parameter_server(own, {"w": np.zeros(9)}, optimizer=SGD, **settings) as client:
            if client is not None:
                work(client)
                for _ in range(4):
                    client.push_pull({"w": np.ones(9)})
                client.group.barrier()

    with pytest.raises(ProtocolError, match=text):
        train()
    assert time.monotonic() - start < 8
    md.free(own)
    own.Free()


@pytest.mark.ranks(3, further=(4,))
def test_workers_that_disagree(comm):
    """On each mode: one sets nothing, or another mode, or sets it later."""
    for placement in ("dedicated", "colocated"):
        for mode in (md.ASP(), md.BSP()):
            given = {"consistency": mode, "placement": placement}

            def alone(client):
                if client.group.workers.rank:
                    client.consistency = md.SSP(2)

            refused(
                comm, r"rank 0 has finished this clock without the change to cons", alone, **given
            )

            def later(client):
                if client.group.workers.rank:
                    client.push_pull({"w": np.ones(9)})
                client.consistency = md.SSP(2)

            refused(comm, r"without the change to consistency SSP\(staleness=2\)", later, **given)

            def another(client):
                client.consistency = md.SSP(2 + client.group.workers.rank)

            refused(comm, r"asks for consistency SSP\(staleness=[2345]\), rank", another, **given)

            def rates(client):
                client.set_optimizer(md.optim.sgd(1.0 + client.group.workers.rank))

            refused(
                comm, r"asks for optimizer sgd\(lr=.*rank . for optimizer sgd\(", rates, **given
            )


@pytest.mark.ranks(2)
def test_what_a_worker_may_not_set(comm):
    """Refused before anything is sent, so training goes on."""
    stale = {"stale": md.DropStale(5), "consistency": md.ASP()}
    for settings in ({}, stale, {"consistency": md.BackupWorkers(0)}):
        with md.parameter_server(comm, {"w": np.zeros(9)}, optimizer=SGD, **settings) as client:
            if client is None:
                continue
            first = client.consistency
            client.consistency = first
            for wrong in (3, "bsp", md.BSP, None, md.BackupWorkers(0)):
                if wrong != first:
                    with pytest.raises(ConfigError):
                        client.consistency = wrong
            if settings:
                with pytest.raises(ConfigError, match=r"needs consistency ASP|may change between"):
                    client.consistency = md.BSP()
            else:
                client.consistency = md.SSP(1)
                with pytest.raises(ProtocolError, match="already set in clock 0; set it once"):
                    client.consistency = md.ASP()
                first = md.SSP(1)
            assert client.consistency == first
            for wrong, text in (
                (3, "has no init and update"),
                (md.optim.clipped(SGD, 1.0), r"sgd clips gradients itself \(clip_norm=1.0\)"),
                (md.optim.sgd(lambda step: 0.1), "this optimizer cannot be sent to the servers"),
            ):
                with pytest.raises(ConfigError, match=text):
                    client.set_optimizer(wrong)
            assert client.push_pull({"w": np.ones(9)})["w"].tolist() == [-1.0] * 9


@pytest.mark.covering
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("roles", ROLES, ids=str)
@pytest.mark.parametrize("size", [9, 40_000])
def test_the_optimizer_changes(comm, roles, size):
    """The weights are those of serial training with the same changes, up to rounding."""
    changes = {
        2: md.optim.momentum(0.5, 0.5),
        4: md.optim.momentum(0.25, 0.5),  # goes on with the velocity
        6: md.optim.adam(0.1),
        8: md.optim.sgd(md.optim.cosine(0.5, 9)),
    }
    start = {"w": np.linspace(-1, 1, size)}
    optimizer, weights = SGD, {"w": start["w"].copy()}
    state, expected = SGD.init(weights), []
    for clock in range(10):
        if clock in changes:
            if changes[clock].name != optimizer.name:
                state = changes[clock].init(weights)
            optimizer = changes[clock]
        optimizer.update({"w": weights["w"] + 1}, state, weights)
        expected.append(weights["w"].copy())
    with md.parameter_server(comm, start, optimizer=SGD, **roles) as client:
        if client is not None:
            values = client.pull()
            for clock in range(10):
                if clock in changes:
                    client.set_optimizer(changes[clock])
                values = client.push_pull({"w": values["w"] + 1}, samples=1)
                assert np.allclose(values["w"], expected[clock], rtol=1e-12, atol=1e-12)


class Table:
    """An optimizer that no name makes: rates from an array, and the number of its updates."""

    elementwise = True

    def __init__(self, *rates):
        self.rates = np.array(rates)

    def init(self, parameters):
        return {"updates": np.zeros(())}

    def update(self, gradients, state, parameters):
        rate = self.rates[int(state["updates"]) % len(self.rates)]
        state["updates"] += 1
        for name, gradient in gradients.items():
            parameters[name] -= rate * gradient


class Local(Table):
    """Only the workers can make it again."""

    def __reduce__(self):
        return (make_on_worker, ())


def make_on_worker():
    if not on_worker:
        raise ValueError("no such class here")
    return Local(1.0)


on_worker = []


@pytest.mark.ranks(3)
@pytest.mark.parametrize("roles", ROLES, ids=str)
def test_an_optimizer_that_has_no_name(comm, roles):
    """An object, and then one of md.optim again; the state of the same kind stays."""
    on_worker.clear()
    with md.parameter_server(comm, {"w": np.zeros(40)}, optimizer=SGD, **roles) as client:
        if client is not None:
            given = {1: Table(2.0, 3.0), 3: Table(10.0, 20.0, 30.0), 4: md.optim.sgd(7.0)}
            seen = []
            for clock in range(5):
                if clock in given:
                    client.set_optimizer(given[clock])
                seen.append(client.push_pull({"w": np.ones(40)})["w"][3])
            assert seen == [-1.0, -3.0, -6.0, -36.0, -43.0]


@pytest.mark.ranks(3)
def test_optimizers_that_have_no_name_differ(comm):
    def differs(client):
        client.set_optimizer(Table(1.0, 2.0 + client.group.workers.rank))

    text = r"rank . asks for optimizer Table, rank . for optimizer Table; all workers"
    for roles in ({"servers": 1}, {"servers": 2, "placement": "colocated"}):
        refused(comm, text, differs, **roles)

    def only_here(client):
        on_worker.append(1)
        client.set_optimizer(Local(1.0))
        client.push_pull({"w": np.ones(9)})

    on_worker.clear()
    refused(comm, "a server cannot make Local: no such class here", only_here, servers=1)


@pytest.mark.ranks(3)
def test_the_optimizer_changes_without_a_worker_that_left(comm):
    """And under ASP from the last call on."""
    with md.parameter_server(
        comm, {"w": np.zeros(3)}, optimizer=SGD, consistency=md.ASP(), global_batch=1
    ) as client:
        if client is not None and client.group.workers.rank == 0:
            client.set_optimizer(md.optim.sgd(0.5))
            end = time.monotonic() + 5
            while client.pull()["w"][0] % 1 == 0 and time.monotonic() < end:
                client.push_pull({"w": np.ones(3)}, samples=1)
            assert client.pull()["w"][0] % 1 == 0.5


@pytest.mark.ranks(3)
def test_modes_of_a_training_run(comm, folder):
    """A policy is asked for each step, also after a resume; a mapping works as well."""
    asked = []

    def policy(step):
        asked.append(step)
        return {3: md.BSP(), 6: md.SSP(1)}.get(step)

    strategy = md.ParameterServer(1, md.ASP(), changes=policy)
    fit(comm, strategy=strategy, epochs=None, steps=4, checkpoint=folder)
    assert asked == ([] if comm.rank == 2 else [2, 3, 4, 5])
    asked.clear()
    _, found = fit(comm, strategy=strategy, epochs=None, steps=8, checkpoint=folder)
    assert found.resumed_at == 4
    assert asked == ([] if comm.rank == 2 else [6, 7, 8, 9])
    steps = md.ParameterServer(1, md.BSP(), changes={3: md.SSP(1), 5: md.BSP()})
    assert np.isfinite(fit(comm, strategy=steps, epochs=None, steps=8)[1].train_loss)


@pytest.mark.ranks(3)
def test_a_new_server_knows_the_changes(comm):
    """Servers change after mode and optimizer, and while one worker is still to make a change."""
    with md.ServerGroup(comm, servers=[1], placement="colocated") as group:
        client = group.add("m", {"w": np.zeros(300)}, optimizer=SGD, consistency=md.SSP(2))
        momentum, ahead = md.optim.momentum(0.5, 0.5), comm.rank != 1
        for clock in range(3):
            if clock == 1:
                client.set_optimizer(momentum)
            if clock == 2 and ahead:
                client.consistency = md.BSP()
            if clock < 2:
                client.push_pull({"w": np.ones(300)})
        group.repartition(servers={0: 1, 1: 1, 2: 1})
        if not ahead:
            client.consistency = md.BSP()
        client.push_pull({"w": np.ones(300)})
        assert group.hosted("m")[1].gate.mode_at(3) == md.BSP()
        assert group.hosted("m")[1].shard.optimizer.name == "momentum"
        for _ in range(2):
            values = client.push_pull({"w": np.ones(300)})["w"]
            assert values.min() == values.max()
