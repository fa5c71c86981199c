"""Rows on parameter servers: lazy updates in every mode, rows in `push_pull`, who is asked."""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist.servers.replicas.elastic_servers import ElasticServerGroup
from mpidist.servers.wire import client_requests

ROWS, WIDTH = 400, 4
MODES = [md.BSP(), md.SSP(0), md.SSP(2), md.DSSP(1, 3), md.ASP(), md.BackupWorkers(0)]


def rows_of(worker, step):
    """Rows of one worker in a step, with some of them twice, and some of them of all workers."""
    rng = np.random.default_rng((worker, step))
    return np.concatenate([rng.integers(0, ROWS, 6), [step, step, 7]])


def run(comm, mode, optimizer, steps=6, **options):
    """Train; the pushes are whole numbers, so that sums do not depend on their order."""
    with md.ServerGroup(comm, servers=max(1, comm.size // 2)) as group:
        model = {"e": ((ROWS, WIDTH), "f8", "normal"), "b": ((3,), "f8")}
        client = group.add("m", model, optimizer=optimizer, consistency=mode, seed=4, **options)
        if client is None:
            return None
        me, workers = group.workers.rank, group.workers.size
        start = client.pull()["e"]
        group.barrier()  # without it, another worker may have pushed before this one pulls
        got = client.pull({"e": rows_of(me, 0)})
        for step in range(steps):
            rows = rows_of(me, step)
            values = np.repeat(np.arange(len(rows)), WIDTH).reshape(-1, WIDTH) + me
            assert got["e"].shape == values.shape
            what = {"e": rows_of(me, step + 1)}
            got = client.push_pull({"e": (rows, values), "b": np.ones(3)}, what=what)
        group.barrier()
        if not mode.holds:
            client.push({})
            client.clock()
            group.barrier()
        return start, client.pull(), workers, client.stats


def pushed(workers, step):
    """The sum over all workers of what they push in a step, as a whole table."""
    total = np.zeros((ROWS, WIDTH))
    for worker in range(workers):
        rows = rows_of(worker, step)
        np.add.at(total, rows, np.arange(len(rows))[:, None] + worker)
    return total


@pytest.mark.covering
@pytest.mark.ranks(2, 5)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_rows_in_every_mode(comm, mode):
    """R71: sums of all pushes, whoever is asked; equal rows of a push are added."""
    result = run(comm, mode, md.optim.sgd(1.0), rows={"e": "lazy"})
    if result is None:
        return
    start, end, workers, stats = result
    moved = sum(pushed(workers, step) for step in range(6)) / workers
    np.testing.assert_allclose(end["e"], start - moved, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(end["b"], -6.0)
    bound = mode.bound
    assert bound is None or max(stats["gaps"]) <= bound


@pytest.mark.covering
@pytest.mark.ranks(3, 5)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_dealt_rows_have_the_values_of_ranges(comm, placement):
    """R22: whole tensors and rows, pushed and pulled, are the same however they are divided."""
    found = {}
    for spread in ("ranges", "rows"):
        with md.ServerGroup(comm, servers=2, placement=placement) as group:
            client = group.add(
                "m", {"e": ((61, 3), "f8", "normal"), "b": ((9,), "f8")}, spread={"e": spread},
                optimizer=md.optim.momentum(0.5), seed=2,
            )  # fmt: skip
            if client is None:
                continue
            me, seen = group.workers.rank, []
            rows = np.array([60, 3, 0, 3, 31, me])
            seen.append(client.pull()["e"])
            seen.append(client.pull({"e": rows})["e"])
            seen.append(client.push_pull({"e": (rows, np.ones((6, 3)))}, what={"e": rows})["e"])
            whole = {"e": np.arange(183.0).reshape(61, 3), "b": np.ones(9)}
            out = {"e": np.zeros((61, 3), "f4", order="F")}
            seen.append(client.push_pull(whole, out=out)["e"].copy())
            seen.append(client.pull({"e": None, "b": None})["e"])
            found[spread] = seen
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.ranks(4)
def test_arrays_and_saved_pieces_of_dealt_rows(comm):
    """Initial arrays reach their rows; what two servers have saved restarts on three."""
    table = np.arange(80, dtype="f4").reshape(20, 4)
    saved: list = []

    def save(tag):
        pieces = group.shards("m") if group.is_server else None
        found = [{**one, "parameters": [(n, w, a.copy()) for n, w, a in one["parameters"]]}
                 for one in comm.allgather(pieces) if one]  # fmt: skip
        saved[:] = [{**found[0], "parameters": [p for one in found for p in one["parameters"]]}]

    for servers in (2, 3):
        with md.ServerGroup(comm, servers=servers) as group:
            start = table if servers == 2 else np.zeros_like(table)
            client = group.add("m", {"e": start}, optimizer=md.optim.sgd(1.0), spread="rows")
            if group.is_server and saved:
                group.load_shards("m", saved[0])
            if client is None:
                group.serve(on_pause=save)
                continue
            if servers == 2:
                np.testing.assert_array_equal(client.pull()["e"], table)
            client.push_pull({"e": ([7], np.ones((1, 4)))}, what={"e": [7]})
            group.pause("save")
            save("save")
            group.barrier()
            np.testing.assert_array_equal(client.pull({"e": [7, 8]})["e"][1], table[8])
            np.testing.assert_array_equal(client.pull({"e": [7]})["e"][0], table[7] - servers + 1)


@pytest.mark.ranks(3, further=(5,))
def test_lazy_adam_under_bsp_equals_a_reference(comm):
    """The reference is written out: only the rows that a clock pushes make a step."""
    result = run(comm, md.BSP(), md.optim.adam(0.01), rows="lazy")
    if result is None:
        return
    start, end, workers, _ = result
    p, m, v = start.copy(), np.zeros((ROWS, WIDTH)), np.zeros((ROWS, WIDTH))
    for step in range(6):
        g = pushed(workers, step) / workers
        rows = np.unique(np.concatenate([rows_of(worker, step) for worker in range(workers)]))
        m[rows] = 0.9 * m[rows] + 0.1 * g[rows]
        v[rows] = 0.999 * v[rows] + 0.001 * g[rows] ** 2
        t = step + 1
        root = np.sqrt(v[rows] / (1 - 0.999**t)) + 1e-8
        p[rows] -= 0.01 * m[rows] / (1 - 0.9**t) / root
    np.testing.assert_allclose(end["e"], p, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(4)
def test_only_servers_concerned_are_asked(comm):
    """A server without the rows gets one message per clock and answers none."""
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", {"e": ((1000, 8), "f4")}, optimizer=md.optim.adam(0.1), rows="lazy")
        if client is None:
            return
        here = client.layout.pieces[0][0].stop // 8
        low, high = {"e": np.array([1, here - 1])}, {"e": np.array([here, 999])}
        client.pull(low)
        group.barrier()
        counts = []
        for what in (low, high, high, {"e": np.array([0, 999])}):
            before = client.stats
            gradient = {"e": (what["e"], np.ones((2, 8), "f4"))}
            client.push_pull(gradient, what=what)
            after = client.stats
            counts.append([after[k] - before[k] for k in ("messages_sent", "messages_received")])
        # The late question after a long wait, on a machine with much other work, is one more.
        assert [sent for sent, _ in counts[:3]] in ([2, 2, 2], [2, 2, 3], [2, 3, 2], [3, 2, 2])
        assert min(counts[:3]) == [2, 1]
        assert counts[3] == [2, 2]


@pytest.mark.ranks(3, 4)
def test_a_server_that_is_never_concerned_is_asked_now_and_then(comm, monkeypatch):
    """So that the messages of a worker do not pile up there; the clocks of all stay equal."""
    monkeypatch.setattr(client_requests, "SILENT", 3)
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", {"e": ((1000, 8), "f4")}, optimizer=md.optim.sgd(1.0))
        if client is None:
            return
        what = {"e": np.array([1])}
        seen = []
        for _ in range(9):
            client.push_pull({"e": ([1], np.ones((1, 8)))}, what=what)
            seen.append(client.versions[1])
        assert client.versions[0] == 9
        assert len(set(seen)) >= 3
        assert seen[-1] >= 6
        client.pull()
        assert client.versions == [9, 9]


def cross(group):
    """Each worker waits at another server, for the other one in the other model."""
    size = {"e": ((100, 8), "f4")}
    models = [group.add(name, size, optimizer=md.optim.sgd(1.0)) for name in ("first", "second")]
    if group.is_worker:
        me = group.workers.rank
        row = [99 * me]
        for client in (models[me], models[1 - me]):
            client.push_pull({"e": (row, np.ones((1, 8)))}, what={"e": row})


@pytest.mark.ranks(4)
def test_workers_that_wait_for_each_other_at_two_servers_are_found(comm):
    """After a while each worker asks all servers, so that one of them sees who waits for whom."""
    begin = time.monotonic()
    with pytest.raises(md.ProtocolError) as error, md.ServerGroup(comm, servers=2) as group:
        cross(group)
    assert "workers wait for each other: rank" in str(error.value)
    assert time.monotonic() - begin < 60


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", [md.BSP(), md.ASP()], ids=str)
@pytest.mark.parametrize("optimizer", [md.optim.adam(0.01), md.optim.sgd(0.1)], ids=["adam", "sgd"])
def test_copies_of_row_updates_have_the_same_bits(comm, mode, optimizer):
    """Merged rows are forwarded as rows, to the copy on the next server."""
    with ElasticServerGroup(comm, servers=2) as group:
        group.vote(copies=True)
        client = group.add(
            "m", {"e": ((300, 4), "f4", "normal"), "b": ((40,), "f4")}, optimizer=optimizer,
            consistency=mode, rows={"e": "lazy"},
        )  # fmt: skip
        group.fill_copies("m")
        if client is not None:
            for step in range(5):
                rows = np.arange(3) * 90 + step + group.workers.rank
                gradient = {"e": (rows, np.ones((3, 4), "f4"))}
                if step % 2:
                    gradient["b"] = np.ones(40, "f4")
                client.push_pull(gradient, what={"e": rows})
    mine = group.hosted("m")
    shards = None
    if mine is not None:
        shards = [
            {key: array.tobytes() for key, array in shard.parameters.items()}
            for shard in (mine[1].shard, mine[1].copy)
        ]
    everyone = [found for found in comm.allgather(shards) if found is not None]
    assert everyone[0][0] == everyone[1][1]
    assert everyone[1][0] == everyone[0][1]


@pytest.mark.ranks(3)
def test_wrong_rows_are_refused_and_the_servers_live_on(comm):
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"e": ((10, 2), "f4")}, optimizer=md.optim.sgd(1.0), rows="lazy")
        if client is None:
            return
        one = {"e": ([1], np.ones((1, 2)))}
        if group.workers.rank == 0:
            for call, text in [
                (lambda: client.push_pull(one, what={"e": [10]}), "10 ... 10 are outside 0 ... 9"),
                (lambda: client.push_pull(one, what={"f": [1]}), "no parameter 'f'"),
                (lambda: client.push_pull({"e": ([-1], np.ones((1, 2)))}), "-1 ... -1 are outside"),
                (
                    lambda: client.push({"e": ([1], np.ones((2, 2)))}),
                    "gradient is float64 of shape",
                ),
                (lambda: client.push_pull(one, what={"e": [1]}, out={"e": np.ones(3)}), "out has"),
            ]:
                with pytest.raises(md.ConfigError, match=text) as error:
                    call()
                assert "\n" not in str(error.value)
        for _ in range(2):
            got = client.push_pull(one, what={"e": [1, 1]})["e"]
        np.testing.assert_array_equal(got, -2)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_with_other_policies(comm, odd):
    policy = "dense" if comm.rank == odd else "lazy"
    with md.ServerGroup(comm) as group:
        with pytest.raises(md.MismatchError, match="rows e"):
            group.add("m", {"e": ((9, 2), "f4")}, optimizer=md.optim.sgd(1.0), rows=policy)
        with pytest.raises(md.ConfigError, match="rows of 'e' is 'lasy'"):
            group.add(
                "m", {"e": ((9, 2), "f4")}, optimizer=md.optim.sgd(1.0),
                rows="lasy" if comm.rank == odd else "lazy",
            )  # fmt: skip
        client = group.add("m", {"e": ((9, 2), "f4")}, optimizer=md.optim.sgd(1.0), rows="lazy")
        if client is not None:
            client.push_pull({"e": ([2], np.ones((1, 2)))}, what={"e": [2]})
