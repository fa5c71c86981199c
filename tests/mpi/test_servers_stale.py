"""Stale gradients on real ranks: dropped, scaled, compensated; the workers are told (R23, R24)."""

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError, MismatchError

SGD = md.optim.sgd(1.0)
STEPS = 25


def one_late(comm, stale, *, samples=None, servers=1, placement="dedicated", late_samples=4):
    """The first worker pulls, the second one does its steps, and then the first one pushes.

    Slow by order, and not by the clock on the wall.
    """
    with md.parameter_server(
        comm, {"x": np.zeros(40), "y": np.zeros((6, 5), "f4")}, servers=servers, optimizer=SGD,
        placement=placement, consistency=md.ASP(), stale=stale, global_batch=4,
    ) as client:  # fmt: skip
        if client is None:
            return None
        workers = client.group.workers
        client.pull()
        client.group.barrier()
        if workers.rank == 0:
            client.group.barrier()
            ones = {"x": np.full(40, -1.0), "y": np.full((6, 5), -1.0, "f4")}
            client.push_pull(ones, samples=late_samples)
            before, after = client.finished, client.pull()
            client.group.barrier()
            return client, before, after
        for _ in range(STEPS if workers.rank == 1 else 0):
            client.push_pull({"x": np.full(40, -1.0), "y": np.full((6, 5), -1.0, "f4")}, samples=4)
        client.group.barrier()
        client.group.barrier()
        return client, None, client.pull()


@pytest.mark.covering
@pytest.mark.ranks(4, 6)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_an_old_push_is_dropped_and_its_worker_told(comm, servers, placement):
    found = one_late(comm, md.DropStale(20), servers=servers, placement=placement)
    if found is None:
        return
    client, _, values = found
    assert client.dropped == (comm.rank == 0)
    assert (values["x"] == STEPS).all()
    assert (values["y"] == STEPS).all()
    models = [r["server"]["models"]["model"] for r in client.group.report()["ranks"] if r["server"]]
    assert [m["dropped"][0] for m in models] == [1] * servers
    assert all(m["applied"][:2] == [0, STEPS] for m in models)


@pytest.mark.ranks(3)
def test_an_old_push_of_much_data_is_kept(comm):
    """R24, by a number, and by a share of the global batch of 4."""
    for enough in (8, 0.75):
        for samples in (2, 8):
            found = one_late(comm, md.DropStale(20, enough), late_samples=samples)
            if found is not None:
                kept = samples >= (enough if enough >= 1 else 4 * enough)
                assert (found[2]["x"] == STEPS + (samples / 4 if kept else 0)).all()


@pytest.mark.ranks(3)
def test_an_old_push_is_scaled(comm):
    found = one_late(comm, md.ScaleStale(half_life=STEPS / 2))
    if found is not None:
        # The others' pushes are of age 0: there is one other worker.
        np.testing.assert_allclose(found[2]["x"], STEPS + 0.25)
        assert found[0].dropped == 0


@pytest.mark.ranks(2, 4, further=(3,))
def test_an_old_push_is_compensated(comm):
    """g + lam * g * g * (w - w_pulled) is -1 + 0.01 * 25 there. Two workers, 1 or 2 servers."""
    placement = "colocated" if comm.size == 2 else "dedicated"
    servers = {2: 2, 3: 1, 4: 2}[comm.size]
    found = one_late(comm, md.DelayCompensated(0.01), servers=servers, placement=placement)
    if found is not None:
        for values in found[2].values():
            np.testing.assert_allclose(values, STEPS + 1 - 0.01 * STEPS, rtol=1e-5)


@pytest.mark.ranks(3)
def test_one_rank_gives_another_policy(comm):
    params = {"x": np.zeros(3)}
    with md.ServerGroup(comm, servers=1) as group:
        odd = md.ScaleStale(4 + (comm.rank == 1))
        with pytest.raises(MismatchError, match="stale differs: rank 1"):
            group.add("m", params, optimizer=SGD, consistency=md.ASP(), stale=odd)
        with pytest.raises(ConfigError, match="needs consistency ASP"):
            group.add("m", params, optimizer=SGD, stale=md.DropStale(1))
        with pytest.raises(ConfigError, match="give a policy, not its name"):
            group.add("m", params, optimizer=SGD, consistency=md.ASP(), stale="keep")
        group.add("m", params, optimizer=SGD, consistency=md.DSSP(1, 2), stale=md.DropStale(1))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_compensation_of_a_piece_that_ends_within_a_row(comm, placement):
    """Two servers divide a tensor of 1 row of 7000 and one of 31 rows of 33."""
    spec = {"x": np.zeros((1, 7000)), "y": np.zeros((31, 33), "f4")}
    with md.parameter_server(
        comm, spec, servers=2, placement=placement, optimizer=SGD, consistency=md.ASP(),
        stale=md.DelayCompensated(0.5), global_batch=1,
    ) as client:  # fmt: skip
        if client is None:
            return
        whole = {name: np.full(array.shape, -1.0) for name, array in spec.items()}
        group = client.group
        client.pull()
        group.barrier()
        if group.workers.rank == 1:
            client.push_pull(whole, samples=1)
        group.barrier()
        if group.workers.rank == 0:  # its gradient is of the zeros that it has pulled
            client.push_pull(whole, samples=1)
        group.barrier()
        for array in client.pull().values():
            assert (array == 1.5).all()  # 1 + 1 - 0.5 * 1 * 1


def loaded_in_a_pause(comm, stale, version):
    """Every worker pulls, makes 10 steps, and 1 more after the servers have loaded a state."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "m", {"x": np.zeros(4)}, optimizer=SGD, consistency=md.ASP(), stale=stale
        )

        def load(tag):
            state = group.shards("m")
            state["version"] = version
            state["parameters"] = [(n, at, np.zeros_like(a)) for n, at, a in state["parameters"]]
            group.load_shards("m", state)

        if client is None:
            group.serve(on_pause=load)
            return None, group
        for _ in range(10):
            client.push_pull({"x": np.ones(4)})
        group.pause("load")
        client.push_pull({"x": -np.ones(4)})
        group.barrier()
        return client.pull()["x"], group


@pytest.mark.ranks(3)
@pytest.mark.parametrize("version", [0, 5000])
def test_ages_after_a_state_was_loaded(comm, version):
    """The number of updates jumps back or on. An age is never negative, nor thousands."""
    values, group = loaded_in_a_pause(comm, md.ScaleStale(4), version)
    if values is not None:
        np.testing.assert_allclose(values, 0.5 + 0.5 * 2**-0.25)
    facts = next(r["server"] for r in group.report()["ranks"] if r["server"])["models"]["m"]
    assert 0 <= min(facts["staleness"]) <= max(facts["staleness"]) < 20
    assert facts["updates"] == version + 2


@pytest.mark.ranks(3)
def test_the_first_push_after_a_state_was_loaded(comm):
    """It is not as old as all the updates of the run that saved the state."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add(
            "m", {"x": np.zeros(4)}, optimizer=SGD, consistency=md.ASP(), stale=md.DropStale(4)
        )
        if client is None:
            group.load_shards("m", {**group.shards("m"), "version": 1000})
        else:
            client.push_pull({"x": -np.ones(4)})
            group.barrier()
            assert (client.pull()["x"] == 1).all()
            assert client.dropped == 0
