"""Backup workers on real ranks: who counts, who is late and is told, pauses, and md.train (R92)."""

import time

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError, ProtocolError
from mpidist.training.exchanges.server_exchange import Served

SGD = md.optim.sgd(1.0)
LAST = 20


def pushed(client, value=-1.0):
    """A push of ones, as this model has them."""
    return {t.name: np.full(t.shape, value, t.dtype) for t in client.layout.tensors}


def spec():
    return {"x": np.zeros(8), "y": np.zeros((5, 4), "f4"), "z": np.zeros(3, "f2")}


@pytest.mark.covering
@pytest.mark.ranks(4, 6)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
@pytest.mark.parametrize("spare", [0, 1, "most"])
def test_only_pushes_of_the_newest_parameters_count(comm, servers, placement, spare):
    """The last worker is slow. Each round makes one update of the mean, which is one here."""
    workers = comm.size - (servers if placement == "dedicated" else 0)
    spare = workers - 1 if spare == "most" else spare
    mode = md.BackupWorkers(spare)
    with md.parameter_server(
        comm, spec(), servers=servers, placement=placement, consistency=mode, optimizer=SGD
    ) as client:
        if client is not None:
            me, pushes, got = client.group.workers.rank, 0, client.pull()
            while client.finished < LAST:
                if me == workers - 1:
                    time.sleep(0.01)
                clock, dropped = client.finished, client.dropped
                new = client.push_pull(pushed(client))
                pushes += 1
                if client.dropped == dropped:  # it counted, and was of the parameters of its round
                    assert all(np.allclose(array, clock, atol=0.1) for array in got.values()), clock
                else:
                    assert client.dropped == dropped + 1
                got = new
            stats = client.stats
            assert pushes + stats["skipped"] == client.finished
            assert sum(stats["staleness"].values()) == pushes - stats["dropped"]
            assert set(stats["staleness"]) <= {0}
            assert spare or not stats["dropped"]
            client.close()
            client.group.barrier()
            group = client.group
    if client is not None:
        models = [r["server"]["models"]["model"] for r in group.report()["ranks"] if r["server"]]
        # All servers have made the same updates, and dropped the same pushes.
        assert len({(m["updates"], tuple(m["dropped"]), tuple(m["clocks"])) for m in models}) == 1
        assert models[0]["updates"] >= LAST
        if spare > 0:  # mostly the last worker's, but a busy machine may make others late
            assert sum(models[0]["dropped"]) > 0


@pytest.mark.ranks(5)
def test_single_calls_rows_and_a_second_pull(comm):
    """push, clock and pull one by one; a push without clock counts when its worker leaves."""
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add(
            "m", {"w": ((60, 4), "f4", 0.0)}, optimizer=SGD, consistency=md.BackupWorkers(1)
        )
        if client is not None:
            me = group.workers.rank
            while client.finished < 8:
                rows = np.arange(me, 60, 7)
                before, clock = client.pull({"w": rows})["w"], client.finished
                time.sleep(0.01 * (me == 2))
                again = client.pull({"w": rows})["w"]
                # Nobody makes an update in the step of a worker that is not late.
                assert (again >= before).all()
                client.push({"w": (rows, -np.ones((len(rows), 4)))}, samples=2 + me)
                client.clock()
                assert client.finished == clock + 1
            client.close()
            group.barrier()


@pytest.mark.ranks(4)
def test_workers_leave_early(comm):
    """A round needs n - k pushes, or those of all who are left."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", spec(), optimizer=SGD, consistency=md.BackupWorkers(1))
        if client is not None:
            me = group.workers.rank
            while client.finished < 4 * (1 + me):
                client.push_pull(pushed(client))
            client.push(pushed(client))
            client.close()
    server = next(r["server"] for r in group.report()["ranks"] if r["server"])
    facts = server["models"]["m"]
    assert facts["updates"] == 13  # the last one's 12 rounds, and its push without a clock
    workers = [r["clients"]["m"] for r in group.report()["ranks"] if r["clients"]]
    # A late worker may pass over its last clocks, and then goes on at a later one.
    pushes = sum(worker["clocks"] - worker["skipped"] + 1 for worker in workers)
    assert sum(facts["staleness"].values()) + sum(facts["dropped"]) == pushes


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_pauses_and_another_model(comm, placement):
    """All workers come to a pause at one clock: nobody passes it. Models have their own modes."""
    with md.ServerGroup(comm, servers=2, placement=placement) as group:
        client = group.add("m", spec(), optimizer=SGD, consistency=md.BackupWorkers(1))
        other = group.add("n", spec(), optimizer=SGD, consistency=md.ASP())
        third = group.add("o", spec(), optimizer=SGD, consistency=md.DSSP(1, 4))
        saved = []
        if client is None:
            group.serve(on_pause=lambda tag: saved.append((tag, group.shards("m")["version"])))
            assert saved == [(5, 5), (10, 10), (15, 15)]
            return
        me = group.workers.rank
        while client.finished < LAST:
            if me == 0:
                time.sleep(0.01)
            client.push_pull(pushed(client))
            other.push_pull(pushed(other))
            third.push_pull(pushed(third))
            if client.finished in (5, 10, 15):
                group.pause(client.finished)
                if group.is_server:
                    saved.append(group.shards("m")["version"])
        assert saved == ([5, 10, 15] if group.is_server else [])


@pytest.mark.covering
@pytest.mark.ranks(4, 5)
@pytest.mark.parametrize("spare", [1, "most"])
def test_a_worker_that_begins_late_meets_the_others_at_each_save(comm, spare, tmp_path_factory):
    """Its first pull would pass over a step that the others save."""
    folder = comm.bcast(str(tmp_path_factory.mktemp("run")) if comm.rank == 0 else None)
    mode = md.BackupWorkers(comm.size - 2 if spare == "most" else spare)

    def late(*args, **more):
        time.sleep(0.3)
        return begin(*args, **more)

    begin = Served.begin
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(Served, "begin", late)
        summary = md.train(
            comm, md.models.mlp([4, 3], seed=1), (np.ones((64, 4), "f4"), np.zeros(64, int)),
            optimizer=SGD, global_batch=8, steps=12, checkpoint=folder, checkpoint_every=1,
            strategy=md.ParameterServer(1, mode),
        )  # fmt: skip
    assert summary.steps == 12


@pytest.mark.ranks(4)
def test_what_cannot_be(comm):
    with md.ServerGroup(comm, servers=1) as group:
        with pytest.raises(ConfigError, match=r"count=3 of 3 workers leaves none .* at most 2"):
            group.add("m", spec(), optimizer=SGD, consistency=md.BackupWorkers(3))
        group.add("m", spec(), optimizer=SGD)


@pytest.mark.ranks(4)
def test_one_waits_in_a_barrier_and_the_rest_for_it(comm):
    """Two of three count; one is in a barrier, one gives up: who waits for whom is told."""
    own = comm.Dup()

    def run():
        with md.parameter_server(
            own, spec(), optimizer=SGD, consistency=md.BackupWorkers(1)
        ) as client:
            if client is not None:
                client.push_pull(pushed(client)) if comm.rank == 0 else client.group.barrier()

    with pytest.raises(ProtocolError, match="workers wait for each other: rank 0 waits in a pull"):
        run()
    md.free(own)
    own.Free()
