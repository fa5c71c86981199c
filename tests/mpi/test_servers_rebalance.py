"""Shares follow the measured load of servers while they train (R22)."""

import time

import numpy as np
import pytest
from mpi4py import MPI
from test_train import fit

import mpidist as md
from mpidist import events
from mpidist.errors import ConfigError, MismatchError
from mpidist.servers.balance import change_shares
from mpidist.servers.replicas import elastic_shares
from mpidist.servers.replicas.elastic_servers import ElasticServerGroup
from mpidist.servers.shards import ServerShard

SLOW = 2  # the rank whose server is slow


class Slow:
    """Plain SGD; on one rank an element takes 100 us, on the others 20 us."""

    elementwise = True

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters):
        each = 100e-6 if MPI.COMM_WORLD.rank == SLOW else 20e-6
        time.sleep(each * sum(map(np.size, gradients.values())))
        for name, gradient in gradients.items():
            parameters[name] -= gradient


@pytest.mark.ranks(3)
def test_a_slow_server_gets_less_and_steps_get_shorter(comm):
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", {"w": np.zeros(1000)}, optimizer=Slow())
        if client is not None:
            times, steps = [], 5
            while len(times) < 8:
                each = []
                for _ in range(steps):
                    start = time.perf_counter()
                    w = client.push_pull({"w": np.ones(1000)})["w"]
                    each.append(time.perf_counter() - start)
                times.append(min(each))  # the machine may be loaded
                if (found := group.rebalance(md.Rebalance(step=1, gain=0.15))) is None:
                    break
                assert found == pytest.approx(group.shares)
            assert len(times) > 1
            assert len(times) == 8 or group.rebalance() is None  # nothing was measured since
            assert w.tolist() == [-float(steps * len(times))] * 1000
            # 50 ms become 17 ms, if one element takes 100 us on one server and 20 us on the other.
            assert min(times[1:]) < 0.75 * times[0]
            load = group.load()
            assert [one["rank"] for one in load] == [1, 2]
            assert [one["pushes"] for one in load] == [steps * len(times)] * 2
            assert load[0]["bytes_in"] > load[1]["bytes_in"] > 0
            assert load[0]["share"] == group.shares[0] > 0.6
    served = [one["server"]["load"] for one in group.report()["ranks"] if one["server"]]
    assert [one["pushes"] for one in served] == [served[0]["pulls"]] * 2
    assert all(one["busy_seconds"] > 0.05 for one in served)


@pytest.mark.ranks(3)
def test_what_is_counted(comm):
    """Bytes of pieces and of whole messages, and named rows."""
    shape = (4000, 100)
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", {"w": np.zeros(shape, "f4")}, optimizer=md.optim.sgd(1.0))
        if client is not None:
            client.push_pull({"w": np.ones(shape)}, out={"w": np.empty(shape, "f4")})
            before = group.load()
            assert all(8e5 < one["bytes_in"] < 8.1e5 for one in before)
            assert all(8e5 < one["bytes_out"] < 8.1e5 for one in before)
            assert [one["rows"] for one in before] == [0, 0]
            rows = np.array([1, 3, 3999])
            client.push_pull({"w": (rows[:2], np.ones((2, 100)))}, what={"w": rows})
            after = group.load()
            assert [one["rows"] for one in after] == [4, 1]
            headers, words = 128, 8 * (2 + 2 + 2 + 2)
            assert after[0]["bytes_in"] - before[0]["bytes_in"] == headers + words + 2 * 400
            assert after[0]["bytes_out"] - before[0]["bytes_out"] == headers + 2 * 400
            assert after[1]["bytes_out"] - before[1]["bytes_out"] == headers + 400


@pytest.mark.ranks(3)
def test_another_policy_on_one_rank(comm):
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"w": np.zeros(9)}, optimizer=md.optim.sgd(1.0))
        if client is not None:
            for wrong, kind, text in [
                ({"gain": 0.5}, MismatchError, "rebalance: policy differs"),
                ("never", ConfigError, "rebalance='never'; expected 'auto'"),
            ]:
                with pytest.raises(kind, match=text):
                    group.rebalance(wrong if comm.rank else None)
                client.push_pull({"w": np.ones(9)})


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "given",
    [
        {"servers": {1: 1, 2: 5}, "placement": [2]},
        {"servers": {0: 3, 1: 1, 2: 2}, "placement": "colocated"},
    ],
    ids=str,
)
def test_train_has_the_same_bits(comm, folder, given, monkeypatch):
    """`md.train` whose shares change every 3 steps, with a checkpoint on the way."""
    looks = []
    monkeypatch.setattr(
        md.Rebalance, "follow", lambda self, shares, since: looks.append(0) or [*shares[::-1]]
    )
    expected, _ = fit(comm, strategy=md.ParameterServer(**given))
    strategy = md.ParameterServer(**given, rebalance=3)
    _, half = fit(comm, strategy=strategy, checkpoint=folder, stop_after=11)
    assert half.steps == 11
    parameters, result = fit(comm, strategy=strategy, checkpoint=folder)
    assert (result.resumed_at, result.finished) == (11, True)
    if comm.rank == 0:
        assert len(looks) == 3 + 12 // 3  # clocks count from the resume on
    if comm.rank != given["placement"][-1]:
        for name, values in expected.items():
            assert values.tobytes() == parameters[name].tobytes()


@pytest.mark.ranks(4)
def test_a_server_without_memory_for_new_parts(comm, monkeypatch):
    """In an elastic run all workers raise, and what each rank has stays; later there is memory."""
    lacks = [MemoryError()] if comm.rank == 3 else []

    def make(*given):
        if lacks:
            raise lacks.pop()
        return ServerShard(*given)

    ones = {"w": np.ones(100)}
    with ElasticServerGroup(comm, servers=2) as group:
        group.vote(True)
        client = group.add("m", {"w": np.zeros(100)}, optimizer=md.optim.momentum(1.0, 0.5))
        group.fill_copies("m")
        monkeypatch.setattr(elastic_shares, "ServerShard", make)
        if client is not None:
            client.push_pull(ones)
            with pytest.raises(ConfigError, match="no memory for the new parts beside the present"):
                group.repartition(weights=[3, 1])
            assert (group.shares, group.moved, group.prepared) == ([0.5, 0.5], 0, None)
            assert client.push_pull(ones)["w"].tolist() == [-2.5] * 100
            group.repartition(weights=[3, 1])
            assert (group.shares, group.moved, group.prepared) == ([0.75, 0.25], 1, None)
            assert client.push_pull(ones)["w"].tolist() == [-4.25] * 100
    if group.is_server:
        _, hosted = group.hosted("m")
        sizes = [one.export()["parameters"][0][2].size for one in (hosted.shard, hosted.copy)]
        assert sizes == ([75, 25] if comm.rank == 2 else [25, 75])


@pytest.mark.ranks(3)
def test_training_goes_on_if_a_rebalance_is_refused(comm, monkeypatch, capsys):
    """With the same bits, one line and one event, and without further looks."""
    looks, told = [], []
    monkeypatch.setattr(
        md.Rebalance, "follow", lambda self, shares, since: looks.append(0) or [*shares[::-1]]
    )
    monkeypatch.setattr(change_shares, "available_memory", lambda: 100)
    monkeypatch.setattr(
        events, "emit", lambda kind, **facts: kind == "rebalance_refused" and told.append(facts)
    )
    given = {"servers": {1: 1, 2: 5}, "placement": [2]}
    expected, _ = fit(comm, strategy=md.ParameterServer(**given))
    parameters, result = fit(comm, strategy=md.ParameterServer(**given, rebalance=3))
    assert result.finished
    said = comm.gather(capsys.readouterr().err.count("; the servers keep their shares"))
    if comm.rank == 0:
        assert (len(looks), sum(said)) == (1, 1)
    if comm.rank != 2:
        assert [facts["step"] for facts in told] == [3]
        assert "model 'model' does not fit" in told[0]["reason"]
        for name, values in expected.items():
            assert values.tobytes() == parameters[name].tobytes()


class Wrong(md.Rebalance):
    def follow(self, shares, since):
        raise ZeroDivisionError("no time at all")


@pytest.mark.ranks(3)
def test_a_policy_that_raises(comm):
    """On rank 0, here a server that only serves: all ranks raise, and the group goes on."""
    with md.ServerGroup(comm, servers=[0]) as group:
        client = group.add("m", {"w": np.zeros(9)}, optimizer=md.optim.sgd(1.0))
        if client is not None:
            with pytest.raises(md.MpidistError, match=r"rank 0 of 3 .* no time at all"):
                group.rebalance(Wrong())
            assert client.push_pull({"w": np.ones(9)})["w"].tolist() == [-1.0] * 9


def rebalance_uncaught(comm):
    with md.ServerGroup(comm, servers=[0]) as group:
        if group.add("m", {"w": np.zeros(9)}, optimizer=md.optim.sgd(1.0)) is not None:
            group.rebalance(Wrong())


@pytest.mark.ranks(3)
def test_a_policy_that_raises_and_that_nobody_catches(comm):
    """Then the group ends, on the servers as well."""
    group = comm.Dup()  # nothing else is possible on a communicator that has failed
    with pytest.raises(md.MpidistError, match="no time at all"):
        rebalance_uncaught(group)
