"""Workers and servers of one host share memory: the same values, and no message with data."""

import os
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

import mpidist as md
from mpidist.errors import ConfigError
from mpidist.servers.wire import node_share
from mpidist.servers.wire.node_stream import (
    NodeClientStream,
)


@pytest.fixture
def fails(monkeypatch):
    """Shared memory that no rank can get."""

    def no_memory(*_args):
        raise ConfigError("no memory shared by the ranks of a node: full")

    monkeypatch.setattr(node_share, "Segment", no_memory)


def steps(comm, size, *, servers=1, mode=None, placement="dedicated", count=4):
    """The parameters after some steps, the bytes in messages and in memory, and the transport."""
    optimizer = md.optim.momentum(0.1)
    with md.ServerGroup(comm, servers=servers, placement=placement) as group:
        client = group.add("m", {"x": np.zeros(size)}, optimizer=optimizer, consistency=mode)
        out, stats = {"x": np.zeros(size)}, None
        if client is not None:
            gradients = {"x": np.arange(size, dtype=float)}
            for _ in range(count):
                client.push_pull(gradients, out=out)
            group.barrier()
            client.pull(out=out)
            stats = client.stats
            assert (gradients["x"] == np.arange(size)).all()
    transports = {rank["transport"]["m"] for rank in group.report()["ranks"]}
    return out["x"].tobytes(), stats, transports


@pytest.mark.covering
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("size", [7, 100_000])
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_all_data_go_through_memory(comm, size, placement):
    """Small and large models: the same values, and gradients are in no message."""
    servers = max(1, comm.size // 2)
    found, stats, transports = steps(comm, size, servers=servers, placement=placement)
    node_share.enabled = False
    try:
        expected, plain, why = steps(comm, size, servers=servers, placement=placement)
    finally:
        node_share.enabled = True
    assert found == expected
    assert transports == {"shared memory"}
    assert why == {"messages: switched off"}
    if stats is not None:
        assert plain["shared_bytes"] == 0
        large = size > 1000
        # The first push_pull of a small model is in messages, and so is its pull.
        assert stats["shared_bytes"] >= (4 if large else 3) * 8 * size
        if large:
            assert stats["bytes_sent"] < 1.1 * 8 * size  # the initial values
            assert plain["bytes_sent"] > 4 * 8 * size


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", [md.ASP(), md.SSP(1), md.BackupWorkers(1)], ids=str)
def test_modes(comm, mode):
    """Small models of any mode are pushed through memory; sums of whole numbers are exact."""
    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"x": np.zeros(5)}, optimizer=md.optim.sgd(1.0), consistency=mode)
        if client is not None:
            gradients, out = {"x": np.ones(5)}, {"x": np.zeros(5)}
            for _ in range(30):
                client.push_pull(gradients, out=out)
            group.barrier()
            client.pull(out=out)
            stats = client.stats
            assert stats["shared_bytes"] > 25 * 40
            if not isinstance(mode, md.BackupWorkers):
                assert (out["x"] == -30).all()


@pytest.mark.ranks(2)
def test_messages_are_not_overtaken(comm):
    """A push by a message, of which no answer comes, is handled before one in memory."""
    with md.ServerGroup(comm, servers=1) as group:
        one, two = (
            group.add(name, {"x": np.zeros(4)}, optimizer=md.optim.sgd(1.0), consistency=md.ASP())
            for name in ("one", "two")
        )
        if one is None:
            return
        gradients, out = {"x": np.ones(4)}, {"x": np.zeros(4)}
        for _ in range(2):
            one.push_pull(gradients, out=out)
        for step in range(3, 60):
            two.push({"x": np.full(4, 2.0)})
            two.clock()
            one.push_pull(gradients, out=out)
            assert (out["x"] == -step).all()
            if step % 5 == 0:
                assert (two.pull()["x"] == -2 * (step - 2)).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("size", [5, 100_000])
def test_no_memory(comm, fails, size):
    """Without memory, messages are sent, and the report says why."""
    found, stats, transports = steps(comm, size)
    assert transports == {"messages: no memory shared by the ranks of a node: full"}
    if stats is not None:
        assert np.frombuffer(found)[1] < 0
        assert stats["shared_bytes"] == 0


@pytest.mark.ranks(2)
def test_no_file_and_models_that_come_and_go(comm):
    """Nothing has a name in /dev/shm; memory of a removed model is not used for another one."""

    def again(_tag=None):
        group.remove("a")
        return group.add("a", {"x": np.zeros(4)}, optimizer=md.optim.sgd(1.0))

    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("a", {"x": np.zeros(3)}, optimizer=md.optim.sgd(1.0))
        if client is None:
            group.serve(on_pause=again)
            return
        for size in (3, 4):
            out, gradients = {"x": np.zeros(size)}, {"x": np.ones(size)}
            for _ in range(3):
                client.push_pull(gradients, out=out)
            assert (out["x"] == -3).all()
            if size == 3:
                group.pause("next")
                client = again()
        assert not list(Path("/dev/shm").glob(f"mpidist-{os.getpid()}-*"))


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [5, 200_000])
@pytest.mark.parametrize("mode", [md.BSP(), md.ASP()], ids=str)
def test_after_other_shares(comm, size, mode):
    """The memory is shared again by other servers, a worker that begins to serve among them."""
    changes = ({"weights": [1, 3]}, {"servers": [1, 2, 3]}, {"servers": [2]})
    given = {"optimizer": md.optim.sgd(1.0), "consistency": mode}

    def another(_tag=None):
        return group.add("b", {"x": np.zeros(size)}, **given)

    with md.ServerGroup(comm, servers=2) as group:
        client = group.add("a", {"x": np.zeros(size)}, **given)
        if client is None:
            group.serve(on_pause=another)
        else:
            clients, gradients = [client], {"x": np.ones(size)}
            for number, change in enumerate((None, *changes)):
                if change:
                    group.repartition(**change)
                if number == 2:
                    group.pause("add")
                    clients.append(another())
                for one in clients:
                    out = {"x": np.zeros(size)}
                    for _ in range(3):
                        before = one.stats
                        one.push_pull(gradients, out=out)
                    count = client.stats["shared_bytes"] - before["shared_bytes"]
                    assert count >= 8 * size
                    assert client.stats["bytes_sent"] - before["bytes_sent"] < 1000
            group.barrier()
            for one, steps in zip(clients, (12, 6), strict=True):
                assert (one.pull()["x"] == -steps).all()
    for rank in group.report()["ranks"]:
        assert rank["transport"] == {"a": "shared memory", "b": "shared memory"}


@pytest.mark.ranks(3)
def test_a_slow_reader_sees_one_version(comm, monkeypatch):
    """When BSP ends, another worker's update waits until the slow one has copied its answer."""
    size, take = 200_000, NodeClientStream._take

    def slowly(self, number):
        time.sleep(0.015)
        return take(self, number)

    with md.ServerGroup(comm, servers=1) as group:
        client = group.add("m", {"x": np.zeros(size)}, optimizer=md.optim.sgd(1.0))
        if client is None:
            return
        if comm.rank == 0:
            monkeypatch.setattr(NodeClientStream, "_take", slowly)
        for step in range(6):
            if step == 2:
                client.consistency = md.ASP()
            seen = client.push_pull({"x": np.full(size, -1.0)})["x"]
            assert seen.min() == seen.max()
            if step < 2:
                seen = client.pull()["x"]
                assert seen.min() == seen.max() == step + 1
        group.barrier()
        assert (client.pull()["x"] == 6).all()


class Counting:
    """An optimizer that updates in pieces would confuse."""

    elementwise, updates = True, 0

    def init(self, parameters):
        return {}

    def update(self, gradients, state, parameters):
        self.updates += 1
        for name, gradient in gradients.items():
            parameters[name] -= gradient / self.updates


def refuse(*_args):
    raise ConfigError("ranks of this node cannot reach each other: forbidden")


#: How a large model is added, and why its pushes are messages outside BSP.
LARGE = {
    "sgd": ({}, ""),
    "adam": ({"optimizer": md.optim.adam(0.1)}, ""),
    "dropped": ({"stale": md.DropStale(beyond=0), "global_batch": 6}, ""),
    "clip": ({"clip_norm": 50.0}, "clip_norm needs whole gradients"),
    "own": ({"optimizer": Counting()}, "optimizer Counting updates whole tensors"),
    "delay": ({"stale": md.DelayCompensated(0.1)}, "DelayCompensated(lam=0.1)"),
    "forbidden": ({}, "ranks of this node cannot reach each other: forbidden"),
}


@pytest.mark.covering
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", LARGE)
def test_large_models_outside_bsp(comm, kind, monkeypatch):
    """The bits are those of messages; where it is possible, pushes are read where they are."""
    more, why = LARGE[kind]
    model, found = {"x": (100_003,), "y": (3, 2), "z": (40, 1000)}, []
    if kind == "forbidden":
        monkeypatch.setattr(node_share, "CrossMemory", refuse)
    for sharing in (True, False):
        monkeypatch.setattr(node_share, "enabled", sharing)
        # One worker only, so that the order of pushes is always the same.
        with md.ServerGroup(comm, servers=comm.size - 1) as group:
            given = {"optimizer": md.optim.sgd(0.1), "consistency": md.ASP(), **deepcopy(more)}
            specs = {name: (shape, "f4" if name == "z" else "f8") for name, shape in model.items()}
            client = group.add("m", specs, **given)
            if client is not None:
                rng, seen = np.random.default_rng(0), []
                out = {name: np.zeros(*spec) for name, spec in specs.items()}
                for step in range(6):
                    grads = {
                        n: rng.standard_normal(x.shape).astype(x.dtype) for n, x in out.items()
                    }
                    results = client.push_pull(
                        grads, out=[grads, None, out][step % 3], samples=[3, 0, 5][step % 3]
                    )
                    seen += [results[name].tobytes() for name in model]
                seen.append(client.push_pull(grads, what="y", samples=1)["y"].tobytes())
                client.push(grads, samples=1)
                client.clock()
                seen += [x.tobytes() for x in client.pull().values()]
                found.append((seen, client.stats["bytes_sent"], client.dropped))
        (transport,) = {rank["transport"]["m"] for rank in group.report()["ranks"]}
        if not sharing:
            assert transport == "messages: switched off"
        else:
            start = "shared memory" + "; pushes " * bool(why)
            assert transport.startswith(start)
            assert transport.endswith(why)
    if found:
        (shared, fewer, _), (plain, sent, _) = found
        assert shared == plain
        size = 8 * 100_009 + 4 * 40_000
        # The push alone, and the push to servers of which nothing was pulled, are messages.
        assert fewer < 2.1 * size if not why else fewer > 8 * size
        assert sent > 8 * size


@pytest.mark.covering
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "mode", [md.ASP(), md.SSP(0), md.SSP(1), md.DSSP(1, 3), md.BackupWorkers(1)], ids=str
)
@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_large_models_of_several_workers(comm, mode, placement):
    """All pushes count once, and each worker gets parameters of one version."""
    size, steps = 150_000, 12
    with md.ServerGroup(comm, servers=2, placement=placement) as group:
        sgd = md.optim.sgd(1.0)
        client = group.add("m", {"x": np.zeros(size)}, optimizer=sgd, consistency=mode)
        if client is None:
            return
        workers = group.workers.size
        gradients, out = {"x": np.full(size, -float(workers))}, {"x": np.zeros(size)}
        for step in range(steps):
            if step == 6 and not isinstance(mode, md.BackupWorkers):
                client.consistency = md.ASP() if step == 6 and mode != md.ASP() else md.SSP(2)
            client.push_pull(gradients, out=out)
            for half in np.split(out["x"], 2):
                assert half.min() == half.max()
            time.sleep(0.002 * (comm.rank == step % 3))
        if isinstance(mode, md.BackupWorkers):
            return  # the others need not wait for this worker
        group.barrier()
        assert (client.pull()["x"] == steps * workers).all()
