"""Servers with shares, some of which work as well (R17, R122)."""

import numpy as np
import pytest
from test_train import close, fit, serial

import mpidist as md
from mpidist.errors import ConfigError, MismatchError

SHARES = {0: 1, 1: 1, 2: 0, 3: 6}
SGD = md.optim.sgd(1.0)


@pytest.mark.ranks(4)
def test_servers_that_work_beside_one_that_only_serves(comm):
    values = np.arange(800.0)
    # The order in which a rank writes the shares does not matter.
    given = dict(sorted(SHARES.items(), reverse=comm.rank == 1))
    with md.ServerGroup(comm, servers=given, placement=[3]) as group:
        assert (group.server_ranks, group.worker_ranks) == ([0, 1, 3], [0, 1, 2])
        assert (group.is_server, group.is_worker) == (comm.rank != 2, comm.rank != 3)
        client = group.add("m", {"w": values}, optimizer=SGD)
        if client is not None:
            for step in range(5):
                got = client.push_pull({"w": np.full(800, comm.rank)})["w"]
                assert np.array_equal(got, values - (step + 1))  # the mean of 0, 1, 2
    report = group.report()
    assert report["shares"] == [1 / 8, 1 / 8, 6 / 8]
    assert report["models"]["m"] == {"bytes": [800, 800, 4800], "imbalance": 1.0}
    assert repr(group) == (
        "<ServerGroup: 3 workers, servers 0 12.5%, 1 12.5%, 3 (only serves) 75.0%; "
        "'m' 800 B + 800 B + 4.688 KiB>"
    )


@pytest.mark.ranks(2, 4)
def test_auto(comm):
    """On one host, the host's ranks divide its share."""
    last = comm.size - 1
    for placement in ("colocated", [last]):
        with md.ServerGroup(comm, servers="auto", placement=placement) as group:
            assert group.server_ranks == list(range(comm.size))
            assert group.shares == [1 / comm.size] * comm.size
            client = group.add("m", {"w": np.zeros(100)}, optimizer=SGD)
            assert (client is None) == (placement == [last] and comm.rank == last)
            if client is not None:
                assert client.push_pull({"w": np.ones(100)})["w"].tolist() == [-1.0] * 100


@pytest.mark.ranks(4)
@pytest.mark.parametrize("consistency", [md.BSP(), md.ASP()])
def test_train(comm, folder, consistency):
    """BSP equals serial training; a checkpoint of it goes on with other shares."""
    first = md.ParameterServer(SHARES, consistency, placement=[3])
    second = md.ParameterServer("auto", consistency, placement=[0])
    _, half = fit(comm, strategy=first, checkpoint=folder, stop_after=11)
    assert (half.steps, half.workers) == (11, 3)
    parameters, result = fit(comm, strategy=second, checkpoint=folder)
    assert (result.resumed_at, result.finished) == (11, True)
    if consistency == md.BSP() and comm.rank:
        close(parameters, serial())


ODD = [
    ({0: 1, 9: 1}, [0], ConfigError, "expected distinct ranks in 0..2"),
    ({0: 0}, "colocated", ConfigError, "the shares sum to 0"),
    ({0: float("nan")}, "colocated", ConfigError, "share nan"),
    ({0: 1, 1: 3}, "colocated", MismatchError, "servers differs"),
    (2, "colocated", MismatchError, "servers differs"),
    ({0: 1, 1: 2}, [1], MismatchError, "placement differs"),
    ("auto", "colocated", MismatchError, "servers differs"),
]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("servers", "placement", "kind", "text"), ODD)
def test_one_rank_disagrees(comm, servers, placement, kind, text):
    """The same error on all ranks, and the next group works."""
    given = {"servers": {0: 1, 1: 2}, "placement": "colocated"}
    if comm.rank == 1:
        given = {"servers": servers, "placement": placement}
    with pytest.raises(kind, match=text) as caught:
        md.ServerGroup(comm, **given)
    said = comm.allgather(str(caught.value))
    assert said == [said[0]] * 3
    with md.parameter_server(comm, {"w": np.zeros(9)}, servers={2: 1}, optimizer=SGD) as client:
        if client is not None:
            client.push_pull({"w": np.ones(9)})
