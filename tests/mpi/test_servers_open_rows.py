"""Open tables on servers: every mode and placement against a dict, stores, drops, errors."""

import numpy as np
import pytest

import mpidist as md
from mpidist.servers.replicas.elastic_servers import ElasticServerGroup

WIDTH = 4
MODES = [md.BSP(), md.SSP(2), md.DSSP(1, 3), md.ASP(), md.BackupWorkers(0)]
RARE = np.array([0, -1, 2**62, -(2**63), 2**63 - 1])


def keys_of(worker, step):
    """Keys of one worker in a step: some twice, some of all workers, some of all 64 bits."""
    rng = np.random.default_rng((worker, step))
    return np.concatenate([rng.integers(0, 50, 6) * 10**15, [step, step], RARE[step % 5 :]])


def model(first="normal"):
    return {"e": ((None, WIDTH), "f8", first), "b": ((3,), "f8")}


def expected(workers, steps):
    """The sum of all gradients of each key, and how many pushes have named it."""
    total, times = {}, {}
    for step in range(steps):
        for worker in range(workers):
            keys = keys_of(worker, step).tolist()
            for place, key in enumerate(keys):
                total[key] = total.get(key, 0) + place + worker
            for key in set(keys):
                times[key] = times.get(key, 0) + 1
    return total, times


@pytest.mark.covering
@pytest.mark.ranks(2, 5)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_sums_of_all_pushes_in_every_mode(comm, mode, placement):
    """Pushes of int64 and uint64 keys, whoever has them; equal keys of a push are added."""
    servers, steps = max(1, comm.size // 2), 6
    with md.ServerGroup(comm, servers=servers, placement=placement) as group:
        client = group.add(
            "m", model(), optimizer=md.optim.sgd(1.0), consistency=mode, seed=4, rows={"e": "open"}
        )
        if client is not None:
            me, workers = group.workers.rank, group.workers.size
            total, _ = expected(workers, steps)
            every = np.array(list(total))
            start = client.pull({"e": every})["e"]
            assert abs(start.std() - 0.05) < 0.02
            group.barrier()
            for step in range(steps):
                keys = keys_of(me, step)
                values = np.repeat(np.arange(len(keys)), WIDTH).reshape(-1, WIDTH) + me
                keys = keys.view(np.uint64) if step % 2 else keys
                what = {"e": keys_of(me, step + 1)}
                got = client.push_pull({"e": (keys, values), "b": np.ones(3)}, what=what)
                assert got["e"].shape == (len(what["e"]), WIDTH)
            group.barrier()
            if not mode.holds:
                client.push({})
                client.clock()
                group.barrier()
            moved = np.array(list(total.values()))[:, None] / workers
            end = client.pull({"e": every, "b": None})
            np.testing.assert_allclose(end["e"], start - moved, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(end["b"], -steps)
            new = client.pull({"e": np.array([77, 77])})["e"]
            assert (new[0] == new[1]).all()
            group.barrier()
    facts = [one["server"] for one in group.report()["ranks"] if one["server"] is not None]
    tables = [one["models"]["m"]["tables"]["e"] for one in facts]
    workers = comm.size - (servers if placement == "dedicated" else 0)
    assert sum(table["rows"] for table in tables) == len(expected(workers, steps)[0])
    assert all(table["rows"] for table in tables)
    assert all(table["bytes"] > 8 * WIDTH * table["rows"] for table in tables)


@pytest.mark.ranks(3, further=(4,))
def test_rare_keys_and_unused_rows(comm):
    """A key without enough pushes keeps its first values; `drop` frees rows and says how many."""
    with md.ServerGroup(comm, servers=2) as group:
        policy = {"e": md.OpenRows(min_count=3)}
        client = group.add("m", model(1.0), optimizer=md.optim.sgd(1.0), rows=policy)
        if client is None:
            return
        workers, first = group.workers.size, group.workers.rank == 0
        keys = np.arange(6) * 7919
        one = np.ones((6, WIDTH))
        times = -(-3 // workers)  # steps until three pushes have named a key
        seen = [client.pull({"e": keys})["e"][0, 0]]
        seen += [
            client.push_pull({"e": (keys, one), "b": np.ones(3)}, what={"e": keys})["e"][0, 0]
            for _ in range(times + 1)
        ]
        assert seen == [1.0] * times + [0.0, -1.0]
        for _ in range(3):
            e = client.push_pull({"e": (keys[:2], one[:2])}, what={"e": keys})["e"]
        assert e[:, 0].tolist() == [-4.0] * 2 + [-1.0] * 4
        group.barrier()
        if first:
            assert client.drop(unused_for=4) == 0
            assert client.drop(unused_for=3) == 4
            assert client.drop(unused_for=1) == 0
            for bad in (0, 1.5, None, True):
                with pytest.raises(md.ConfigError, match="unused_for is"):
                    client.drop(unused_for=bad)
        group.barrier()
        assert client.pull({"e": keys})["e"][:, 0].tolist() == [-4.0] * 2 + [1.0] * 4
        e = client.push_pull({"e": (keys, one)}, what={"e": keys})["e"]
        again = 1.0 if workers < 3 else 0.0
        assert e[:, 0].tolist() == [-5.0] * 2 + [again] * 4


def state_of(comm, group):
    """The table as one checkpoint: the rows of each server are a range of all rows."""
    mine = (
        group.shards("m") if group.is_server else {"parameters": [], "optimizer": {}, "counts": []}
    )
    state = {}
    lists = {"parameters": mine["parameters"], "counts": mine["counts"], **mine["optimizer"]}
    for kind in ("parameters", "counts", "mean", "square"):
        found = [(keys, rows) for name, keys, rows in lists.get(kind, []) if name == "e"]
        keys, rows = found[0] if found else (np.empty(0, "i8"), np.empty((0, WIDTH)))
        counts = comm.allgather(len(keys))
        total, start = sum(counts), sum(counts[: comm.rank])
        if len(keys):
            width = rows.shape[1]
            state[kind] = {
                "keys": md.Shard(keys, (total,), (start,)),
                "rows": md.Shard(rows, (total, width), (start, 0)),
            }
    if group.is_server and comm.rank == group.server_ranks[0]:
        state["scalars"] = {name: np.array(x) for name, x in mine["scalars"].items()}
    return state


def saved_of(path):
    """What `load_shards` takes, read by every server from the whole checkpoint."""
    found = md.load(path)
    lists = {
        kind: [("e", found[kind]["keys"], found[kind]["rows"])]
        for kind in ("parameters", "counts", "mean", "square")
    }
    return {
        "parameters": lists["parameters"], "counts": lists["counts"], "version": 6,
        "optimizer": {"mean": lists["mean"], "square": lists["square"]},
        "scalars": found["scalars"],
    }  # fmt: skip


@pytest.mark.ranks(5)
def test_a_store_restarts_on_other_servers(comm, folder):
    """R51: keys, values, state and counts of two servers, through HDF5, on three and on one."""
    table, policy = {"e": ((None, WIDTH), "f8", "uniform")}, md.OpenRows(min_count=2)
    ends, keys = [], np.concatenate([RARE, np.arange(40) ** 5])
    nothing = np.empty(0, np.int64), np.empty((0, WIDTH))

    def push(client, first, some):
        mine = (some, np.ones((len(some), WIDTH))) if first else nothing
        client.push_pull({"e": mine}, what={"e": keys}, samples=int(first))

    for servers, placement in ((2, "dedicated"), (3, "dedicated"), (1, "colocated")):
        with md.ServerGroup(comm, servers=servers, placement=placement) as group:
            client = group.add("m", table, optimizer=md.optim.adam(0.1), rows={"e": policy}, seed=3)

            def save(tag):
                with md.CheckpointStore(comm, folder) as store:
                    store.save(1, state_of(comm, group))

            if ends and group.is_server:
                group.load_shards("m", saved_of(folder))
            if client is None:
                group.serve(on_pause=save)
            else:
                first = group.workers.rank == 0
                if not ends:
                    for step in range(6):
                        push(client, first, keys[3 * step : 3 * step + 9])
                    group.pause("save")
                    save("save")
                group.barrier()
                push(client, first, keys[18:28])
                ends.append(client.pull({"e": keys})["e"].tobytes())
                group.barrier()
        ends = comm.bcast(ends)
    assert len(ends) == 3
    assert len(set(ends)) == 1


@pytest.mark.ranks(4)
def test_wrong_calls_are_refused_and_the_servers_live_on(comm):
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", model(), optimizer=md.optim.sgd(1.0), rows={"e": "open"})
        plain = group.add("plain", {"b": ((3,), "f8")}, optimizer=md.optim.sgd(1.0))
        if client is None:
            return
        one = {"e": ([1], np.ones((1, WIDTH)))}
        if group.workers.rank == 0:
            for call, text in [
                (client.pull, r"pull 'e': an open table has no fixed rows; give keys, as what="),
                (lambda: client.pull("e"), "has no fixed rows"),
                (lambda: client.pull(out={"e": np.ones((2, WIDTH))}), "has no fixed rows"),
                (lambda: client.push_pull(one), "has no fixed rows"),
                (lambda: client.push({"e": np.ones((1, WIDTH))}), "push 'e': an open table has no"),
                (lambda: client.pull({"e": [1.5]}), "expected a 1-D integer array"),
                (lambda: client.pull({"e": [[1]]}), "expected a 1-D integer array"),
                (lambda: client.push({"e": ([1], np.ones((2, WIDTH)))}), "gradient is float64 of"),
                (lambda: plain.drop(unused_for=1), "the model has no table of open rows"),
            ]:
                with pytest.raises(md.ConfigError, match=text) as error:
                    call()
                assert "\n" not in str(error.value)
        for _ in range(2):
            got = client.push_pull(one, what={"e": np.array([1, 2**63], "u8")})["e"]
        assert np.ptp(got[0] - client.pull({"e": [1]})["e"]) == 0


def fill(comm, late):
    """Push new keys for ever, the first of them late on some ranks."""
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add(
            "m", model(), optimizer=md.optim.sgd(1.0), rows={"e": md.OpenRows(max_rows=10)},
            consistency=md.ASP(),
        )  # fmt: skip
        step = -late * comm.rank
        while client is not None:
            keys = np.array([max(0, step)])
            client.push_pull({"e": (keys, np.ones((1, WIDTH)))}, what={"e": keys})
            step += 1


@pytest.mark.ranks(4)
@pytest.mark.parametrize("late", [0, 200])
def test_too_many_rows_end_the_group_on_all_ranks(comm, late):
    """The server's error is raised everywhere, at once, and says what to do."""
    text = r"table 'e': server \d has \d+ rows and may have 5 .its share of max_rows=10"
    with pytest.raises(md.MpidistError, match=text):
        fill(comm, late)


@pytest.mark.ranks(3)
def test_what_the_ranks_or_their_arguments_must_not_be(comm):
    odd = comm.rank == 1
    with md.ServerGroup(comm) as group:
        with pytest.raises(md.MismatchError, match="open e"):
            group.add(
                "m",
                model(),
                optimizer=md.optim.sgd(1.0),
                rows={"e": md.OpenRows(min_count=1 + odd)},
            )
        own = md.optim.sgd(1.0)
        object.__setattr__(own, "rows", "")
        with pytest.raises(
            md.ConfigError, match="rows of 'e' is 'open', and optimizer sgd updates"
        ):
            group.add("m", model(), optimizer=own, rows={"e": "open"})
        with pytest.raises(md.ConfigError, match="does not fit"):
            group.add(
                "m", model(), optimizer=md.optim.adam(1.0),
                rows={"e": md.OpenRows(max_rows=2**31 - 1)},
            )  # fmt: skip
        client = group.add("m", model(), optimizer=md.optim.sgd(1.0), rows={"e": "open"})
        if client is not None:
            client.push_pull({"e": ([2], np.ones((1, WIDTH)))}, what={"e": [2]})
    with ElasticServerGroup(comm, servers=2) as group:
        group.vote(copies=False)
        with pytest.raises(md.ConfigError, match="servers of elastic runs cannot hold"):
            group.add("m", model(), optimizer=md.optim.sgd(1.0), rows={"e": "open"})
