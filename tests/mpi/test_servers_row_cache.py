"""A worker's row cache: how old cached rows may be in each mode, own pushes, what forgets them.

Each worker counts its pushes in a column of its own, so that a row tells which pushes it has.
"""

import time

import numpy as np
import pytest

import mpidist as md

ROWS, EVERY = 120, 3
PULLED = np.r_[np.arange(0, ROWS, 10), 5, 5, 20]


def pushed(step):
    """The rows that all workers push in a step."""
    return np.arange(step % EVERY, ROWS, EVERY)


def counted(rows, steps):
    """How many pushes of the first `steps` steps of a worker name each row."""
    return np.array([sum(step % EVERY == row % EVERY for step in range(steps)) for row in rows])


def constant(rate):
    """A schedule, of which a worker knows nothing: it forgets the rows that it pushes."""
    return lambda step: rate


def answered(client, what):
    """Ask the servers, so that they have all messages of this worker when the call returns."""
    client.forget_rows()
    client.pull(what)


def train(
    comm,
    mode,
    cache,
    steps=14,
    rate=float,
    table=((ROWS, None), "lazy", "ranges"),
    slow=0,
    changes=(),
    **where,
):
    """Check what every pull may and must contain; return the client's statistics."""
    (count, _), rows, spread = table
    with md.ServerGroup(comm, servers=max(1, comm.size // 2), **where) as group:
        workers = len(group.worker_ranks)
        client = group.add(
            "m", {"e": ((count, workers), "f8"), "b": ((2,), "f8")},
            consistency=mode, rows={"e": rows},
            optimizer=md.optim.sgd(rate(workers)), spread={"e": spread},
            cache_rows=cache,
        )  # fmt: skip
        if client is None:
            return None
        me = group.workers.rank
        rng = np.random.default_rng(me)
        got = client.pull({"e": PULLED})["e"]
        for step in range(steps):
            check(got, mode, me, step)
            again = client.pull({"e": PULLED[::-1], "b": None})["e"]
            check(again[::-1], mode, me, step)
            coming = mode
            if step in changes:
                client.consistency = coming = changes[step]
                client.set_optimizer(md.optim.sgd(float(workers)))
            time.sleep(rng.uniform(0, 0.004) + 0.01 * (slow and me == 0 and step % 4 == 0))
            gradient = np.zeros((len(pushed(step)), workers))
            gradient[:, me] = -1
            gradients = {"e": (pushed(step), gradient)}
            if step % 2:
                got = client.push_pull(gradients, what={"e": PULLED})["e"]
            else:
                client.push(gradients)
                check(client.pull({"e": PULLED})["e"], mode, me, step, own=not mode.holds)
                client.clock()
                got = client.pull({"e": PULLED})["e"]
            mode = coming
        answered(client, {"e": np.arange(ROWS)})
        group.barrier()
        client.push({})
        client.clock()
        group.barrier()
        client.forget_rows()
        every = client.pull({"e": np.arange(ROWS)})["e"]
        assert (every == counted(range(ROWS), steps)[:, None]).all()
        return client.stats


def check(got, mode, me, step, own=0):
    """A worker's own pushes are all there, others' at least those that the mode guarantees."""
    others = np.delete(got, me, axis=1)
    assert (got[:, me] == counted(PULLED, step + own)).all(), (step, got[:, me])
    if mode.bound is not None:
        least = counted(PULLED, max(0, step - mode.bound))
        assert (others >= least[:, None]).all(), (step, others, least)
    if mode.bound == 0 and mode.holds:
        assert (others == counted(PULLED, step)[:, None]).all()


TABLES = [
    ((ROWS, None), "lazy", "ranges"),
    ((ROWS, None), "lazy", "rows"),
    ((None, None), "open", "ranges"),
]


@pytest.mark.covering
@pytest.mark.ranks(5)
@pytest.mark.parametrize("table", TABLES, ids=["ranges", "dealt", "open"])
@pytest.mark.parametrize(
    ("mode", "rate"),
    [(md.SSP(4), float), (md.SSP(1), constant), (md.SSP(4), constant), (md.DSSP(1, 3), float),
     (md.SSP(0), float), (md.BSP(), float)],
    ids=str,
)  # fmt: skip
def test_cached_rows_keep_the_bound(comm, mode, rate, table):
    """SSPTable's rule, for a worker's own pushes as well; the gaps of workers keep the bound."""
    stats = train(comm, mode, ROWS, rate=rate, table=table, slow=1)
    if stats is None:
        return
    assert max(stats["gaps"]) <= mode.bound
    cache, distinct = stats["cache"], len(np.unique(PULLED))
    assert cache["hits"] + cache["misses"] > 28 * distinct
    if mode.bound == 0:  # once in each clock
        assert cache["misses"] == 15 * distinct + 2 * ROWS
        assert cache["quiet"] == 7  # the pull after a push, in every other clock
    else:
        assert cache["hits"] > 14 * distinct


@pytest.mark.ranks(4)
def test_asp_asks_again_after_max_age(comm):
    """Without a bound, no row is used for more than `max_age` steps after its step."""
    for age in (0, 2):
        stats = train(comm, md.ASP(), md.RowCache(ROWS, max_age=age))
        if stats is not None:
            distinct = len(np.unique(PULLED))
            asked = (stats["cache"]["misses"] - 2 * ROWS) / distinct  # times in 15 steps
            assert asked == (15 if age == 0 else 5)


@pytest.mark.ranks(4)
def test_backup_workers_see_their_own_pushes(comm):
    """They have no bound, and servers hold pushes, which a worker thus cannot apply itself."""
    for cache in (md.RowCache(ROWS, max_age=4), ROWS):
        train(comm, md.BackupWorkers(0), cache)


@pytest.mark.ranks(5)
def test_the_mode_and_the_optimizer_change(comm):
    """A worker still sees its own pushes, and no row is older than the new mode allows."""
    changes = {3: md.BSP(), 5: md.SSP(4), 10: md.SSP(0), 12: md.DSSP(1, 2)}
    stats = train(comm, md.SSP(3), ROWS, steps=18, changes=changes, slow=1)
    if stats is not None:
        assert stats["cache"]["hits"] > 18 * len(np.unique(PULLED))


@pytest.mark.ranks(3)
def test_a_mode_without_a_bound_needs_max_age(comm):
    with md.ServerGroup(comm) as group:
        client = group.add("m", {"e": ((900, 2), "f4")}, optimizer=md.optim.sgd(1.0), cache_rows=9)
        if client is not None:
            with pytest.raises(md.ConfigError, match=r"md\.RowCache"):
                client.consistency = md.ASP()
            client.push_pull({"e": ([2], np.ones((1, 2)))}, what={"e": [2]})


@pytest.mark.ranks(3)
def test_a_cache_of_few_rows(comm):
    """The least recently used rows go; the values stay right."""
    stats = train(comm, md.SSP(3), 4, placement="colocated")
    if stats is not None:
        assert stats["cache"]["rows"] <= 4
        assert stats["cache"]["misses"] > 100


@pytest.mark.ranks(4)
def test_steps_with_cached_rows_only_send_no_request(comm):
    """One message per server ends a step, and none comes back; servers are asked now and then."""
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add(
            "m", {"e": ((1000, 8), "f4")}, optimizer=md.optim.sgd(1.0), consistency=md.ASP(),
            cache_rows=md.RowCache(10, max_age=1000),
        )  # fmt: skip
        if client is None:
            return
        what, counts = {"e": np.array([1, 998])}, []
        client.pull(what)
        group.barrier()
        for step in range(40):
            before = client.stats
            e = client.push_pull({"e": ([1, 1], np.ones((2, 8)))}, what=what)["e"]
            after = client.stats
            counts.append([after[k] - before[k] for k in ("messages_sent", "messages_received")])
            assert e[0, 0] == -(step + 1.0)
        assert counts.count([2, 0]) >= 36
        assert 1 <= counts.count([2, 2]) <= 4
        assert client.stats["cache"]["misses"] == 2
        answered(client, what)
        group.barrier()
        client.forget_rows()
        assert client.pull(what)["e"][0, 0] == -40 * group.workers.size


@pytest.mark.ranks(3)
def test_what_forgets_cached_rows(comm):
    """A pause (for a restore), a drop, and a push of the whole tensor."""
    what = {"e": np.array([1, 3])}

    def restore(tag):
        if group.is_server:
            held = group.shards("m")
            held["parameters"][0][2][...] = 7
            group.load_shards("m", held)

    with md.ServerGroup(comm, servers=1) as group:
        settings = {
            "optimizer": md.optim.sgd(1.0), "consistency": md.SSP(8), "cache_rows": 100
        }  # fmt: skip
        client = group.add("m", {"e": ((500, 2), "f4")}, **settings)
        table = group.add("open", {"e": ((None, 2), "f4")}, rows="open", **settings)
        if client is None:
            group.serve(on_pause=restore)
            return
        one = {"e": (what["e"], np.ones((2, 2)))}
        for each in (client, table):
            each.pull(what)
            for _ in range(2):
                each.push_pull(one, what=what)
            assert each.stats["cache"]["misses"] == 2
        group.pause("restore")
        group.barrier()
        assert (client.pull(what)["e"] == 7).all()
        group.barrier()
        client.push({"e": np.ones((500, 2), "f4")})
        group.barrier()
        assert (client.pull(what)["e"] < 7).all()
        client.clock()
        assert (table.pull(what)["e"] < 0).all()
        table.push_pull({}, what=what)
        group.barrier()
        table.push_pull({}, what=what)
        answered(table, what)
        group.barrier()
        if group.workers.rank == 0:
            assert table.drop(unused_for=1) == 2
            assert (table.pull(what)["e"] == 0).all()


@pytest.mark.ranks(3)
def test_arguments(comm):
    with md.ServerGroup(comm) as group:
        for given, text in [
            ({"consistency": md.ASP(), "cache_rows": 10}, r"md.RowCache\(10, max_age=...\)"),
            (
                {"consistency": md.SSP(2), "cache_rows": 10, "stale": md.DropStale(5)},
                "do not know the age of gradients",
            ),
            ({"cache_rows": True}, "cache_rows is True"),
        ]:
            with pytest.raises(md.ConfigError, match=text) as error:
                group.add("m", {"e": ((900, 2), "f4")}, optimizer=md.optim.sgd(1.0), **given)
            assert "\n" not in str(error.value)
        client = group.add("m", {"e": ((900, 2), "f4")}, optimizer=md.optim.sgd(1.0), cache_rows=2)
        if client is not None:
            out = {"e": np.zeros((2, 3, 2), "f4")[:, ::2].transpose(0, 2, 1)[:, :, 0]}
            got = client.pull({"e": [0, 3]}, out=out)
            assert got["e"] is out["e"]
            assert (client.pull({"e": np.empty(0, int)})["e"]).shape == (0, 2)
            client.push_pull({"e": ([2], np.ones((1, 2)))}, what={"e": [2]})
