"""Read and set the shards of servers, and pause the servers for it."""

import numpy as np
import pytest

import mpidist as md

SHAPES = {"w": ((60, 7), "f4"), "b": ((7,), "f4"), "s": ((), "f8")}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.standard_normal(s), d) for n, (s, d) in SHAPES.items()}


def train(group, client, clocks, params):
    for clock in clocks:
        client.push_pull(arrays((group.workers.rank, clock)), out=params)


def save(comm, group):
    """All servers' shards, as one dict on all ranks; what a checkpoint keeps."""
    mine = group.shards("m") if group.is_server else None
    every = [shard for shard in comm.allgather(mine) if shard]
    merged = {**every[0], "parameters": [], "optimizer": {}}
    for shard in every:
        merged["parameters"] += shard["parameters"]
        for slot, pieces in shard["optimizer"].items():
            merged["optimizer"].setdefault(slot, []).extend(pieces)
        assert shard["version"] == every[0]["version"]
    return merged


@pytest.mark.covering
@pytest.mark.ranks(5, further=(7,))
@pytest.mark.parametrize("make", [md.optim.sgd, md.optim.momentum, md.optim.adam])
def test_pause_save_and_go_on_elsewhere(comm, make):
    """R52's part here: saved by 2 servers in mid-training, continued by 1 and 3: the same bits."""
    saved = []
    params = arrays(0)
    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("m", params, optimizer=make(0.05))
        if client is None:
            group.serve(on_pause=lambda tag: saved.append((tag, save(comm, group))))
        else:
            train(group, client, range(3), params)
            group.pause("step-3")
            saved.append(("step-3", save(comm, group)))
            halfway = {name: value.copy() for name, value in params.items()}
            train(group, client, range(3, 6), params)
    ((tag, state),) = saved
    assert tag == "step-3"
    assert state["version"] == state["clock"] == 3
    assert sum(piece.size for *_, piece in state["parameters"]) == 60 * 7 + 7 + 1
    finished, workers = comm.bcast((params, comm.size - 2), 0)
    for placement, servers in [("dedicated", 2), ("colocated", 1), ("colocated", 3)]:
        # The sum of a clock runs over the same workers, wherever the servers are.
        sub = comm.Split(0 if comm.rank < (comm.size - 2 + 2 * (placement == "dedicated")) else 1)
        if sub.size == workers or placement == "dedicated":
            again = arrays(1)
            with md.ServerGroup(sub, servers=servers, placement=placement) as group:
                client = group.add("m", again, optimizer=make(0.05))
                if group.is_server:
                    group.load_shards("m", state)
                if client is not None:
                    group.barrier()
                    client.pull(out=again)
                    if comm.rank == 0:
                        assert all((again[n] == halfway[n]).all() for n in again)
                    train(group, client, range(3, 6), again)
                    assert all((again[n] == finished[n]).all() for n in again)
        sub.Free()


@pytest.mark.ranks(3)
def test_shards_are_live_and_must_be_covered(comm):
    with md.ServerGroup(comm, servers=[0]) as group:
        client = group.add("m", {"x": np.zeros(10)}, optimizer=md.optim.momentum(0.1))
        if group.is_server:
            shard = group.shards("m")
            ((name, start, array),) = shard["parameters"]
            assert (name, start, array.size) == ("x", 0, 10)
            array[:] = 5
            for key in ("parameters", "optimizer", "scalars"):
                less = {**shard, key: type(shard[key])()}
                with pytest.raises(md.ConfigError, match="load_shards: "):
                    group.load_shards("m", less)
            with pytest.raises(md.ConfigError, match="no model 'n' here"):
                group.shards("n")
        else:
            with pytest.raises(md.ProtocolError, match="holds no shards"):
                group.shards("m")
            assert client.pull()["x"].tolist() == [5] * 10


@pytest.mark.ranks(3)
@pytest.mark.parametrize("placement", ["colocated", "dedicated"])
def test_a_pause_is_after_all_pushes(comm, placement):
    """What was pushed before a pause is in the shards, whoever was slow; twice in a row works."""
    seen = []
    with md.ServerGroup(comm, servers=1, placement=placement) as group:
        client = group.add(
            "m", {"x": np.zeros(4)}, optimizer=md.optim.sgd(1.0), consistency=md.ASP()
        )

        def look(tag=None):
            if group.is_server:
                seen.append(float(group.shards("m")["parameters"][0][2][0]))
            comm.Barrier()

        if client is None:
            group.serve(look)
        else:
            for tag in range(3):
                client.push({"x": np.full(4, -float(group.workers.size))})
                client.clock()
                group.pause(tag)
                look()
    if seen:
        workers = 2 if placement == "dedicated" else 3
        assert seen == [workers * n for n in (1, 2, 3)]


@pytest.mark.ranks(3)
def test_pauses_that_cannot_be(comm):
    def run(tag, push=False, **options):
        with md.parameter_server(
            comm, {"x": np.zeros(4)}, optimizer=md.optim.sgd(1.0), **options
        ) as client:
            if push:
                client.push({"x": np.ones(4)})
            client.group.pause(tag)

    with pytest.raises(md.ProtocolError, match="has no on_pause; call group"):
        run("a")
    with pytest.raises(md.ProtocolError, match="pause: different tags"):
        run(comm.rank, on_pause=print)
    with pytest.raises(md.ProtocolError, match=r"or have pushed without clock\(\)"):
        run("a", push=True, placement="colocated")
