"""Messages of parameter servers: rows, cut messages, several models, whole updates, counts."""

import enum
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mpidist as md
from mpidist.servers import protocol, server

SGD = md.optim.sgd(1.0)


@pytest.mark.covering
@pytest.mark.ranks(2, 4, 7)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_rows_and_names(comm, placement):
    """R6: pulls and pushes of names and rows reach the owners; order and repetition are kept."""
    shape = (1000, 4)
    table = np.arange(4000, dtype="f4").reshape(shape)
    model = {"table": table, "w": np.ones((3, 9)), "few": np.arange(5000.0).reshape(2, 2500)}
    with md.ServerGroup(comm, servers=max(1, comm.size // 2), placement=placement) as group:
        client = group.add("m", model, optimizer=SGD)
        if client is None:
            return
        me, workers = group.workers.rank, group.workers.size
        rows = np.array([999, 3, 3, 500, 0, 250])
        got = client.pull({"table": rows, "few": [1, 0, 1], "w": None})
        np.testing.assert_array_equal(got["table"], table[rows])
        np.testing.assert_array_equal(got["few"], model["few"][[1, 0, 1]])
        np.testing.assert_array_equal(got["w"], model["w"])
        out = {"table": np.zeros((6, 4), "f4", order="F")}
        assert client.pull({"table": rows}, out=out)["table"] is out["table"]
        np.testing.assert_array_equal(out["table"], table[rows])
        assert client.pull("w").keys() == {"w"}
        assert client.pull({"table": []})["table"].shape == (0, 4)
        # Rows pushed twice in one push are added twice; what is not named stays.
        where, value = np.array([me, 700, 700]), np.full((3, 4), -1.0, "f4")
        client.push({"table": (where, value), "few": ([1], np.full((1, 2500), -2.0))})
        client.clock()
        got = client.pull()
        expected = table.copy()
        expected[700] += 2
        expected[:workers] += 1 / workers
        np.testing.assert_allclose(got["table"], expected, rtol=1e-6)
        np.testing.assert_array_equal(got["w"], 1)
        np.testing.assert_array_equal(got["few"][0], model["few"][0])
        np.testing.assert_array_equal(got["few"][1], model["few"][1] + 2)


@pytest.mark.covering
@pytest.mark.ranks(3, 5)
@pytest.mark.parametrize("limit", [128, 200, 1000])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_messages_are_cut(comm, monkeypatch, limit, placement):
    """Messages above the limit travel in pieces: both ways, pushes, pulls and initial values."""
    monkeypatch.setattr(protocol, "MESSAGE_BYTES", limit)
    rng = np.random.default_rng(3)
    params = {"a": rng.standard_normal(777), "b": rng.standard_normal((20, 30)).astype("f4")}
    start = {name: value.copy() for name, value in params.items()}
    with md.parameter_server(comm, params, servers=2, optimizer=SGD, placement=placement) as client:
        if client is not None:
            for _ in range(3):
                grads = {name: np.ones_like(value) for name, value in params.items()}
                client.push_pull(grads, out=params)
            for name in start:
                np.testing.assert_allclose(params[name], start[name] - 3, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(6)
def test_a_pull_sees_whole_updates_only(comm):
    """R20, R7: under ASP each shard comes back as it was between two updates, with its version."""
    size = 20_000
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add(
            "m", {"x": ((size,), "f8")}, consistency=md.ASP(), optimizer=SGD, global_batch=1
        )
        if client is not None:
            seen = [0, 0]
            for _ in range(20):
                x = client.push_pull({"x": np.full(size, -1.0)}, samples=1)["x"]
                for server, piece in enumerate(p[0] for p in client.layout.pieces):
                    values = set(x[piece.start : piece.stop])
                    assert values == {float(client.versions[server])}
                assert all(new > old for new, old in zip(client.versions, seen, strict=True))
                seen = list(client.versions)


@pytest.mark.ranks(4, further=(6,))
def test_models_have_their_own_clocks(comm):
    """R72: two models at once, with their own modes, optimizers, clocks and names."""
    with md.ServerGroup(comm, servers=2) as group:
        slow = group.add("slow", {"x": np.zeros(9)}, optimizer=SGD)
        fast = group.add(
            "fast", {"x": np.ones((4, 4), "f4")}, optimizer=md.optim.adam(0.5), consistency=md.ASP()
        )
        if slow is None:
            return
        for clock in range(6):
            fast.push_pull({"x": np.full((4, 4), 0.5, "f4")})
            if clock % 3 == 0:
                slow.push({"x": np.full(9, -1.0)}, samples=2)
                slow.clock()
        np.testing.assert_allclose(slow.pull()["x"], 2.0)
        assert slow.versions == [2, 2]
        assert (slow.finished, fast.finished) == (2, 6)
        fast.close()
        with pytest.raises(md.ProtocolError, match="client 'fast' is closed"):
            fast.pull()
        group.barrier()
        slow.pull()


@pytest.mark.ranks(4)
def test_one_message_per_server(comm):
    """R6, R19: a push is one message per server, a fused push-pull one each way."""
    params = {f"w{i}": np.zeros((30, 10), "f4") for i in range(12)}
    with md.parameter_server(comm, params, servers=2, optimizer=SGD) as client:
        if client is not None:

            def counted(call):
                client.group.barrier()
                before = client.stats
                call()
                after = client.stats
                return [after[k] - before[k] for k in ("messages_sent", "messages_received")]

            size = sum(w.nbytes for w in params.values())
            assert counted(lambda: client.pull(out=params)) == [2, 2]
            assert counted(lambda: client.push(params)) == [2, 0]
            assert counted(client.clock) == [2, 0]
            assert counted(lambda: client.pull(out=params)) == [2, 2]
            start = client.stats["bytes_sent"], client.stats["bytes_received"]
            assert counted(lambda: client.push_pull(params, out=params)) == [2, 2]
            header = protocol.HEADER_BYTES
            # With one for the barrier in `counted`.
            assert client.stats["bytes_sent"] - start[0] == size + 3 * header
            assert client.stats["bytes_received"] - start[1] == size + 2 * header
            # One server alone has it; the other is not asked.
            assert counted(lambda: client.pull("w0")) == [1, 1]


@pytest.mark.ranks(2, 3, further=(6,))
def test_initial_values_do_not_depend_on_the_servers(comm):
    """R5: no rank holds the model; values follow from name, seed and position."""
    spec = {
        "e": ((3000, 50), "f4", "normal"),
        "u": ((200_000,), "f8", ("uniform", 0.5)),
        "c": ((3,), "f2", 2.5),
        "z": ((), "f4"),
    }
    seen = []
    for servers in range(1, comm.size):
        with md.ServerGroup(comm, servers=servers) as group:
            client = group.add("m", spec, optimizer=SGD, seed=4)
            values = client.pull() if client else None
        values = comm.bcast(values, 0)
        seen.append({name: value.tobytes() for name, value in values.items()})
        assert 0.049 < values["e"].std() < 0.051
        assert abs(values["u"].mean()) < 0.01
        assert 0.49 < values["u"].max() <= 0.5
        assert values["c"].tolist() == [2.5] * 3
        assert values["z"] == 0
    assert all(other == seen[0] for other in seen)


@pytest.mark.ranks(3)
def test_half_precision_is_rounded_once(comm):
    """Gradients of float16 add up in float32: 2048 + 1 + 1 is 2050, not 2048."""
    with md.parameter_server(comm, {"x": np.zeros(3, "f2")}, optimizer=SGD) as client:
        if client is not None:
            me = client.group.workers.rank
            g = np.array([2048 if me == 0 else 4, 1, 0], "f2")
            client.push({"x": g}, samples=1)
            client.clock()
            assert client.pull()["x"].tolist() == [-1026, -1, 0]


@pytest.mark.ranks(3, further=(9,))
def test_statistics_after_the_end(comm):
    """R18, R22, R39: queue lengths, imbalance and waits of all ranks are in the report."""
    params = {"w": np.zeros((64, 64))}
    with md.parameter_server(comm, params, servers=2, optimizer=SGD) as client:
        group = client.group if client else None
        if client is not None:
            for _ in range(5):
                client.push_pull(params, samples=1)
            assert client.stats["queue"]
    reports = [r for r in comm.allgather(group and group.report()) if r]
    for report in reports:
        assert report["models"]["model"]["imbalance"] <= 1.1
        assert sum(report["models"]["model"]["bytes"]) == params["w"].nbytes
        assert len(report["ranks"]) == comm.size
        servers = [r for r in report["ranks"] if r["server"]]
        assert [r["rank"] for r in servers] == report["servers"]
        for rank in servers:
            assert max(rank["server"]["queue"]) <= comm.size - 2
            assert rank["waits"]["worker"] >= 0
            assert rank["server"]["models"]["model"]["staleness"] == {0: 5 * (comm.size - 2)}
        for rank in report["ranks"]:
            for client in rank["clients"].values():
                assert client["waits"].keys() == {"server", "worker"}


class Flood:
    """A link on which every worker always has a message; each takes some looks to arrive."""

    def __init__(self, looks):
        self.comm = self.pool = self.trail = self
        self.looks = looks
        self.give = self.received = lambda _: None
        self.reap, self.bytes_in_flight, self.tag = lambda: True, 0, 0
        self.moved = False

    def Iprobe(self, source, tag, status=None):
        if status is not None:
            status.Set_elements(MPI.BYTE, 1000)
        return True

    def receive(self, source, tag, nbytes):
        left = iter(range(self.looks()))
        return SimpleNamespace(
            test=lambda: next(left, None) is None,
            header=protocol.Header(protocol.PULL),
            buffer=np.zeros(nbytes, np.uint8),
        )


@pytest.mark.ranks(1)
@pytest.mark.parametrize("room", [1, 2500, 10**6])
def test_no_worker_starves(comm, monkeypatch, room):
    """R18: workers that flood one server are served in turn, however little room there is."""
    monkeypatch.setattr(server, "ROOM_BYTES", room)
    rng = np.random.default_rng(1)
    for looks in (lambda: 0, lambda: int(rng.integers(4))):
        ours = server.Server(Flood(looks), 0, range(7), [7])
        served = [0] * 7

        def count(worker, *rest, served=served):
            served[worker] += 1

        monkeypatch.setattr(ours, "_handle", count)
        for _ in range(700):
            ours.poll()
        assert sum(served) >= 150
        assert max(served) - min(served) <= (1 if room == 1 else sum(served) / 20)


@pytest.mark.ranks(6)
@pytest.mark.parametrize("mode", [md.BSP(), md.SSP(1), md.ASP()], ids=str)
def test_little_room(comm, monkeypatch, mode):
    """R12, R18: with room for one message at a time all are served in turn, none is lost."""
    monkeypatch.setattr(server, "ROOM_BYTES", 1)
    size, steps, most = 3000, 8, 0
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"x": ((size,), "f8")}, consistency=mode, optimizer=SGD)
        if client is None:
            ours = group._server
            poll = ours.poll

            def watched():
                nonlocal most
                acted = poll()
                most = max(most, len(ours._arriving))
                return acted

            monkeypatch.setattr(ours, "poll", watched)
            group.serve()
            assert most <= 1
            ((_, _, x),) = group.shards("m")["parameters"]
            np.testing.assert_allclose(x, steps, rtol=1e-12)
        else:
            for _ in range(steps):
                client.push_pull({"x": np.full(size, -1.0)})


@pytest.mark.ranks(3)
def test_arrays_of_any_kind(comm, xp):
    """R122: host or device, Fortran order, strides, other dtypes, when names and shapes fit."""
    start = {"w": np.arange(60, dtype="f4").reshape(12, 5), "b": np.zeros(4, "f8")}
    params = {name: xp.asarray(value) for name, value in start.items()}
    with md.parameter_server(comm, params, optimizer=SGD) as client:
        if client is not None:
            gradient = xp.asarray(np.full((5, 12), 2.0)).T
            strided = xp.zeros(8)[::2]
            client.push({"w": gradient, "b": strided + 1})
            client.clock()
            out = {"w": xp.zeros((12, 5), "f8", order="F"), "b": strided}
            client.pull(out=out)
            np.testing.assert_array_equal(np.asarray(out["w"].tolist()), start["w"] - 2)
            assert strided.tolist() == [-1] * 4
            got = client.pull({"w": [11, 0]}, out={"w": xp.zeros((2, 5), "f4")})["w"]
            np.testing.assert_array_equal(np.asarray(got.tolist()), start["w"][[11, 0]] - 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("turned", [0, 1])
def test_strides_that_are_set_between_two_calls(comm, turned):
    """The transpose of an array counts, although a small push_pull remembers its memory."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"w": np.zeros((2, 2))}, optimizer=SGD)
        if client is not None:
            arrays = np.arange(4.0).reshape(2, 2), np.zeros((2, 2))
            for steps in (1, 2, 3):
                client.push_pull({"w": arrays[0]}, out={"w": arrays[1]})
                assert (arrays[1] == -steps * arrays[0]).all()
            assert client._bound is not None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2.4
                arrays[turned].strides = arrays[turned].strides[::-1]
            expected = -3 * np.arange(4.0).reshape(2, 2) - arrays[0]
            client.push_pull({"w": arrays[0]}, out={"w": arrays[1]})
            assert arrays[1].tolist() == expected.tolist()


class Name(str, enum.Enum):  # noqa: UP042 - as a program may have it
    ONE = "one"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["queue", "gaps", "staleness", "7", np.str_("mlp"), Name.ONE])
def test_a_model_may_have_the_name_of_a_histogram(comm, name):
    """The report has whole numbers as keys of histograms, and the names of models as they are."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(name, {"x": np.zeros(3)}, optimizer=SGD)
        if client is not None:
            client.push_pull({"x": np.ones(3)})
    for rank in group.report()["ranks"]:
        models = rank["clients"] or rank["server"]["models"]
        assert models[str.__str__(name)]["gaps"] == {0: 1}
